"""Measure a training step against TRL's GRPOTrainer: useful tokens per second of loss and backward.

Eight trajectories of several turns answer one prompt; each turn's prompt repeats the whole conversation before it. The
same log of calls is trained on three times, with the same weights, loss, precision and token budget per micro-batch: by
us, by TRL with one row per call, and by TRL with our merged rows. Useful tokens are the sampled tokens. First, losses
and gradients of all must agree. Exits 0 only if they do, and with 8 turns `--enough` holds.
"""

import argparse
import json
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.kit.options import parser_of
from benchmarks.kit.peak import Peak
from benchmarks.learning.step.sides import CALLS, MERGED, OURS, TRAJECTORIES, Pass, Sides, log_of_calls


@dataclass(frozen=True, slots=True)
class Result:
    """One line of the table."""

    vocabulary: int
    turns: int
    who: str
    sampled_tokens: int
    read_tokens: int
    seconds: float
    """Median."""
    tokens_per_s: float
    """Sampled tokens."""
    times_slower: float
    """Ratio to our time, in the same rounds."""
    peak_mib: float


def measure(sides: Sides, turns: int, vocabulary: int, repeats: int, done: Callable[[], None]) -> list[Result]:
    """Return the figures of all sides, measured in turns.

    Raises:
        SystemExit: the loss or gradient of a side differs from ours.
    """
    log = log_of_calls(turns, vocabulary)
    passes = sides.passes(log)
    sampled = sum(len(one.token_ids) for completions in log.values() for one in completions)
    peaks, firsts = {}, {}
    for who, run in passes.items():
        with Peak(sides.device) as peak:
            firsts[who] = run()
        peaks[who] = peak.mib
        done()
    _agree(firsts, exact=sides.device == "cpu")
    seconds: dict[str, list[float]] = {who: [] for who in passes}
    for _ in range(repeats):
        for who, run in passes.items():
            began = time.perf_counter()
            run()  # its loss is read at the end, so the device has finished too
            seconds[who].append(time.perf_counter() - began)
            done()
    median = {who: statistics.median(took) for who, took in seconds.items()}
    return [
        Result(
            vocabulary=vocabulary,
            turns=turns,
            who=who,
            sampled_tokens=sampled,
            read_tokens=firsts[who].read_tokens,
            seconds=median[who],
            tokens_per_s=sampled / median[who],
            times_slower=statistics.median(a / b for a, b in zip(seconds[who], seconds[OURS], strict=True)),
            peak_mib=peaks[who],
        )
        for who in passes
    ]


def _agree(passes: dict[str, Pass], exact: bool) -> None:
    """Check that all losses and gradients agree. `exact`: in fp32; else in bf16."""
    reference = passes[OURS]
    for who, one in passes.items():
        if abs(one.loss - reference.loss) > (1e-5 if exact else 1e-2):
            raise SystemExit(f"{who}: the loss is {one.loss}, ours {reference.loss}: these are not the same steps")
        if not one.gradients:
            continue
        theirs, own = (
            torch.cat([pass_.gradients[name].flatten() for name in sorted(reference.gradients)]).double()
            for pass_ in (one, reference)
        )
        cosine = torch.nn.functional.cosine_similarity(theirs, own, dim=0).item()
        if not cosine > (0.9999 if exact else 0.99):
            raise SystemExit(f"{who}: the cosine of its gradient to ours is {cosine}: these are not the same steps")


def _table(results: Sequence[Result], args: argparse.Namespace) -> Table:
    """Return the table of one vocabulary."""
    where = f"cpu, {args.threads} threads" if args.device == "cpu" else args.device
    model = f"hidden {args.hidden}, {args.layers} layers, vocabulary {results[0].vocabulary:,}"
    table = Table(title=f"{TRAJECTORIES} trajectories; {model}; {where}", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("turns", "sampled", "", "read", "ms", "sampled/s", "slower", "MiB"):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    for one in results:
        if first := one.who == OURS:
            table.add_section()
        table.add_row(
            str(one.turns) if first else "",
            f"{one.sampled_tokens:,}" if first else "",
            one.who,
            f"{one.read_tokens:,}",
            f"{one.seconds * 1000:,.0f}",
            f"{one.tokens_per_s:,.0f}",
            f"{one.times_slower:.2f}",
            f"{one.peak_mib:,.0f}",
        )
    return table


def main(backend: Literal["hf", "unsloth"] = "hf") -> None:
    """Run it; on Unsloth without TRL, since Unsloth patches TRL too."""
    parser = parser_of(
        __doc__.splitlines()[0],
        {
            "--turns": {"type": int, "nargs": "+", "default": [2, 4, 8, 16], "help": "of each trajectory"},
            "--vocabulary": {"type": int, "nargs": "+", "default": [4096], "help": "tokens the model knows"},
            "--hidden": {"type": int, "default": 256, "help": "hidden size"},
            "--layers": {"type": int, "default": 4},
            "--budget": {"type": int, "default": 8192, "help": "tokens of a micro-batch, padding included"},
            "--repeats": {"type": int, "default": 3, "help": "rounds; the median of them is shown"},
            "--device": {
                "choices": ("cpu", "cuda"),
                "default": "cpu",
                "help": "cpu computes in fp32, cuda in bf16",
            },
            "--threads": {"type": int, "default": 2, "help": "on the CPU"},
            "--enough": {
                "type": float,
                "nargs": 2,
                "default": (4.0, 1.5),
                "metavar": ("CALLS", "MERGED"),
                "help": "times slower that TRL has to be with 8 turns, by a row per call and by our merged rows",
            },
            "--json": {"type": Path, "metavar": "FILE", "help": "write the figures there too"},
        },
    )
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("--device cuda: torch finds no such device here")
    torch.set_num_threads(args.threads)
    console = Console()
    results: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="whetstone-steps-") as folder, Progress(console=console) as progress:
        rounds = len(args.vocabulary) * len(args.turns) * (args.repeats + 1)
        task = progress.add_task("passes", total=rounds * (4 if backend == "hf" else 2))
        for vocabulary in args.vocabulary:
            sides = Sides(Path(folder), vocabulary, args, backend)
            for turns in args.turns:
                results += measure(sides, turns, vocabulary, args.repeats, lambda: progress.advance(task))
    for vocabulary in args.vocabulary:
        console.print(_table([one for one in results if one.vocabulary == vocabulary], args))
    if backend == "hf":
        console.print(
            "On Unsloth: not run. `python -m benchmarks.learning.step.unsloth --device cuda` in its environment does."
        )
    if args.json:
        args.json.write_text(json.dumps([asdict(one) for one in results], indent=1) + "\n")
    short = [
        f"{one.who}: {one.times_slower:.2f} times slower with a vocabulary of {one.vocabulary:,}, not {least}"
        for one in results
        for who, least in zip((CALLS, MERGED), args.enough, strict=True)
        if one.turns == 8 and one.who == who and one.times_slower < least
    ]
    if short:
        raise SystemExit("\n".join(short))


if __name__ == "__main__":
    warnings.filterwarnings("ignore", module="trl")
    main()
