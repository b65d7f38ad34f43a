"""Measure whether a step's memory grows with the tokens of its rows, and no faster.

`python -m benchmarks.memory.long_rows [--lengths 8192 16384 32768] [--kinds row fork padded]`: steps on four layers of
SmolLM2-135M's shape with random weights in bf16, on the CPU, with gradient checkpointing, each in a process of its own.
One line each: peak, counted bytes, and both for each token in units of the shortest length's.

- `row`: one row.
- `fork`: two rows that share their first half, read as a tree.
- `padded`: two rows of half the length each, side by side (`trainer.trees = false`).
"""

import argparse
import tempfile
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging as transformers_logging

from benchmarks.memory.peaks import MIB, Peak, in_own_process, of_step, row, saved, show
from trainer.domain.rows import Row
from whetstone.config.trainer import TrainerSettings

KINDS = ("row", "fork", "padded")
LENGTHS = (8192, 16384, 32768)
SAMPLED = 4
"""One token in so many is sampled, the last in each row."""


def config() -> LlamaConfig:
    """Return four layers of SmolLM2-135M, with positions for long rows."""
    return LlamaConfig(
        hidden_size=576, intermediate_size=1536, num_hidden_layers=4, num_attention_heads=9, num_key_value_heads=3,
        vocab_size=49152, max_position_embeddings=2**17, tie_word_embeddings=True, eos_token_id=2,
    )  # fmt: skip


def rows(kind: str, tokens: int) -> list[Row]:
    """Return rows that make a micro-batch of so many tokens."""
    ids = [3 + place * 7919 % 49000 for place in range(tokens)]
    if kind == "row":
        return [row(ids, tokens - tokens // SAMPLED)]
    half, quarter = tokens // 2, tokens // 4
    if kind == "fork":
        firsts, rests = ids[:half], (ids[half : half + quarter], ids[half + quarter :])
        each = [[*firsts, *rest] for rest in rests]
    else:
        each = [ids[:half], ids[half:]]
    return [row(one, len(one) - tokens // SAMPLED // 2, str(place)) for place, one in enumerate(each)]


def settings(kind: str, tokens: int) -> TrainerSettings:
    """Return the settings of a step whose rows are one micro-batch."""
    return TrainerSettings(
        device="cpu", threads=1, gradient_checkpointing=True, measure_kl=False, trees=kind != "padded",
        max_row_tokens=tokens, micro_batch_tokens=tokens,
    )  # fmt: skip


def main() -> None:
    """Print a table for each kind of rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--one", nargs=3, metavar=("FOLDER", "KIND", "TOKENS"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        folder, kind, tokens = arguments.one
        show(of_step(Path(folder), rows(kind, int(tokens)), settings(kind, int(tokens))))
        return
    transformers_logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        saved(Path(folder), LlamaForCausalLM, config(), torch.bfloat16)
        for kind in arguments.kinds:
            first: tuple[int, Peak] | None = None
            for tokens in arguments.lengths:
                peak = in_own_process(__spec__.name, [folder, kind, str(tokens)])
                first = first or (tokens, peak)
                _show(kind, tokens, peak, *first)


def _show(kind: str, tokens: int, peak: Peak, first_tokens: int, first: Peak) -> None:
    times = first_tokens / tokens
    print(  # noqa: T201
        f"{kind}, {tokens} tokens: peak {peak.step / MIB:.0f} MiB, counted {peak.counted / MIB:.0f} MiB; for each token "
        f"{peak.step / first.step * times:.2f} and {peak.counted / first.counted * times:.2f} of that at "
        f"{first_tokens}; {peak.seconds:.0f} s of processor time",
        flush=True,
    )


if __name__ == "__main__":
    main()
