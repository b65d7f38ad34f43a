"""The backend of transformers and peft: the base model from its folder, with a LoRA. CPU, CUDA, MPS; the reference."""

from pathlib import Path

import safetensors
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import logging as transformers_logging

from trainer.errors import ModelUnusable
from trainer.learner.base import quantised
from whetstone.config.trainer import TrainerSettings


def load(model_path: str | Path, settings: TrainerSettings, device: torch.device) -> PreTrainedModel:
    """Load the base model in the precision it was saved in, each tensor from its file onto the device.

    With `trainer.quantisation` each linear layer is quantised as it comes. Safetensors only: other formats run code
    when they are read.

    Raises:
        ModelUnusable: it does not exist or cannot be read, or what quantises it is missing.
    """
    transformers_logging.disable_progress_bar()
    quantising = quantised.loading(settings.quantisation)
    try:
        # With a device_map no copy of the whole model passes through host memory.
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            str(model_path), dtype="auto", use_safetensors=True, device_map={"": with_number(device)}, **quantising
        )
    except (OSError, ValueError, RuntimeError, ImportError, safetensors.SafetensorError) as error:
        raise ModelUnusable(f"{model_path}: {error}") from error
    return quantised.with_own_layers(model) if quantising else model


def with_number(device: torch.device) -> torch.device:
    """Return the device with its number: transformers loads in threads, for which plain `cuda` is the first GPU."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def adapted(model: PreTrainedModel, config: LoraConfig, _settings: TrainerSettings) -> PeftModel:
    """Return the model with a LoRA on it. Its weights are fp32 for any precision of the base: peft's default.

    Raises:
        ModelUnusable: peft has no LoRA for layers of this kind.
    """
    try:
        return get_peft_model(model, config)
    except ValueError as error:
        raise ModelUnusable(f"{type(model).__name__} takes no LoRA on all its linear layers: {error}") from error


def made_ready(model: PeftModel, settings: TrainerSettings) -> None:
    """Switch off all dropout, as the server has none, and gradient checkpointing on where the settings require it.

    With `trainer.activation_offload` what it stores waits in host memory.
    """
    model.eval()
    wanted = settings.gradient_checkpointing
    if not (model.device.type != "cpu" if wanted is None else wanted):
        return
    causal: PreTrainedModel = model.get_base_model()
    offloads = settings.activation_offload and model.device.type != "cpu"
    # Older transformers do not have the argument.
    causal.gradient_checkpointing_enable(**({"offload": True} if offloads else {}))
    for module in causal.modules():
        if isinstance(module, GradientCheckpointingLayer):
            # These layers check this flag themselves. Their submodules stay in eval mode; else dropout would be active.
            module.training = True
