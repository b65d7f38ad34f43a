"""Measure how much host memory each process of a step takes, with a whole and with a sharded base model.

`python -m benchmarks.memory.sharded FOLDER [PROCESSES ...]` (default: 2 4), on Linux, on the CPU. For each number of
processes, each has the base whole first, and then they share it. They load the model and take two steps on short rows,
one for each process. A line for each number, in MiB above what a process has before it loads the model, the largest of
them:

- `loading`: the peak while the base is loaded, which reads nothing that is not needed yet;
- `reading`: the peak of a forward pass over a few tokens, after the first step;
- `step`: the peak of the second step, with the adapter, its moments, and activations;
- `base`: what the base has of the larger of these two: the rest is that of as many processes with the base whole.

`share` is the base's bytes divided by the processes, `unit` the bytes of the largest unit (embedding or head, or a
layer): `base` should be about their sum. Memory is what the kernel counts as resident: safetensors maps weights from
their file, so the base is in there as far as it is read. glibc returns what is freed at once (`MMAP`).
"""

import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Literal

import torch

from trainer.domain.rows import Row
from trainer.learner.base.shared import shared_base
from trainer.learner.learner import Learner
from trainer.learner.processes.team import Team
from whetstone.config.trainer import TrainerSettings
from whetstone.memory.model_files import read
from whetstone.stack.stack import trainer_program

MIB = 2**20
MMAP = {"MALLOC_MMAP_THRESHOLD_": str(2**16), "MALLOC_TRIM_THRESHOLD_": str(2**16), "MALLOC_ARENA_MAX": "1"}
Sharding = Literal["none", "fsdp"]
COLUMNS = ("loading", "reading", "step")
TOKENS = 64


def settings_of(processes: int, sharding: Sharding) -> TrainerSettings:
    """Return the settings of a run."""
    return TrainerSettings(
        processes=processes,
        sharding=sharding,
        device="cpu",
        threads=1,
        micro_batch_tokens=TOKENS,
        gradient_checkpointing=True,
        measure_kl=False,
        trees=False,
    )


def main() -> None:
    """Launch a run for each number of processes, and print the table."""
    folder, *counts = sys.argv[1:]
    sizes = read(folder)
    unit = max(sizes.embedding_bytes, sizes.largest_layer_bytes)
    _show(f"{sizes.name}: base {sizes.weight_bytes / MIB:.1f}, layer {sizes.largest_layer_bytes / MIB:.1f} MiB")
    _show(f"{'processes':>9} {'share':>8} {'unit':>8} " + " ".join(f"{column:>8}" for column in (*COLUMNS, "base")))
    for processes in map(int, counts or ("2", "4")):
        whole = largest(launch(folder, processes, "none"))
        most = largest(launch(folder, processes, "fsdp"))
        rest = [each - sizes.weight_bytes / MIB for each in whole[1:]]
        base = max(each - its_rest for each, its_rest in zip(most[1:], rest, strict=True))
        cells = (sizes.weight_bytes / processes / MIB, unit / MIB, *most, base)
        _show(f"{processes:>9} " + " ".join(f"{each:>8.1f}" for each in cells))


def largest(figures: list[dict[str, int]]) -> list[float]:
    """Return the largest figure of each column, in MiB."""
    return [max(each[column] for each in figures) / MIB for column in COLUMNS]


def launch(folder: str, processes: int, sharding: Sharding) -> list[dict[str, int]]:
    """Return the figures of each process of a run."""
    with tempfile.TemporaryDirectory() as out:
        arguments = ["--in-process", folder, str(processes), out, sharding]
        program = [*trainer_program(settings_of(processes, sharding))[:-1], "benchmarks.memory.sharded"]
        subprocess.run([*program, *arguments], env={**os.environ, **MMAP}, check=True)
        return [json.loads(path.read_text()) for path in sorted(Path(out).iterdir())]


def measure(folder: str, processes: int, out: Path, sharding: Sharding) -> None:
    """Load the model, read and take two steps in this process, and write its figures."""
    settings = settings_of(processes, sharding)
    peers = Team(settings)
    torch.set_num_threads(1)
    before = resident_bytes()
    forget_peak()
    shared_base(folder, settings, torch.device("cpu"))
    loading = peak_bytes()
    learner = Learner.fresh(folder, settings, 0, peers)
    learner.step(rows(peers.size), 0)
    forget_peak()
    # All processes read the same few tokens, so that none waits for another.
    learner.logprobs((1, 2, 3), (4, 5, 6))
    reading = peak_bytes()
    forget_peak()
    learner.step(rows(peers.size), 1)
    peaks = {"loading": loading, "reading": reading, "step": peak_bytes()}
    (out / f"{peers.rank}.json").write_text(json.dumps({name: peak - before for name, peak in peaks.items()}))
    peers.leave()


def rows(count: int) -> list[Row]:
    """Return rows of which each is a micro-batch, one for each process."""
    return [
        Row(
            trajectory_id=str(number),
            token_ids_T=tuple((number + place) % 1000 for place in range(TOKENS)),
            sampled_T=(False, *[True] * (TOKENS - 1)),
            inference_logprobs_T=(math.nan, *[-10.0] * (TOKENS - 1)),
            versions_T=(-1, *[0] * (TOKENS - 1)),
            temperatures_T=(1.0,) * TOKENS,
            advantages_T=(0.0, *[1.0] * (TOKENS - 1)),
        )
        for number in range(count)
    ]


def status(name: str) -> int:
    """Return a count of bytes that the kernel has of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def resident_bytes() -> int:
    """Return what this process has in memory now."""
    return status("VmRSS")


def forget_peak() -> None:
    """Have `peak_bytes` count from now on."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> int:
    """Return the most resident bytes since `forget_peak`."""
    return status("VmHWM")


def _show(line: str) -> None:
    print(line, flush=True)  # noqa: T201


if __name__ == "__main__":
    if sys.argv[1] == "--in-process":
        measure(sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]), "fsdp" if sys.argv[5] == "fsdp" else "none")
    else:
        main()
