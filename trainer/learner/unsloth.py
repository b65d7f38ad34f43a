"""The backend of Unsloth: its kernels under the same base model and LoRA, in an environment of its own.

On CUDA; on a CPU where the environment asks Unsloth for it, which is for tests.

The model is loaded in 16 bits because the server answers in 16 bits: a model trained in four bits is another model. On
a CPU it stays in the precision it was saved in. Whether it separates the rows of one sequence is proven as for any
other model; where it does not, rows lie side by side.

Unsloth patches transformers when that is imported, so Unsloth is imported first: see `trainer.tasks_unsloth`. Its
package declares Apache-2.0 but part of its files carry AGPL-3.0. Nothing here is copied from it, and it is only
installed by a user's explicit choice.
"""

import os
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from peft import LoraConfig, PeftModel
from transformers import AutoConfig, PreTrainedModel

from trainer.errors import ModelUnusable, RowError
from whetstone.config.trainer import TrainerSettings

REMEDY = "install it into an environment of its own (docs/training.md) and set trainer.python to that one's Python"
CPU_VARIABLES = ("UNSLOTH_FORCE_CPU", "UNSLOTH_ALLOW_CPU")
"""Unsloth's own variables, for tests. With the first it computes on the CPU by transformers and peft (from release
2026.10.9), with the second it takes the CPU for a GPU, whose kernels Triton then interprets.
"""


def load(model_path: str | Path, settings: TrainerSettings, device: torch.device) -> PreTrainedModel:
    """Load the base model, on CUDA in bf16 or fp16, as the kernels require.

    Raises:
        ModelUnusable: Unsloth is not installed, there is no CUDA, or Unsloth does not support the model.
    """
    on_cpu = device.type == "cpu" and any(os.environ.get(name) == "1" for name in CPU_VARIABLES)
    if device.type != "cuda" and not on_cpu:
        raise ModelUnusable(
            f"trainer.backend is unsloth, which computes on CUDA, not on {device}: set it to hf (or, to test "
            f"Unsloth on a CPU, {CPU_VARIABLES[0]}=1 in the environment)"
        )
    try:
        from unsloth import FastLanguageModel
    except ImportError as error:
        raise ModelUnusable(f"trainer.backend is unsloth, which is not here ({error}): {REMEDY}") from error
    try:
        config = AutoConfig.from_pretrained(str(model_path)).get_text_config()
        dtype = config.dtype if on_cpu else None
        longest = max_seq_length(settings, config.max_position_embeddings)
        model, _tokenizer = FastLanguageModel.from_pretrained(
            str(model_path),
            max_seq_length=longest,
            dtype=dtype,
            load_in_4bit=False,
            load_in_16bit=dtype != torch.float32,
            # By default it checkpoints, whatever `adapted` says later.
            use_gradient_checkpointing=_checkpointing(settings, device),
            # By default it loads another repository's copy of a model whose name it recognizes.
            use_exact_model_name=True,
            device_map={"": str(device)},
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelUnusable(f"{model_path}: Unsloth does not load it: {error}") from error
    model.base_model.register_forward_pre_hook(partial(_refuse_longer, longest), with_kwargs=True)
    return model


def max_seq_length(settings: TrainerSettings, positions: int) -> int:
    """Return the longest sequence that Unsloth has to read, in tokens: at most the model's own positions.

    For a longer one it would scale the position embeddings of all (`FastLlamaModel.from_pretrained`, release 2026.10),
    which makes another model than the one that vLLM serves.
    """
    return min(max(settings.max_row_tokens, settings.micro_batch_tokens), positions)


def _refuse_longer(longest: int, _module: torch.nn.Module, _args: tuple[Any, ...], given: dict[str, Any]) -> None:
    """Raise RowError for a sequence that Unsloth would cut off."""
    ids = given.get("input_ids")
    if ids is not None and (tokens := ids.shape[-1]) > longest:
        raise RowError(
            f"a sequence of {tokens} tokens, and Unsloth reads {longest} of this model: set trainer.max_row_tokens and "
            f"trainer.micro_batch_tokens to at most {longest}"
        )


def _checkpointing(settings: TrainerSettings, device: torch.device) -> Literal["unsloth"] | bool:
    """Return what the settings mean in Unsloth's words; its own way moves activations to the host."""
    wanted = settings.gradient_checkpointing
    return "unsloth" if (device.type != "cpu" if wanted is None else wanted) else False


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
        use_gradient_checkpointing=_checkpointing(settings, model.device),
        random_state=torch.initial_seed() % 2**32,
    )


def made_ready(model: PeftModel, _settings: TrainerSettings) -> None:
    """Switch on Unsloth's own training mode, which its checkpointing needs. Its adapters have no dropout."""
    from unsloth import FastLanguageModel

    FastLanguageModel.for_training(model)
