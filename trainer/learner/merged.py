"""Write an adapter in other forms: merged into its base model's weights, W + (alpha / rank)·B·A in W's own precision,
and in bf16, as it travels by an adapter store.
"""

from pathlib import Path
from typing import cast

import safetensors
import safetensors.torch
import torch
from peft import PeftModel
from transformers import PreTrainedModel

from trainer.errors import AdapterMismatch
from trainer.learner import hf
from trainer.learner.backends import base_of
from whetstone.config.trainer import TrainerSettings
from whetstone.registry import adapters


def merged(model_path: str | Path, adapter_folder: Path) -> PreTrainedModel:
    """Return the merged model, on the CPU: a step may be using the accelerator.

    Raises:
        ModelUnusable: the base model cannot be loaded.
        AdapterDamaged: the folder's contents are not what was written.
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


def in_bf16(weights: bytes) -> bytes:
    """Return a file of weights with each tensor rounded to bf16.

    A server in bf16 rounds them when it loads them, so it computes the same with either file.
    """
    tensors = {name: value.to(torch.bfloat16) for name, value in safetensors.torch.load(weights).items()}
    return cast(bytes, safetensors.torch.save(tensors, metadata={"format": "pt"}))
