"""Create a real GRPOTrainer of TRL, and rows in its format. Runs in TRL's environment; changes none of TRL's code.

TRL's `_compute_loss` reads prompts padded on the left, completions padded on the right, and two masks.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

from trainer.domain.rows import Row


def make(
    model: Any,
    device: str,
    trainer: type[GRPOTrainer] = GRPOTrainer,
    config: type[GRPOConfig] = GRPOConfig,
    **settings: Any,
) -> GRPOTrainer:
    """Return a trainer of `model` that computes as we do: in the model's own precision, and storing its activations.

    `settings` are TRL's. The tokenizer, dataset and reward are only placeholders and do not affect its loss.
    """
    words = Tokenizer(WordLevel({"<pad>": 0}, unk_token="<pad>"))
    arguments = config(
        output_dir=str(Path(tempfile.gettempdir()) / "whetstone-trl"),  # one for all: it creates it, and writes nothing
        per_device_train_batch_size=2,
        num_generations=2,
        use_cpu=device == "cpu",
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        **settings,
    )
    made = trainer(
        model=model,
        args=arguments,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        train_dataset=Dataset.from_dict({"prompt": ["."]}),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<pad>"),
    )
    made.model.train()
    made.current_gradient_accumulation_steps = arguments.gradient_accumulation_steps  # its loop would set it
    return made


def inputs(rows: Sequence[Row], step_tokens: int, device: str) -> dict[str, Tensor]:
    """Return one micro-batch of TRL. A row's prompt ends where its first sampled token begins; all its tokens have that
    token's advantage.

    `step_tokens` are the sampled tokens of the whole step, the normaliser of its token-level losses.
    """
    starts = [row.sampled_T.index(True) for row in rows]
    prompts = [torch.tensor(row.token_ids_T[:start]) for row, start in zip(rows, starts, strict=True)]
    answers = [torch.tensor(row.token_ids_T[start:]) for row, start in zip(rows, starts, strict=True)]
    sampled = [torch.tensor(row.sampled_T[start:]).long() for row, start in zip(rows, starts, strict=True)]
    logprobs = [torch.tensor(row.inference_logprobs_T[start:]) for row, start in zip(rows, starts, strict=True)]
    made = {
        "prompt_ids": _padded(prompts, left=True),
        "prompt_mask": _padded([torch.ones_like(prompt) for prompt in prompts], left=True),
        "completion_ids": _padded(answers),
        "completion_mask": _padded([torch.ones_like(answer) for answer in answers]),
        "tool_mask": _padded(sampled),
        # Tokens that were not sampled have no logprob; TRL multiplies by the mask, and NaN would stay NaN.
        "old_per_token_logps": _padded(logprobs).nan_to_num(0.0),
        "advantages": torch.tensor([row.advantages_T[start] for row, start in zip(rows, starts, strict=True)]),
        "num_items_in_batch": torch.tensor(step_tokens),
    }
    return {name: value.to(device) for name, value in made.items()}


def _padded(lists: list[Tensor], left: bool = False) -> Tensor:
    side = "left" if left else "right"
    return torch.nn.utils.rnn.pad_sequence(lists, batch_first=True, padding_side=side)
