"""Compute shares and mean differences with their 95 % intervals."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

Z_95 = 1.959963984540054
"""Two-sided 95 % quantile of the normal distribution."""
T_95 = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622)
"""The same quantile of Student's distribution, for 1 to 9 degrees of freedom."""


@dataclass(frozen=True)
class Interval:
    """A mean and the ends of its 95 % interval."""

    mean: float
    low: float
    high: float


def share(won: Sequence[int]) -> Interval:
    """Return the share of 1s, with Wilson's interval (E. B. Wilson, JASA 22, 1927).

    Raises:
        ValueError: `won` is empty.
    """
    n = len(won)
    if not n:
        raise ValueError("a share of nothing")
    p = sum(won) / n
    centre = (p + Z_95**2 / (2 * n)) / (1 + Z_95**2 / n)
    half = Z_95 / (1 + Z_95**2 / n) * math.sqrt(p * (1 - p) / n + Z_95**2 / (4 * n**2))
    return Interval(p, max(0.0, centre - half), min(1.0, centre + half))


def gain(before: Sequence[int], after: Sequence[int]) -> Interval:
    """Return the mean of the paired differences `after - before`, with its normal interval.

    Raises:
        ValueError: the lengths differ, or there are fewer than two games.
    """
    if len(before) != len(after) or len(before) < 2:
        raise ValueError(f"{len(before)} and {len(after)} games are not pairs")
    differences = [b - a for a, b in zip(before, after, strict=True)]
    mean = statistics.fmean(differences)
    half = Z_95 * statistics.stdev(differences) / math.sqrt(len(differences))
    return Interval(mean, mean - half, mean + half)


def t_95(degrees: int) -> float:
    """Return the two-sided 95 % quantile of Student's distribution. From 10 degrees of freedom it uses the expansion
    around the normal quantile (Abramowitz and Stegun, 26.7.5), accurate to 2e-4.

    Raises:
        ValueError: `degrees` is below 1.
    """
    if degrees < 1:
        raise ValueError("an interval of one value")
    if degrees <= len(T_95):
        return T_95[degrees - 1]
    z = Z_95
    first, second = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / degrees + second / degrees**2 + third / degrees**3
