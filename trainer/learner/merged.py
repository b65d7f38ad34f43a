"""A base model with an adapter in its weights: W + (alpha / rank)·B·A in W's own precision. Knows models, no folder's
fate."""

from pathlib import Path
from typing import cast

import safetensors
import torch
from peft import PeftModel
from transformers import PreTrainedModel

from trainer.errors import AdapterMismatch
from trainer.learner import hf
from trainer.learner.backends import base_of
from whetstone import adapters
from whetstone.training import TrainerSettings


def merged(model_path: str | Path, adapter_folder: Path) -> PreTrainedModel:
    """The model as one, on the CPU: a step may have the accelerator.

    Raises:
        ModelUnusable: the base model cannot be loaded.
        AdapterDamaged: the folder is not what was written.
        AdapterMismatch: it belongs to another base model, or the sum is not finite.
    """
    adapters.verify(adapter_folder)
    manifest, _ = adapters.read_manifest(adapter_folder)
    if differs := base_of(model_path).differs_in(manifest["base_model"]):
        raise AdapterMismatch(f"{adapter_folder}: trained on another base model than {model_path}: {differs}")
    base = hf.load(model_path, TrainerSettings(), torch.device("cpu"))
    try:
        both = PeftModel.from_pretrained(base, str(adapter_folder))
        return cast(PreTrainedModel, both.merge_and_unload(safe_merge=True))
    except (ValueError, RuntimeError, safetensors.SafetensorError) as error:
        raise AdapterMismatch(f"{adapter_folder} cannot be merged into {model_path}: {error}") from error
