"""Compute the figures of `swaps` from what was seen. Pure. Times are seconds of one monotonic clock."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean

TOLERANCE_NATS = 0.01
"""Largest mean |Δ| of a half completion: server and trainer differ by a thousandth of that, the adapters by 2 nats."""
BEFORE_S, AFTER_S = 0.1, 0.5
"""A swap's window: from this long before its adapter begins to load until this long after the switch."""


@dataclass
class RequestOutcome:
    """A request, as its app saw it."""

    began_at: float
    streamed: bool
    new: bool
    """It begins a trajectory."""
    status: int = 0
    """0: no answer began."""
    completion_id: str = ""
    version: int | None = None
    """Version in the answer's headers."""
    whole: bool = False
    honest: bool = False
    """A failed request was reported correctly."""
    error: str = ""
    """Why it failed."""
    events_at: list[float] = field(default_factory=list)
    ended_at: float = 0.0

    @property
    def failed(self) -> bool:
        """Whether it got no complete answer."""
        return not self.whole


@dataclass(frozen=True)
class Swap:
    """One swap, with the moments that bound it."""

    version: int
    load_at: float
    live_at: float

    @property
    def window(self) -> tuple[float, float]:
        """The start and end of the time in which it may be felt."""
        return self.load_at - BEFORE_S, self.live_at + AFTER_S


def gaps(recorded: Sequence[float], computed: Sequence[float]) -> tuple[float, float]:
    """Return mean |Δ| in nats of each half of a completion's tokens; infinite if the lengths differ."""
    if len(recorded) != len(computed) or not recorded:
        return math.inf, math.inf
    apart = [abs(x - y) for x, y in zip(recorded, computed, strict=True)]
    middle = (len(apart) + 1) // 2
    return fmean(apart[:middle]), fmean(apart[middle:] or [0.0])


def fits(recorded: Sequence[float], computed: Sequence[float]) -> bool:
    """Return whether one version sampled all tokens. A part by another version shows in its half, even if small."""
    # `<=`, not `not … >`: NaN must not fit.
    return all(gap <= TOLERANCE_NATS for gap in gaps(recorded, computed))


def inside(moment: float, swaps: Iterable[Swap]) -> bool:
    """Return whether a swap may be felt at this moment."""
    return any(begin <= moment <= end for begin, end in (swap.window for swap in swaps))


def _apart(felt: Iterable[tuple[bool, float]]) -> tuple[list[float], list[float]]:
    """Return the values during a swap, and all others."""
    values = list(felt)
    return [value for during, value in values if during], [value for during, value in values if not during]


def waits(outcomes: Iterable[RequestOutcome], swaps: Sequence[Swap]) -> tuple[list[float], list[float]]:
    """Return seconds to the first token of whole streams: of those sent while a swap may be felt, and of all others."""
    return _apart(
        (inside(outcome.began_at, swaps), outcome.events_at[0] - outcome.began_at)
        for outcome in outcomes
        if outcome.streamed and outcome.whole and outcome.events_at
    )


def stalls(outcomes: Iterable[RequestOutcome], swaps: Sequence[Swap]) -> tuple[float, float]:
    """Return the longest time between two events of a stream: where it overlaps a swap's window, and elsewhere."""
    windows = [swap.window for swap in swaps]
    during, other = _apart(
        (any(before <= end and after >= begin for begin, end in windows), after - before)
        for outcome in outcomes
        for before, after in pairwise(outcome.events_at)
    )
    return max(during, default=0.0), max(other, default=0.0)


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least this share of the values do not exceed; NaN for no values."""
    ranked = sorted(values)
    return ranked[max(0, math.ceil(share * len(ranked)) - 1)] if ranked else math.nan


def stepped_back(outcomes: Iterable[RequestOutcome]) -> list[tuple[int, int]]:
    """Return new trajectories that an older version answered although a newer one had answered before they were sent.

    Versions of these runs only increase, so each such trajectory was answered by a version that is no longer live.
    Returns pairs: the version that answered, and the newest one before it.
    """
    new = [(one.began_at, one.ended_at, one.version) for one in outcomes if one.new and one.version is not None]
    met = [
        (version, max((newer for _, ended_at, newer in new if ended_at < began_at), default=-1))
        for began_at, _, version in sorted(new)
    ]
    return [(version, newest) for version, newest in met if version < newest]


def late(outcomes: Iterable[RequestOutcome], swaps: Iterable[Swap]) -> int:
    """Count new trajectories sent after a switch was acknowledged that an older version answered."""
    lives = [(swap.live_at, swap.version) for swap in swaps]
    return sum(
        outcome.version < max((version for at, version in lives if at < outcome.began_at), default=0)
        for outcome in outcomes
        if outcome.new and outcome.version is not None
    )
