"""How often the gate's tests err: `trainer.domain.gate.verdict` on simulated rewards whose true loss is known.

Prints, for each test and true loss, the share of runs that reject with its standard error, and how many of the
candidate's groups a run took. Exits 0 only if a loss of `gate.smallest_loss` is caught in `gate.power` of the runs of
`canary` and of the watch within their documented number of groups, and no test rejects more than `gate.error_rate` (and
two standard errors) of candidates that are no worse. Uses numpy; no stack, no database.
"""

import argparse
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from benchmarks.kit.options import parser_of
from trainer.domain.gate.verdict import Moments, Verdict, compared, paired, samples_needed, watched
from whetstone.config.gate import GateSettings

Floats = npt.NDArray[np.float64]
Taken = npt.NDArray[np.bool_]
Rewards = Literal["coin", "skewed", "uniform", "clustered"]
ATTEMPTS = 8
"""Attempts at each prompt of the clustered rewards, all right with a chance of the prompt's own: from never to always.
"""
SPREADS: dict[Rewards, float] = {
    "coin": 0.5,
    "skewed": 0.3,
    "uniform": math.sqrt(1 / 12),
    "clustered": math.sqrt(1 / 8 + 1 / 8 / ATTEMPTS),
}
"""Standard deviations of a group's mean reward: right half of the time, right in nine of ten, anything from 0 to 1 (all
three one attempt per group), and the mean of a prompt's attempts.
"""
LOSSES = (0.0, 0.02, 0.05, 0.1, 0.2)
SWEEPS = 25
"""How often the worker checks until there are enough rewards."""
ROOM = 2
"""A run gets this many times the groups that are needed with a known spread: the spread is estimated as they come."""


@dataclass(frozen=True)
class Case:
    """A test, and the properties of its rewards."""

    test: Literal["canary", "watch", "heldout"]
    rewards: Rewards
    share: float = 0.5
    fall: float = 0.0
    """How far the rewards of both versions fall, independent of the version, from the parent's first to the test's
    last.
    """


@dataclass(frozen=True)
class Line:
    """The result of many runs of a case."""

    case: Case
    loss: float
    rejected: float
    error: float
    """Standard error of `rejected`."""
    undecided: float
    """Share of the runs that ended without a decision."""
    used: float
    """Groups of the candidate, on average."""
    most: int
    """Number of groups of the last look, by the formula; where both versions answer the same groups, with the spread
    and the share that the runs saw.
    """


CASES = (
    *(Case("canary", rewards, share) for rewards in SPREADS for share in (0.1, 0.5)),
    *(Case("watch", rewards) for rewards in SPREADS),
    Case("heldout", "coin"),
    Case("canary", "coin", 0.1, fall=0.2),
    Case("watch", "coin", fall=0.05),
)


def simulated(case: Case, loss: float, runs: int, seed: int, gate: GateSettings) -> Line:
    """Run the test `runs` times."""
    rng = np.random.default_rng(seed)
    one = {"canary": _canary, "watch": _watch, "heldout": _heldout}[case.test]
    ends = [one(case, loss, rng, gate) for _ in range(runs)]
    rejected, undecided = (
        sum(end.decision == decision for end, _ in ends) / runs for decision in ("reject", "testing")
    )
    error, used = math.sqrt(rejected * (1 - rejected) / runs), sum(used for _, used in ends) / runs
    return Line(case, loss, rejected, error, undecided, used, _most(case, [end for end, _ in ends], gate))


def bar_holds(line: Line, runs: int, gate: GateSettings) -> bool | None:
    """Return whether the line is within its bar; None where it has none."""
    if line.case.test == "watch" and line.case.fall:
        return None  # it cannot know the rewards that its parent would have got meanwhile
    if line.loss == 0:
        error = math.sqrt(gate.error_rate * (1 - gate.error_rate) / runs)
        return line.rejected <= gate.error_rate + 2 * error
    if line.loss == gate.smallest_loss and line.case.test != "heldout":
        return line.rejected >= gate.power
    return None


def _most(case: Case, ends: Sequence[Verdict], gate: GateSettings) -> int:
    if case.test == "heldout":
        return gate.heldout_prompts
    if case.test == "canary" and case.rewards == "clustered":
        return round(sum(end.figures["needed"] for end in ends) / len(ends))
    return samples_needed(SPREADS[case.rewards], case.share, gate)


def _canary(case: Case, loss: float, rng: np.random.Generator, gate: GateSettings) -> tuple[Verdict, int]:
    count = math.ceil(ROOM * samples_needed(SPREADS[case.rewards], case.share, gate) / case.share)
    sweep = count // (ROOM * SWEEPS)
    if case.rewards == "clustered":
        sides = [_sums(*side, sweep) for side in _shared(rng, count, case.share, loss)]
    else:
        is_candidate = rng.random(count) < case.share
        fallen = case.fall * (np.arange(count) / count - 0.5)
        rewards = _drawn(rng, case.rewards, fallen + loss * is_candidate)
        sides = [_sums(rewards, taken, sweep) for taken in (is_candidate, ~is_candidate)]
    return _first_decision(zip(*sides, strict=True), compared, gate)


def _watch(case: Case, loss: float, rng: np.random.Generator, gate: GateSettings) -> tuple[Verdict, int]:
    needed = samples_needed(SPREADS[case.rewards], 0.5, gate)
    count = ROOM * needed
    fallen = case.fall * np.arange(2 * count) / (2 * count)
    before = _drawn(rng, case.rewards, fallen[:count])[::-1][: math.ceil(1.3 * needed)].tolist()
    rewards = _drawn(rng, case.rewards, fallen[count:] + loss)
    sums = _sums(rewards, np.ones(count, dtype=np.bool_), needed // SWEEPS)
    return _first_decision(((live, before) for live in sums), watched, gate)


def _first_decision(
    looks: Iterable[tuple[Moments, Any]], test: Callable[[Moments, Any, GateSettings, int], Verdict], gate: GateSettings
) -> tuple[Verdict, int]:
    """Look at the candidate's rewards beside the others until the test decides; return how many of them it took."""
    verdict, used = Verdict("testing", ""), 0
    for candidate, others in looks:
        verdict, used = test(candidate, others, gate, verdict.looked), candidate.count
        if verdict.decision != "testing":
            break
    return verdict, used


def _heldout(_case: Case, loss: float, rng: np.random.Generator, gate: GateSettings) -> tuple[Verdict, int]:
    """Test one answer of each version to prompts with a chance of their own to be solved, from never to always."""
    chance = rng.beta(0.5, 0.5, gate.heldout_prompts)
    by_parent = rng.random(len(chance)) < chance
    by_candidate = rng.random(len(chance)) < chance * (1 - 2 * loss)
    return paired((by_candidate.astype(float) - by_parent).tolist(), gate), len(chance)


def _shared(rng: np.random.Generator, count: int, share: float, loss: float) -> list[tuple[Floats, Taken]]:
    """Return mean rewards of the candidate's and the parent's attempts at the same prompts, and where there are any."""
    chance = rng.beta(0.5, 0.5, count)
    attempts = rng.binomial(ATTEMPTS, share, count)
    sides = ((attempts, chance * (1 - 2 * loss)), (ATTEMPTS - attempts, chance))
    return [(rng.binomial(tries, right) / np.maximum(tries, 1), tries > 0) for tries, right in sides]


def _drawn(rng: np.random.Generator, rewards: Rewards, lost: Floats) -> Floats:
    """Return rewards of one group each, whose mean is `lost` below that of the parent's first."""
    if rewards == "clustered":
        chance = rng.beta(0.5, 0.5, len(lost)) * (1 - 2 * lost)
        return rng.binomial(ATTEMPTS, chance) / ATTEMPTS
    drawn = rng.random(len(lost))
    if rewards == "uniform":
        return drawn - lost
    return (drawn < {"coin": 0.5, "skewed": 0.9}[rewards] - lost).astype(np.float64)


def _sums(rewards: Floats, taken: Taken, sweep: int) -> Iterator[Moments]:
    """Yield the moments of the rewards so far, after each sweep."""
    counts, sums, squares = (
        np.cumsum(each)[sweep - 1 :: sweep].tolist() for each in (taken, rewards * taken, rewards * rewards * taken)
    )
    for count, total, square in zip(counts, sums, squares, strict=True):
        mean = total / count if count else 0.0
        yield Moments(count, mean, max(0.0, square / count - mean * mean) if count else 0.0)


def main() -> int:
    """Simulate, print the table, and return 0 if all bars hold."""
    parser = parser_of(
        __doc__,
        {
            "--runs": {"type": int, "default": 2000, "help": "runs of each line"},
            "--seed": {"type": int, "default": 0},
            "--only": {"choices": ("canary", "watch", "heldout"), "help": "one test instead of all"},
            "--rewards": {"choices": tuple(SPREADS), "help": "one kind of rewards instead of all"},
        },
        argparse.RawDescriptionHelpFormatter,
    )
    args = parser.parse_args()
    gate = GateSettings()
    table = Table("test", "rewards", "share", "fall of both", "true loss", "rejected", "groups used", "needed", "bar")
    bars = []
    for case in CASES:
        if args.only not in (None, case.test) or args.rewards not in (None, case.rewards):
            continue
        for loss in LOSSES:
            line = simulated(case, loss, args.runs, args.seed, gate)
            bars.append(bar_holds(line, args.runs, gate))
            table.add_row(
                case.test,
                case.rewards,
                "paired" if case.test == "heldout" else f"{case.share:.1f}",
                f"{case.fall:.2f}" if case.fall else "",
                f"{loss:.2f}",
                f"{100 * line.rejected:5.1f} ± {100 * line.error:.1f} %",
                f"{line.used:.0f}",
                str(line.most),
                {None: "", True: "holds", False: "BROKEN"}[bars[-1]],
            )
        table.add_section()
    Console(width=120).print(table)
    return 0 if False not in bars else 1


if __name__ == "__main__":
    sys.exit(main())
