"""How much of a GPU a training step uses: tokens per second and share of peak (MFU), for shapes of 0.5B to 7B.

Random weights of a real architecture in bf16, so nothing is downloaded; groups of eight that share a prompt. Model
FLOPs are those that the step has to compute, not those that it does: forward 2 per weight and token, backward 2
(gradients of states; the base's own weights have none), attention 4 per head width, query and visible key, three times;
recomputed layers and tokens that are read twice count nothing.
"""

import argparse
import json
import math
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, Qwen2Config

from benchmarks.kit.options import parser_of
from benchmarks.kit.peak import Peak
from trainer.domain.rows import Row
from trainer.learner.learner import Learner
from whetstone.config.trainer import TrainerSettings

FIELDS = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size"
)  # fmt: skip
SHAPES = {
    "tiny": (64, 2, 4, 2, 128, 512),
    "0.5B": (896, 24, 14, 2, 4864, 151_936),
    "1.5B": (1536, 28, 12, 2, 8960, 151_936),
    "7B": (3584, 28, 28, 4, 18_944, 152_064),
}
"""Shapes of Qwen2.5: the FIELDS of a `Qwen2Config`."""
MEMBERS = 8


def rows_of(groups: int, prompt: int, answer: int, vocabulary: int) -> list[Row]:
    """Return groups of MEMBERS rows: a prompt that they share, an answer of each."""
    rng = random.Random(0)
    rows = []
    for group in range(groups):
        prompt_ids = [rng.randrange(vocabulary) for _ in range(prompt)]
        for member in range(MEMBERS):
            answer_ids = [rng.randrange(vocabulary) for _ in range(answer)]
            rows.append(
                Row(
                    trajectory_id=f"{group}-{member}",
                    token_ids_T=(*prompt_ids, *answer_ids),
                    sampled_T=(False,) * prompt + (True,) * answer,
                    inference_logprobs_T=(math.nan,) * prompt + (-math.log(vocabulary),) * answer,
                    versions_T=(-1,) * prompt + (0,) * answer,
                    temperatures_T=(1.0,) * (prompt + answer),
                    advantages_T=(0.0,) * prompt + (0.5 if member % 2 else -0.5,) * answer,
                )
            )
    return rows


def model_flops(config: Qwen2Config, groups: int, prompt: int, answer: int) -> float:
    """Return the FLOPs that one step over `rows_of` has to compute."""
    width = config.hidden_size // config.num_attention_heads
    keys = config.num_key_value_heads * width
    weights = config.num_hidden_layers * (
        2 * config.hidden_size**2 + 2 * config.hidden_size * keys + 3 * config.hidden_size * config.intermediate_size
    )
    read = groups * (prompt + MEMBERS * answer)
    seen = groups * (prompt**2 / 2 + MEMBERS * (prompt * answer + answer**2 / 2))
    attention = 3 * 4 * config.num_hidden_layers * config.hidden_size * seen
    head = 4 * groups * MEMBERS * answer * config.hidden_size * config.vocab_size
    return 4 * weights * read + attention + head


def main() -> None:
    """Measure the shapes and print them."""
    parser = parser_of(
        __doc__,
        {
            "--shapes": {"nargs": "+", "choices": SHAPES, "default": ["0.5B", "7B"]},
            "--device": {"default": "cuda"},
            "--groups": {"type": int, "default": 8},
            "--prompt": {"type": int, "default": 1024, "help": "tokens that a group shares"},
            "--answer": {"type": int, "default": 512, "help": "tokens that each member sampled"},
            "--budget": {"type": int, "default": 16_384, "help": "trainer.micro_batch_tokens"},
            "--attention": {"default": "auto", "choices": ["auto", "segments", "dense", "flex"]},
            "--repeats": {"type": int, "default": 5},
            "--peak-tflops": {"type": float, "help": "the device's, dense bf16 (H100, H200: 989); without it no MFU"},
            "--json": {"type": Path, "help": "file for the figures, an object for each shape"},
        },
        argparse.RawDescriptionHelpFormatter,
    )
    chosen = parser.parse_args()
    figures = [measured(shape, chosen) for shape in chosen.shapes]
    if chosen.json:
        chosen.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    table = Table(*figures[0])
    for row in figures:
        table.add_row(*(f"{value:,.3f}" if isinstance(value, float) else str(value) for value in row.values()))
    Console().print(table)


def measured(shape: str, chosen: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of a shape."""
    fields = dict(zip(FIELDS, SHAPES[shape], strict=True))
    config = Qwen2Config(**fields, max_position_embeddings=32_768)
    rows = rows_of(chosen.groups, chosen.prompt, chosen.answer, config.vocab_size)
    settings = TrainerSettings(
        device=chosen.device, micro_batch_tokens=chosen.budget, attention=chosen.attention, measure_kl=False
    )
    with tempfile.TemporaryDirectory() as folder:
        # On the device: a CPU draws the weights of 7B for minutes.
        with torch.device(chosen.device):
            AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
        learner = Learner.fresh(Path(folder), settings, seed=0)
    with Peak(chosen.device) as peak:
        figures = learner.step(rows, 0)  # compiles, and warms up
    seconds = []
    for _ in range(chosen.repeats):
        began = time.perf_counter()
        learner.step(rows, 0)
        seconds.append(time.perf_counter() - began)
    median = statistics.median(seconds)
    tflops = model_flops(config, chosen.groups, chosen.prompt, chosen.answer) / median / 1e12
    return {
        "shape": shape,
        "read": figures.read_tokens,
        "sampled": figures.sampled_tokens,
        "s a step": median,
        "read/s": figures.read_tokens / median,
        "sampled/s": figures.sampled_tokens / median,
        "TFLOPS": tflops,
        **({"MFU": tflops / chosen.peak_tflops} if chosen.peak_tflops else {}),
        "peak MiB": peak.mib,
    }


if __name__ == "__main__":
    main()
