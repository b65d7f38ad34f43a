"""Choose the backend: how a base model is loaded and gets its LoRA. All later code is the same for all backends."""

from pathlib import Path
from typing import Protocol

import torch
from peft import LoraConfig, PeftModel
from transformers import PreTrainedModel
from transformers.utils import cached_file

from trainer.domain.base import BaseModel, fingerprint
from trainer.errors import AdapterMismatch, ModelUnusable
from trainer.learner import hf, unsloth
from trainer.learner.sharded import backend as sharded
from whetstone.config.trainer import TrainerSettings
from whetstone.registry.adapters import read_manifest


class Backend(Protocol):
    """The interface of a backend module."""

    def load(self, model_path: str | Path, settings: TrainerSettings, device: torch.device, /) -> PreTrainedModel:
        """Load the base model onto its device. Raises ModelUnusable."""

    def adapted(self, model: PreTrainedModel, config: LoraConfig, settings: TrainerSettings, /) -> PeftModel:
        """Return the model with a LoRA on it, initialized from the process's RNG. Raises ModelUnusable."""

    def made_ready(self, model: PeftModel, settings: TrainerSettings, /) -> None:
        """Switch dropout off, and checkpointing as the settings require."""


def backend_of(settings: TrainerSettings) -> Backend:
    """Return the backend of the settings."""
    if settings.sharding == "fsdp":
        return sharded
    return {"hf": hf, "unsloth": unsloth}[settings.backend]


def device_of(settings: TrainerSettings) -> torch.device:
    """Return the device of the settings; `auto` is the first available of cuda, mps and cpu."""
    if settings.device != "auto":
        return torch.device(settings.device)
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def base_of(model_path: str | Path) -> BaseModel:
    """Return the base model's fingerprint.

    Raises:
        ModelUnusable: its files do not exist.
    """
    return fingerprint(folder_of(model_path), Path(model_path).name)


def check_base(adapter_folder: Path, base: BaseModel) -> None:
    """Check that an adapter was trained on this base model.

    Raises:
        AdapterDamaged: its manifest cannot be read.
        AdapterMismatch: it was trained on another one.
    """
    manifest, _ = read_manifest(adapter_folder)
    if differs := base.differs_in(manifest["base_model"]):
        raise AdapterMismatch(f"{adapter_folder}: trained on another base model than {base.name}: {differs}")


def folder_of(model_path: str | Path) -> Path:
    """Return the folder of the base model's files. `model_path` is a folder or a name on the hub.

    Raises:
        ModelUnusable: its files do not exist.
    """
    try:
        config = cached_file(str(model_path), "config.json")
    except OSError as error:
        raise ModelUnusable(f"{model_path}: {error}") from error
    if config is None:
        raise ModelUnusable(f"{model_path}: no config.json")
    return Path(config).parent
