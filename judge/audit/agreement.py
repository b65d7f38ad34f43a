"""Measure how far two rankings agree, and how far a judge agrees with itself. Pure arithmetic."""

import itertools
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from judge.ruler.aggregate import verdict
from whetstone.domain.stats import Z_95, Interval, share

FEWEST_CLUSTERS = 10
"""Groups; a normal interval from fewer is too narrow."""

Scores = Sequence[tuple[float, float]]
"""For each attempt of one group: the judge's score and the reference."""
Shown = Mapping[str, tuple[float, float]]
"""One judgement. Attempt -> its score, and its position in the prompt, from 0 (first) to 1 (last)."""
Section = Sequence[Shown]
"""Judgements of the same attempts by one judge."""


@dataclass(frozen=True, slots=True)
class Pairs:
    """Pairs of attempts that both rankings order."""

    alike: int = 0
    of: int = 0
    free: int = 0
    """How many of them are independent: in a group of G attempts G - 1 at most."""

    def __add__(self, other: "Pairs") -> "Pairs":
        return Pairs(self.alike + other.alike, self.of + other.of, self.free + other.free)

    @property
    def share(self) -> Interval | None:
        """Return the share that is ordered alike, with Wilson's interval of as many pairs as are independent.

        None without pairs.
        """
        if not self.of:
            return None
        alike = round(self.free * self.alike / self.of)
        return replace(share([1] * alike + [0] * (self.free - alike)), mean=self.alike / self.of)


def kendall_tau_b(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Compute Kendall's τ_b (M. G. Kendall, Biometrika 33, 1945): (C - D) / √((C + D + X)(C + D + Y)).

    C and D are the pairs that both order, alike and not; X those that only x ties, Y those that only y ties. None where
    x or y ties all pairs.

    Raises:
        ValueError: the lengths differ.
    """
    counts = {"C": 0, "D": 0, "X": 0, "Y": 0}
    for dx, dy in _differences(list(zip(x, y, strict=True))):
        if dx and dy:
            counts["C" if (dx > 0) == (dy > 0) else "D"] += 1
        elif dx or dy:
            counts["Y" if dx else "X"] += 1
    both = counts["C"] + counts["D"]
    squared = (both + counts["X"]) * (both + counts["Y"])
    return (counts["C"] - counts["D"]) / math.sqrt(squared) if squared else None


def pair_agreement(groups: Iterable[Scores]) -> Pairs:
    """Count, among the pairs within groups that neither judge nor reference ties, those that both order alike."""
    return sum(map(_pairs, groups), Pairs())


def auc(scores: Sequence[float], labels: Sequence[bool]) -> float | None:
    """Return the chance that an attempt labelled True scores above one that is not; a tie counts half.

    That is Mann and Whitney's U over the number of such pairs (Annals of Mathematical Statistics 18, 1947), from
    midranks. None where all labels are the same.
    """
    good = sum(labels)
    if not 0 < good < len(labels):
        return None
    ordered = sorted(zip(scores, labels, strict=True), key=lambda one: one[0])
    ranks = below = 0.0
    for _, tied in itertools.groupby(ordered, key=lambda one: one[0]):
        marks = [label for _, label in tied]
        ranks += sum(marks) * (below + (len(marks) + 1) / 2)
        below += len(marks)
    return (ranks - good * (good + 1) / 2) / (good * (len(labels) - good))


def mean_interval(values: Sequence[float]) -> Interval | None:
    """Return the mean with its normal 95 % interval; None for fewer than two values."""
    if len(values) < 2:
        return None
    mean, half = statistics.fmean(values), Z_95 * statistics.stdev(values) / math.sqrt(len(values))
    return Interval(mean, mean - half, mean + half)


def placed(section: Section) -> list[tuple[float, float]]:
    """Return each score's position relative to the middle, and the score relative to what is expected.

    One pair for each attempt in each judgement.

    Where the attempts were judged more than once, the attempt's mean is subtracted from both, and the judgement's mean
    from the score too. Where they were judged once, their order is random: the judgement's mean is subtracted from
    both.
    """
    position, score = (
        _residuals([{one: places[of] for one, places in shown.items()} for shown in section]) for of in (1, 0)
    )
    return list(zip(position, score, strict=True))


def position_bias(groups: Sequence[Sequence[Section]]) -> Interval | None:
    """Return how much higher an attempt scores when it is shown last than when it is shown first.

    The least-squares slope β = Σ p·x / Σ p² over what `placed` gives. Its 95 % interval is normal, with the groups as
    clusters: var β = M/(M - 1) · Σ_m (Σ p·e)² / (Σ p²)², e = x - β·p (Liang and Zeger, Biometrika 73, 1986). None with
    fewer than ten groups of two attempts.
    """
    clusters = [[point for section in sections for point in placed(section)] for sections in groups]
    clusters = [points for points in clusters if any(p for p, _ in points)]
    if len(clusters) < FEWEST_CLUSTERS:
        return None
    squares = math.fsum(p * p for points in clusters for p, _ in points)
    slope = math.fsum(p * x for points in clusters for p, x in points) / squares
    meat = math.fsum(math.fsum(p * (x - slope * p) for p, x in points) ** 2 for points in clusters)
    half = Z_95 * math.sqrt(meat * len(clusters) / (len(clusters) - 1)) / squares
    return Interval(slope, slope - half, slope + half)


def repeatability(sections: Iterable[Section]) -> tuple[float | None, Pairs]:
    """Return how two judgements of the same attempts differ: a standard deviation, and the pairs that they order alike.

    σ² = Σ σ_s²·d_s / Σ d_s over sections s, d = (A - 1)(K - 1), σ_s as in `judge.ruler.aggregate`. None where nothing
    was judged twice.
    """
    squares, freedom, pairs = 0.0, 0, Pairs()
    for section in (section for section in sections if len(section) > 1):
        names = list(section[0])
        judged = {(0, k): {a: shown[one][0] for a, one in enumerate(names)} for k, shown in enumerate(section)}
        noise = verdict(len(names), judged).noise
        if noise is None:
            continue
        free = (len(names) - 1) * (len(section) - 1)
        squares, freedom = squares + free * noise**2, freedom + free
        alike = pair_agreement(
            [(one[name][0], other[name][0]) for name in names] for one, other in itertools.combinations(section, 2)
        )
        pairs += replace(alike, free=min(alike.free, free))
    return (math.sqrt(squares / freedom) if freedom else None), pairs


def threshold_of(references: Sequence[float]) -> float:
    """Return the median, or the next greater value where none is below it.

    Attempts from this value on are good.

    Raises:
        statistics.StatisticsError: there are none.
    """
    median = statistics.median(references)
    greater = [one for one in references if one > median]
    return median if min(references) < median or not greater else min(greater)


def _differences(points: Scores) -> Iterator[tuple[float, float]]:
    return ((x - other_x, y - other_y) for (x, y), (other_x, other_y) in itertools.combinations(points, 2))


def _pairs(points: Scores) -> Pairs:
    """Count pairs; a pair that one of the rankings ties is not counted."""
    apart = [(dx > 0) == (dy > 0) for dx, dy in _differences(points) if dx and dy]
    return Pairs(sum(apart), len(apart), min(len(points) - 1, len(apart)))


def _residuals(judgements: Sequence[Mapping[str, float]]) -> list[float]:
    """Return x_ak minus the mean of its judgement and, with several judgements, of its attempt: two-way, balanced."""
    names = list(judgements[0])
    means_k = [statistics.fmean(one.values()) for one in judgements]
    if len(judgements) == 1:
        return [judgements[0][name] - means_k[0] for name in names]
    whole = statistics.fmean(means_k)
    means_a = {name: statistics.fmean(one[name] for one in judgements) for name in names}
    return [
        one[name] - means_a[name] - mean + whole
        for one, mean in zip(judgements, means_k, strict=True)
        for name in names
    ]
