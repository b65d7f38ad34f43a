"""Who computes: how a base model is loaded and gets its LoRA. What is done with it then is the same for all."""

from pathlib import Path
from typing import Protocol

import torch
from peft import LoraConfig, PeftModel
from transformers import PreTrainedModel
from transformers.utils import cached_file

from trainer.base import BaseModel, fingerprint
from trainer.errors import ModelUnusable
from trainer.learner import hf, unsloth
from whetstone.training import TrainerSettings


class Backend(Protocol):
    """A module that computes."""

    def load(self, model_path: str | Path, settings: TrainerSettings, device: torch.device, /) -> PreTrainedModel:
        """The base model on its device. Raises ModelUnusable."""

    def adapted(self, model: PreTrainedModel, config: LoraConfig, settings: TrainerSettings, /) -> PeftModel:
        """The model with a LoRA on it, drawn from the process's RNG. Raises ModelUnusable."""

    def made_ready(self, model: PeftModel, settings: TrainerSettings, /) -> None:
        """Dropout off, checkpointing as the settings say."""


def backend_of(settings: TrainerSettings) -> Backend:
    """The backend of the settings."""
    return {"hf": hf, "unsloth": unsloth}[settings.backend]


def device_of(settings: TrainerSettings) -> torch.device:
    """The device of the settings; `auto` is the first of cuda, mps and cpu that is there."""
    if settings.device != "auto":
        return torch.device(settings.device)
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def base_of(model_path: str | Path) -> BaseModel:
    """The base model's fingerprint.

    Raises:
        ModelUnusable: its files cannot be found.
    """
    return fingerprint(folder_of(model_path), Path(model_path).name)


def folder_of(model_path: str | Path) -> Path:
    """Where the base model's files are, whether it is named by a folder or as the hub does.

    Raises:
        ModelUnusable: its files cannot be found.
    """
    try:
        config = cached_file(str(model_path), "config.json")
    except OSError as error:
        raise ModelUnusable(f"{model_path}: {error}") from error
    if config is None:
        raise ModelUnusable(f"{model_path}: no config.json")
    return Path(config).parent
