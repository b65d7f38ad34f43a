"""Compare learning with TRL's GRPOTrainer: the same model, LoRA, batch, task, seeds and machine, generation included.

Both learn to route the tickets of examples/tickets with SmolLM2-135M-Instruct: ours from an app's thumbs through the
whole stack, for so many steps; TRL for as many seconds, with each way to sample that runs here. The adapters of both,
the last of each minute, are asked the same held-out tickets by the same vLLM. Each side takes the given learning rates,
one after the other; of a side's runs the one with the best end counts. Exit 0 only if ours gains GAIN points in at most
half of TRL's time, and TRL's held-out result is not higher with certainty.
"""

import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.beside_trl import sides
from benchmarks.beside_trl.examination import examine, last_of_each
from benchmarks.beside_trl.run import Generation, Run
from benchmarks.beside_trl.sides import Result
from benchmarks.kit.check import verdict
from benchmarks.kit.harness import opened, present
from benchmarks.kit.model import fetched
from benchmarks.kit.options import parser_of
from benchmarks.learning.policy import cells
from benchmarks.real import report
from whetstone.domain import stats
from whetstone.memory.devices import cards

GENERATIONS: tuple[Generation, ...] = ("colocate", "transformers")
ATTEMPTS = 8
"""Answers to each ticket."""
GAIN = 0.20
"""Held-out accuracy above the base model's, as a share: how fast a side is."""
FASTER = 2.0
EVERY_S = 60.0
"""One adapter of so many seconds is examined."""
SETTINGS = ("steps", "groups", "lora_rank", "micro_batch")
"""Options that are settings of the runs."""


class Outcome(msgspec.Struct):
    """A run with its examined points."""

    side: str
    learning_rate: float
    peak_mib: int
    seconds: list[float]
    attempts: list[int]
    right: list[list[int]]
    """By point, 1 or 0 for each held-out ticket."""
    trained_per_s: float
    """Answers trained on, a second of the whole run."""
    tokens_per_s: float
    """Their prompt and answer tokens."""

    def gain(self, before: list[int], number: int = -1) -> stats.Interval:
        """Return the gain of a point on the base model."""
        return stats.gain(before, self.right[number])

    def reached(self, before: list[int]) -> int | None:
        """Return the number of the first point that has gained GAIN; None if none has."""
        return next((n for n in range(len(self.right)) if self.gain(before, n).mean >= GAIN), None)


def run(args: Any, data: Path, model: str, console: Console) -> dict[str, Any]:
    """Run both sides with each learning rate, and examine them; return all figures."""
    runs, seconds = list[tuple[Run, Result]](), 0.0
    ways: list[Generation | None] = [None, *(args.generation or GENERATIONS)]
    for number, (way, rate) in enumerate(itertools.product(ways, args.learning_rate)):
        console.print(f"[bold]{_side(way)}, learning rate {rate:g}[/bold]", highlight=False)
        given = Run(
            model=model,
            folder=str(data / str(number)),
            seed=args.seed,
            learning_rate=rate,
            seconds=seconds,
            lora_rank=args.lora_rank,
            lora_alpha=2 * args.lora_rank,
            groups=args.groups,
            attempts=ATTEMPTS,
            micro_batch=args.micro_batch,
            generation=way,
        )
        done = sides.trl(given, console) if way else sides.ours(given, args.steps, console)
        if way is None:
            seconds = max(seconds, done.points[-1].seconds)
        runs.append((given, done))
    points = [last_of_each(done.points, EVERY_S) for _, done in runs]
    adapters = [point.adapter for some in points for point in some]
    console.print(f"[dim]{args.questions} held-out tickets to the base model and {len(adapters)} adapters[/dim]")
    before, *right = examine(model, args.lora_rank, data / "examination", adapters, args.questions)
    outcomes = list[Outcome]()
    for (given, done), some in zip(runs, points, strict=True):
        own, right = right[: len(some)], right[len(some) :]
        end = done.points[-1]
        outcomes.append(
            Outcome(
                side=_side(given.generation),
                learning_rate=given.learning_rate,
                peak_mib=done.peak_mib,
                seconds=[point.seconds for point in some],
                attempts=[point.attempts for point in some],
                right=own,
                trained_per_s=end.trained / end.seconds,
                tokens_per_s=end.tokens / end.seconds,
            )
        )
    return {
        **report.circumstances(),
        "seed": args.seed,
        "model": Path(model).name,
        "settings": {name: getattr(args, name) for name in SETTINGS},
        "before": before,
        "runs": outcomes,
    }


def _side(generation: Generation | None) -> str:
    return "ours" if generation is None else f"TRL, {generation}"


def best(outcomes: Sequence[Outcome], before: list[int]) -> Outcome:
    """Return the run with the best end."""
    return max(outcomes, key=lambda outcome: outcome.gain(before).mean)


def faults_of(outcomes: Sequence[Outcome], before: list[int]) -> list[str]:
    """Return what does not hold."""
    own = best([entry for entry in outcomes if entry.side == "ours"], before)
    other = best([entry for entry in outcomes if entry.side != "ours"], before)
    first, second = own.reached(before), other.reached(before)
    points = f"{GAIN:.0%} points"
    if first is None:
        return [f"ours did not gain {points}"]
    took = own.seconds[first]
    theirs = other.seconds[-1 if second is None else second]
    when = f"TRL not within {theirs:.0f} s" if second is None else f"TRL in {theirs:.0f} s"
    return present(
        {
            f"ours gained {points} in {took:.0f} s, {when}": theirs < FASTER * took,
            "TRL's held-out result is higher": stats.gain(own.right[-1], other.right[-1]).low > 0,
        }
    )


def table_of(outcomes: Sequence[Outcome], before: list[int]) -> Table:
    """Return the table of all runs."""
    table = Table(
        "side", "learning rate", f"seconds to {GAIN:+.0%}", "attempts until then", "gain at the end", "seconds in all",
        "answers trained on/s", "tokens/s", "peak, GiB",
    )  # fmt: skip
    for entry in outcomes:
        number = entry.reached(before)
        reached = ["-", "-"] if number is None else [f"{entry.seconds[number]:.0f}", f"{entry.attempts[number]:,}"]
        gain = "{} ({})".format(*cells(entry.gain(before), "+"))
        speed = [f"{entry.trained_per_s:.2f}", f"{entry.tokens_per_s:,.0f}"]
        ends = [f"{entry.seconds[-1]:.0f}", *speed, f"{entry.peak_mib / 2**10:.1f}"]
        table.add_row(entry.side, f"{entry.learning_rate:g}", *reached, gain, *ends)
    return table


def main() -> int:
    """Run the comparison."""
    parser = parser_of(
        "Learning beside TRL's GRPOTrainer.",
        {
            "--seed": {"type": int, "default": 0, "help": "of adapters, sampling and tickets"},
            "--steps": {"type": int, "default": 20, "help": "ours; TRL trains for as many seconds"},
            "--learning-rate": {"type": float, "action": "append", "help": "again for each further one [5e-5]"},
            "--groups": {"type": int, "default": 12, "help": "tickets of a step, with eight answers each"},
            "--lora-rank": {"type": int, "default": 16, "help": "of both; alpha is twice that"},
            "--generation": {"action": "append", "choices": GENERATIONS, "help": "how TRL samples [both, in turn]"},
            "--micro-batch": {"type": int, "default": 8, "help": "answers of a forward and backward pass of TRL"},
            "--questions": {"type": int, "default": 300, "help": "held-out tickets to each adapter"},
            "--model": {"help": "base model: a folder [SmolLM2-135M-Instruct, fetched once]"},
            "--data": {"type": Path, "help": "an empty folder for databases, adapters and logs, which then stay"},
            "--json": {"type": Path, "help": "file for all figures [docs/results/trl-seed<seed>.json]"},
        },
    )
    args = parser.parse_args()
    args.learning_rate = args.learning_rate or [5e-5]
    if not sides.TRL_PYTHON.exists():
        parser.error(f"{sides.TRL_PYTHON} is missing: `make beside-trl` builds TRL's environment")
    if args.groups * ATTEMPTS % args.micro_batch:
        parser.error(f"--micro-batch {args.micro_batch} does not divide the {args.groups * ATTEMPTS} answers of a step")
    if args.data and args.data.exists() and any(args.data.iterdir()):
        parser.error(f"{args.data} is not empty: choose another folder")
    if cards():
        parser.error("it compares on the CPU, and ours would use the GPU: set CUDA_VISIBLE_DEVICES to nothing")
    with opened("beside-trl", args.data, width=None) as (data, console):
        figures = run(args, data, args.model or fetched(console), console)
    path = args.json or report.RESULTS / f"trl-seed{args.seed}.json"
    entries, before = figures["runs"], figures["before"]
    report.write(path, msgspec.to_builtins(figures))
    console.print(table_of(entries, before))
    console.print(str(path), highlight=False, soft_wrap=True)
    return verdict(faults_of(entries, before), console)


if __name__ == "__main__":
    sys.exit(main())
