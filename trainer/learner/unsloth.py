"""The backend of Unsloth: its kernels under the same base model and LoRA. CUDA only, in an environment of its own.

The model is loaded in 16 bits because the server answers in 16 bits: a model trained in four bits is another model.
Whether it separates the rows of one sequence is proven as for any other model; where it does not, rows lie side by
side.

Unsloth patches transformers when that is imported, so Unsloth is imported first: see `trainer.tasks_unsloth`. Its
package declares Apache-2.0 but part of its files carry AGPL-3.0. Nothing here is copied from it, and it is only
installed by a user's explicit choice.
"""

from pathlib import Path

import torch
from peft import LoraConfig, PeftModel
from transformers import PreTrainedModel

from trainer.errors import ModelUnusable
from whetstone.config.trainer import TrainerSettings

REMEDY = "install it into an environment of its own (docs/training.md) and set trainer.python to that one's Python"


def load(model_path: str | Path, settings: TrainerSettings, device: torch.device) -> PreTrainedModel:
    """Load the base model in bf16 or fp16, as the kernels require.

    Raises:
        ModelUnusable: Unsloth is not installed, there is no CUDA, or Unsloth does not support the model.
    """
    if device.type != "cuda":
        raise ModelUnusable(f"trainer.backend is unsloth, which computes on CUDA only, not on {device}; set it to hf")
    try:
        from unsloth import FastLanguageModel
    except ImportError as error:
        raise ModelUnusable(f"trainer.backend is unsloth, which is not here ({error}): {REMEDY}") from error
    try:
        model, _tokenizer = FastLanguageModel.from_pretrained(
            str(model_path),
            # Unsloth cuts off longer sequences without a warning.
            max_seq_length=max(settings.max_row_tokens, settings.micro_batch_tokens),
            dtype=None,
            load_in_4bit=False,
            load_in_16bit=True,
            # By default it loads another repository's copy of a model whose name it recognizes.
            use_exact_model_name=True,
            device_map={"": str(device)},
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelUnusable(f"{model_path}: Unsloth does not load it: {error}") from error
    return model


def adapted(model: PreTrainedModel, config: LoraConfig, settings: TrainerSettings) -> PeftModel:
    """Return the model with a LoRA on it, drawn from the process's RNG state: `random_state` would seed it again."""
    from unsloth import FastLanguageModel

    modules = config.target_modules
    return FastLanguageModel.get_peft_model(
        model,
        r=config.r,
        lora_alpha=config.lora_alpha,
        lora_dropout=0.0,
        bias="none",
        target_modules=modules if isinstance(modules, str) else sorted(modules or ()),
        use_gradient_checkpointing=False if settings.gradient_checkpointing is False else "unsloth",
        random_state=torch.initial_seed() % 2**32,
    )


def made_ready(model: PeftModel, _settings: TrainerSettings) -> None:
    """Switch on Unsloth's own training mode, which its checkpointing needs. Its adapters have no dropout."""
    from unsloth import FastLanguageModel

    FastLanguageModel.for_training(model)
