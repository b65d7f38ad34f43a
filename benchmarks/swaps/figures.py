"""Compute the figures of `swaps` from what was seen. Pure. Times are seconds of one monotonic clock."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

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
    return _mean(apart[:middle]), _mean(apart[middle:])


def fits(recorded: Sequence[float], computed: Sequence[float]) -> bool:
    """Return whether one version sampled all tokens. A part by another version shows in its half, even if small."""
    # `<=`, not `not … >`: NaN must not fit.
    return all(gap <= TOLERANCE_NATS for gap in gaps(recorded, computed))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def inside(moment: float, swaps: Iterable[Swap]) -> bool:
    """Return whether a swap may be felt at this moment."""
    return any(begin <= moment <= end for begin, end in (swap.window for swap in swaps))


def waits(outcomes: Iterable[RequestOutcome], swaps: Sequence[Swap]) -> tuple[list[float], list[float]]:
    """Return seconds to the first token of whole streams: of those sent while a swap may be felt, and of all others."""
    during: list[float] = []
    else_: list[float] = []
    for outcome in outcomes:
        if outcome.streamed and outcome.whole and outcome.events_at:
            (during if inside(outcome.began_at, swaps) else else_).append(outcome.events_at[0] - outcome.began_at)
    return during, else_


def stalls(outcomes: Iterable[RequestOutcome], swaps: Sequence[Swap]) -> tuple[float, float]:
    """Return the longest time between two events of a stream: where it overlaps a swap's window, and elsewhere."""
    during = else_ = 0.0
    windows = [swap.window for swap in swaps]
    for outcome in outcomes:
        for before, after in zip(outcome.events_at, outcome.events_at[1:], strict=False):
            if any(before <= end and after >= begin for begin, end in windows):
                during = max(during, after - before)
            else:
                else_ = max(else_, after - before)
    return during, else_


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least this share of the values do not exceed; NaN for no values."""
    ranked = sorted(values)
    return ranked[max(0, math.ceil(share * len(ranked)) - 1)] if ranked else math.nan


def stepped_back(outcomes: Iterable[RequestOutcome]) -> list[tuple[int, int]]:
    """Return new trajectories that an older version answered although a newer one had answered before they were sent.

    Versions of these runs only increase, so each such trajectory was answered by a version that is no longer live.
    Returns pairs: the version that answered, and the newest one before it.
    """
    ended = sorted(
        (outcome.ended_at, outcome.version) for outcome in outcomes if outcome.new and outcome.version is not None
    )
    back, newest, place = [], -1, 0
    for outcome in sorted(
        (outcome for outcome in outcomes if outcome.new and outcome.version is not None),
        key=lambda outcome: outcome.began_at,
    ):
        while place < len(ended) and ended[place][0] < outcome.began_at:
            newest = max(newest, ended[place][1])
            place += 1
        if outcome.version is not None and outcome.version < newest:
            back.append((outcome.version, newest))
    return back


def late(outcomes: Iterable[RequestOutcome], swaps: Iterable[Swap]) -> int:
    """Count new trajectories sent after a switch was acknowledged that an older version answered."""
    lives = [(swap.live_at, swap.version) for swap in swaps]
    return sum(
        outcome.version < max((version for at, version in lives if at < outcome.began_at), default=0)
        for outcome in outcomes
        if outcome.new and outcome.version is not None
    )
