"""The backend of Unsloth: its kernels under the same base model and LoRA. CUDA only, in an environment of its own.

Loaded in 16 bits, for the server answers in 16 bits: what is trained on four is another model. Whether it keeps rows
of one sequence apart is proven like any other model's, and where it does not, rows lie side by side.

Unsloth patches transformers as that is imported, so it comes first: `trainer.tasks_unsloth` sees to it. Its package
declares Apache-2.0 but part of its files carry AGPL-3.0; nothing here is copied from it, and it is never installed
unless somebody asks for it.
"""

from pathlib import Path

import torch
from peft import LoraConfig, PeftModel
from transformers import PreTrainedModel

from trainer.errors import ModelUnusable
from whetstone.training import TrainerSettings

REMEDY = "install it into an environment of its own (docs/training.md) and set trainer.python to that one's Python"


def load(model_path: str | Path, settings: TrainerSettings, device: torch.device) -> PreTrainedModel:
    """The base model in bf16 or fp16, as its kernels want it.

    Raises:
        ModelUnusable: there is no Unsloth, no CUDA, or it does not take the model.
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
            # What is longer it would cut off without a word.
            max_seq_length=max(settings.max_row_tokens, settings.micro_batch_tokens),
            dtype=None,
            load_in_4bit=False,
            load_in_16bit=True,
            # By default it takes another repository's copy of a model it knows the name of.
            use_exact_model_name=True,
            device_map={"": str(device)},
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelUnusable(f"{model_path}: Unsloth does not load it: {error}") from error
    return model


def adapted(model: PreTrainedModel, config: LoraConfig, settings: TrainerSettings) -> PeftModel:
    """The model with a LoRA on it. Random as the process's generator is: `random_state` would seed it anew."""
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
    """In Unsloth's own training mode, which its checkpointing needs; its adapters have no dropout."""
    from unsloth import FastLanguageModel

    FastLanguageModel.for_training(model)
