"""Measure the most memory that a training step takes, by the kernel's own mark, in this process.

Each measurement needs a process of its own: what an earlier one freed is not always the kernel's again.
"""

import gc
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.memory.measured import AllocatedBytes
from trainer.domain.rows import Row
from trainer.learner.learner import Learner
from whetstone.config.settings import STARTER
from whetstone.config.trainer import TrainerSettings

MIB = 2**20
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "1048576", "MALLOC_TRIM_THRESHOLD_": "1048576"}
"""By these glibc gives large blocks back to the kernel at once."""


@dataclass(frozen=True)
class Peak:
    """Most bytes beside what the process had before the model came."""

    loading: int
    """While the model was loaded and proven; with the pages of its file, which the kernel can take back."""
    step: int
    """In a step, with the optimizer's moments."""
    counted: int
    """What tensors had of that, by their sizes: the base, the adapter with its moments, and all that a step made."""
    seconds: float
    """Of processor time that the step took."""


def in_own_process(module: str, arguments: Sequence[str]) -> Peak:
    """Return the peak that a module's `--one` prints in a process of its own."""
    command = [sys.executable, "-m", module, "--one", *arguments]
    done = subprocess.run(command, env=os.environ | MALLOC, stdout=subprocess.PIPE, text=True, check=True)
    return Peak(**json.loads(done.stdout.splitlines()[-1]))


def show(peak: Peak) -> None:
    """Print a peak for `in_own_process`."""
    print(json.dumps(asdict(peak)))  # noqa: T201


def of_step(folder: Path, rows: Sequence[Row], settings: TrainerSettings) -> Peak:
    """Return the peak of a model's first step. The moments are there before it, as before any later step.

    A step of the starter comes first: what it imports and what kernels keep for themselves is the process's, not the
    model's.
    """
    with AllocatedBytes():
        Learner.fresh(STARTER, settings, seed=0).step([row(range(3, 35), 1)], 0)
    gc.collect()
    before = _status("VmRSS")
    with _high_water_mark() as loading:
        learner = Learner.fresh(folder, settings, seed=0)
    for weight in learner._model.parameters():
        weight.data = weight.data.clone()  # else it is a part of the mapped file, all of whose pages count
    gc.collect()
    with_moments(learner)
    weights = [*learner._model.parameters(), *learner._model.buffers()]
    moments = [one for state in learner._optimizer.state.values() for one in state.values()]
    began = os.times()
    with _high_water_mark() as step, AllocatedBytes() as made:
        made.leave_out([*weights, *moments])
        learner.step(rows, 0)
    took = os.times()
    counted = made.most + sum(one.nbytes for one in {id(one): one for one in [*weights, *moments]}.values())
    seconds = took.user + took.system - began.user - began.system
    return Peak(loading[0] - before, step[0] - before, counted, seconds)


def with_moments(learner: Learner) -> None:
    """Give the optimizer the moments that it otherwise makes in its first update."""
    for weight in learner._trained.values():
        state = {"exp_avg": torch.zeros_like(weight), "exp_avg_sq": torch.zeros_like(weight)}
        learner._optimizer.state[weight] = {"step": torch.tensor(0.0)} | state


def row(tokens: Sequence[int], sampled_from: int, name: str = "a") -> Row:
    """Return a row whose tokens from `sampled_from` on are sampled."""
    sampled = len(tokens) - sampled_from
    return Row(
        trajectory_id=name,
        token_ids_T=tuple(tokens),
        sampled_T=(*[False] * sampled_from, *[True] * sampled),
        inference_logprobs_T=(*[math.nan] * sampled_from, *[-10.0] * sampled),
        versions_T=(*[-1] * sampled_from, *[0] * sampled),
        temperatures_T=(1.0,) * len(tokens),
        advantages_T=(*[0.0] * sampled_from, *[1.0] * sampled),
    )


def saved(folder: Path, kind: Any, config: Any, dtype: torch.dtype) -> Path:
    """Save a model with random weights."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        kind._from_config(config, dtype=dtype).save_pretrained(folder)
    return folder


@contextmanager
def _high_water_mark() -> Iterator[list[int]]:
    """Fill the list with the most bytes that the process had in the context."""
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM: proc(5)
    most: list[int] = []
    yield most
    most.append(_status("VmHWM"))


def _status(name: str) -> int:
    """Return a number of bytes of /proc/self/status."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:")]
    return int(line.split()[1]) * 1024
