"""Measure whether a step's memory grows with the tokens of its rows, and no faster.

`python -m benchmarks.memory.long_rows [--lengths 8192 16384 32768] [--kinds row fork padded]`: steps on four layers of
SmolLM2-135M's shape with random weights in bf16, on the CPU, with gradient checkpointing, each in a process of its own.
One line each: peak, counted bytes, and both for each token in units of the shortest length's.

`--trace`: counts what a pass forward and back through the decoder allocates, in a trace that computes nothing
(FakeTensor), which takes seconds for 131,072 tokens. Without the head, and what kernels allocate for themselves.

- `row`: one row.
- `fork`: two rows that share their first half, read as a tree.
- `padded`: two rows of half the length each, side by side (`trainer.trees = false`).
"""

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging as transformers_logging

from benchmarks.memory.measured import traced
from benchmarks.memory.peaks import MIB, Peak, in_own_process, of_step, row, saved, show
from benchmarks.memory.shapes import Shape
from trainer.domain.rows import Row
from trainer.learner import attention
from trainer.learner.prefix_trees import forest, ids
from whetstone.config.trainer import TrainerSettings

KINDS = ("row", "fork", "padded")
LENGTHS = (8192, 16384, 32768)
SHAPE = Shape(576, 1536, 4, 9, 3, 49152, True)
"""The same four layers, as Qwen2 has them."""
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
    drawn = [3 + place * 7919 % 49000 for place in range(tokens)]
    if kind == "row":
        return [row(drawn, tokens - tokens // SAMPLED)]
    half, quarter = tokens // 2, tokens // 4
    if kind == "fork":
        firsts, rests = drawn[:half], (drawn[half : half + quarter], drawn[half + quarter :])
        each = [[*firsts, *rest] for rest in rests]
    else:
        each = [drawn[:half], drawn[half:]]
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
    parser.add_argument("--trace", action="store_true")
    parser.add_argument("--one", nargs=3, metavar=("FOLDER", "KIND", "TOKENS"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        folder, kind, tokens = arguments.one
        show(of_step(Path(folder), rows(kind, int(tokens)), settings(kind, int(tokens))))
        return
    if arguments.trace:
        for kind in arguments.kinds:
            _show_traces(kind, arguments.lengths)
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


def _show_traces(kind: str, lengths: Sequence[int]) -> None:
    first = 0.0
    for tokens in lengths:
        wood = forest([ids(one.token_ids_T) for one in rows(kind, tokens)])
        tree = attention.tree_of(wood, "segments", torch.device("cpu"))
        masks = {part.mask.untyped_storage().data_ptr(): part.mask for part in tree.parts if part.mask is not None}
        counted, _ = traced(SHAPE, tree, len(wood.token_ids_T))
        counted += sum(one.untyped_storage().nbytes() for one in masks.values())
        first = first or counted / tokens
        print(  # noqa: T201
            f"{kind}, {tokens} tokens: {counted / MIB:.0f} MiB in the trace; for each token "
            f"{counted / tokens / first:.2f} of that at {lengths[0]}",
            flush=True,
        )


def _show(kind: str, tokens: int, peak: Peak, first_tokens: int, first: Peak) -> None:
    times = first_tokens / tokens
    print(  # noqa: T201
        f"{kind}, {tokens} tokens: peak {peak.step / MIB:.0f} MiB, counted {peak.counted / MIB:.0f} MiB; for each "
        f"token {peak.step / first.step * times:.2f} and {peak.counted / first.counted * times:.2f} of that at "
        f"{first_tokens}; {peak.seconds:.0f} s of processor time",
        flush=True,
    )


if __name__ == "__main__":
    main()
