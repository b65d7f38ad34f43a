"""Compute shares and mean differences with their 95 % intervals."""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Z_95 = 1.959963984540054
"""Two-sided 95 % quantile of the normal distribution."""
T_95 = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622)
"""The same quantile of Student's distribution, for 1 to 9 degrees of freedom."""
CLUSTERS = 30
"""Number of prompts from which each of them counts as one observation: an estimate from few clusters is too small."""


FEWEST_REWARDS = 30
"""Number of rewards from which their mean is shown as a figure; with fewer it is in no headline and no gain."""
ROUNDING = 1e-12
"""Relative rounding error of a variance that is computed from sums."""


@dataclass(frozen=True)
class Interval:
    """A mean and the ends of its 95 % interval."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Sample:
    """How many values there are, with their mean and their variance (over n - 1)."""

    n: int
    mean: float
    variance: float


def sample_of(n: int, total: float, squares: float) -> Sample:
    """Return the sample of `n` values from their sum and the sum of their squares. One value has no variance.

    Raises:
        ValueError: `n` is 0.
    """
    if not n:
        raise ValueError("a sample of nothing")
    mean = total / n
    variance = max(0.0, squares - n * mean * mean) / (n - 1) if n > 1 else 0.0
    return Sample(n, mean, 0.0 if variance <= ROUNDING * mean * mean else variance)


def share(won: Sequence[int]) -> Interval:
    """Return the share of 1s, with Wilson's interval (E. B. Wilson, JASA 22, 1927).

    Raises:
        ValueError: `won` is empty.
    """
    return share_of(sum(won), len(won))


def share_of(successes: float, n: int) -> Interval:
    """Return `share` of `successes` in `n` attempts.

    Raises:
        ValueError: `n` is 0.
    """
    if not n:
        raise ValueError("a share of nothing")
    p = successes / n
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


def paired(differences: Sequence[Sequence[float]]) -> Interval:
    """Return the mean of paired differences, with its interval. `differences`: those of each prompt, `d_ci`.

    Attempts at one prompt share how hard it is. So with CLUSTERS or more prompts each counts as one observation
    (cluster-robust: K.-Y. Liang and S. Zeger, Biometrika 73, 1986; for evaluations: E. Miller, arXiv 2411.00640):
    `mean ± t · s`, `s² = C / (C − 1) · Σ_c (Σ_i (d_ci − mean))² / n²`, Student's t with C − 1 degrees. With fewer
    prompts each difference counts as one, which makes it Student's interval; it then holds for these prompts only.

    Raises:
        ValueError: there are fewer than two differences.
    """
    clusters = [cluster for cluster in differences if cluster]
    every = [difference for cluster in clusters for difference in cluster]
    if len(every) < 2:
        raise ValueError("an interval of one value")
    if len(clusters) < CLUSTERS:
        clusters = [[difference] for difference in every]
    mean, count = statistics.fmean(every), len(clusters)
    squares = sum((sum(cluster) - len(cluster) * mean) ** 2 for cluster in clusters)
    half = t_95(count - 1) * math.sqrt(squares * count / (count - 1)) / len(every)
    return Interval(mean, mean - half, mean + half)


def welch(before: Sample, after: Sample, *, quantile: Callable[[int], float] | None = None) -> Interval:
    """Return the difference of two means, `after - before`, with its interval (B. L. Welch, Biometrika 34, 1947).

    `s² = v_a / n_a + v_b / n_b`; Student's t with `s⁴ / Σ (v / n)² / (n − 1)` degrees, rounded down. `quantile`: of
    Student's distribution, by its degrees; None: `t_95`.

    Raises:
        ValueError: a sample has fewer than two values.
    """
    if min(before.n, after.n) < 2:
        raise ValueError("an interval of one value")
    errors = [sample.variance / sample.n for sample in (before, after)]
    shares = [error**2 / (sample.n - 1) for error, sample in zip(errors, (before, after), strict=True)]
    degrees = math.floor(sum(errors) ** 2 / sum(shares)) if sum(shares) else before.n + after.n - 2
    mean, half = after.mean - before.mean, (quantile or t_95)(max(1, degrees)) * math.sqrt(sum(errors))
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
