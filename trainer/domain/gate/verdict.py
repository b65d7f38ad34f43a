"""Decide from rewards whether a version is worse than its parent. Pure.

Two tests, each one-sided: a version that is not seen to be worse passes.

`paired`: both versions answered the same prompts; Student's t of the differences.

`compared` and `watched`: two samples that grow. A sample consists of groups: what counts is the mean reward of a
group's trajectories, since attempts at one prompt are not independent. The sample size is fixed beforehand: with

    n = (z(1 - α_last) + z(power))² · spread² / smallest_loss²

as n_c·n_p / (n_c + n_p) of n_c candidate's and n_p parent's groups, a true loss of `smallest_loss` is detected with
probability `power`. The test looks only at LOOKS of that size, once at each, and the allowed error is spread over the
looks: a group sequential test (Pocock, Biometrika 64, 1977), strict while there is little data and nearly the fixed
test at the end (O'Brien and Fleming, Biometrics 35, 1979), its looks where traffic happens to put them (Lan and DeMets,
Biometrika 70, 1983). The errors of the looks are added up (Bonferroni) instead of integrated over their joint
distribution. That takes a fifth more samples than one look at the end, but the rule can be checked by hand and holds
for any dependence between the looks. The worker checks the rewards regularly; between two looks nothing is decided.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Literal

from trainer.domain.baselines import LARGEST
from whetstone.config.gate import GateSettings

Decision = Literal["pass", "reject", "testing"]

RESERVE = 1.06
"""The sample is larger than the formula's by this factor: the spread in the formula is itself estimated, and is
smallest where the candidate happens to look good.
"""
LOOKS = (0.125, 0.25, 0.5, 1.0)
"""When the test looks, as shares of the sample size: a candidate that is far worse is rejected after an eighth."""
SPENT = (0.04, 0.1, 0.26, 0.6)
"""Share of the allowed error that each look may use; the sum is 1."""
FEWEST = 30
"""Minimum number of groups of either version. Below it nothing is decided: the mean is not yet near enough to normal.
"""
NORMAL = NormalDist()


@dataclass(frozen=True, slots=True)
class Moments:
    """Summary of a sample of rewards."""

    count: int
    mean: float
    variance: float
    """Of the population: divided by `count`."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the rewards show so far."""

    decision: Decision
    reason: str
    figures: dict[str, float] = field(default_factory=dict)
    """The numbers that it is based on."""
    looked: int = 0
    """How many looks are over, including this one; pass it to the next call."""


def moments(rewards: Sequence[float]) -> Moments:
    """Return count, mean and variance; zeros for an empty sample. Rewards are clipped to LARGEST, as in a baseline."""
    count = len(rewards)
    if not count:
        return Moments(0, 0.0, 0.0)
    if max(rewards) > LARGEST or min(rewards) < -LARGEST:
        rewards = [min(max(reward, -LARGEST), LARGEST) for reward in rewards]
    mean = math.fsum(rewards) / count
    return Moments(count, mean, math.fsum([(gap := reward - mean) * gap for reward in rewards]) / count)


def paired(differences: Sequence[float], gate: GateSettings) -> Verdict:
    """Test the candidate's rewards minus its parent's, prompt by prompt: reject where their mean is below 0.

    `t = mean / (s / √n)` against the α quantile of Student's distribution with n - 1 degrees of freedom.

    Raises:
        ValueError: fewer than two prompts.
    """
    n = len(differences)
    if n < 2:
        raise ValueError(f"{n} prompts tell nothing")
    sample = moments(differences)
    error = math.sqrt(sample.variance / (n - 1))
    bound = -student(1 - gate.error_rate, n - 1) * error
    figures = {
        "prompts": float(n),
        "difference": sample.mean,
        "spread": error * math.sqrt(n),
        "bound": bound,
        "seen_loss": (NORMAL.inv_cdf(gate.power) + NORMAL.inv_cdf(1 - gate.error_rate)) * error,
    }
    if sample.mean < bound:
        return Verdict("reject", f"{-sample.mean:.3g} below its parent on {n} held-out prompts", figures)
    return Verdict("pass", f"{sample.mean:+.3g} to its parent on {n} held-out prompts", figures)


def samples_needed(spread: float, share: float, gate: GateSettings) -> int:
    """Return the number of the candidate's groups that ends the test.

    The candidate has `share` of all groups and its parent the rest. `spread` is the standard deviation of a group's
    mean reward.
    """
    return math.ceil(_information(spread, gate) / (1 - share))


def compared(candidate: Moments, parent: Moments, gate: GateSettings, looked: int) -> Verdict:
    """Compare both versions on rewards of the same hours. `looked` is the value of the last verdict, 0 at first."""
    if not (candidate.count and parent.count):
        return Verdict("testing", "no rewards of both versions yet", looked=looked)
    share = candidate.count / (candidate.count + parent.count)
    spread = _spread(candidate, parent)
    progress = share * parent.count / _information(spread, gate)
    return _at_look(candidate, parent, gate, looked, progress, samples_needed(spread, share, gate))


def watched(live: Moments, before: Sequence[float], gate: GateSettings, looked: int) -> Verdict:
    """Compare the live version with as many of its parent's rewards as it needs itself.

    `before` are the parent's rewards, the newest first. The test ends after that number of the live version's groups,
    even where the parent had fewer: then losses must be larger to be detected (`seen_loss`). Rewards that fall for both
    versions alike, for another cause, look like a loss here.
    """
    if not (live.count and before):
        return Verdict("testing", "no rewards of both versions yet", looked=looked)
    needed = samples_needed(_spread(live, moments(before)), 0.5, gate)
    return _at_look(live, moments(before[:needed]), gate, looked, live.count / needed, needed)


def student(probability: float, freedom: int) -> float:
    """Return a quantile of Student's t: Cornish and Fisher's expansion (Abramowitz and Stegun 26.7.5).

    Accurate to 0.5 % from 7 degrees of freedom on.
    """
    z, v = NORMAL.inv_cdf(probability), float(freedom)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return sum(term / v**power for power, term in enumerate(terms))


def _at_look(
    candidate: Moments, parent: Moments, gate: GateSettings, looked: int, progress: float, needed: int
) -> Verdict:
    """Return the verdict of the largest look that is due, if it is a new one.

    `progress` is the share of the needed information.
    """
    difference = candidate.mean - parent.mean
    figures = {
        "candidate_count": float(candidate.count),
        "candidate_mean": candidate.mean,
        "parent_count": float(parent.count),
        "parent_mean": parent.mean,
        "difference": difference,
        "needed": float(needed),
    }
    enough = min(candidate.count, parent.count) >= FEWEST
    due = sum(progress >= look for look in LOOKS) if enough else 0
    if due <= looked:
        return Verdict("testing", f"{candidate.count} of {needed} groups", figures, looked)
    error = _spread(candidate, parent) * math.sqrt(1 / candidate.count + 1 / parent.count)
    allowed = gate.error_rate * SPENT[due - 1]
    bound = -NORMAL.inv_cdf(1 - allowed) * error
    seen = NORMAL.inv_cdf(gate.power) * error - bound
    figures |= {"look": float(due), "bound": bound, "seen_loss": seen}
    if difference < bound:
        return Verdict("reject", f"{-difference:.3g} below its parent, of {candidate.count} groups", figures, due)
    if due == len(LOOKS):
        return Verdict("pass", f"{difference:+.3g} to its parent, of {candidate.count} groups", figures, due)
    return Verdict("testing", f"{candidate.count} of {needed} groups", figures, due)


def _information(spread: float, gate: GateSettings) -> float:
    """Return n_c·n_p / (n_c + n_p) at the last look."""
    quantiles = NORMAL.inv_cdf(1 - gate.error_rate * SPENT[-1]) + NORMAL.inv_cdf(gate.power)
    return RESERVE * max((quantiles * spread / gate.smallest_loss) ** 2, FEWEST)


def _spread(candidate: Moments, parent: Moments) -> float:
    """Return the standard deviation about each sample's own mean: pooled, or of two populations (Welch) if larger."""
    n, m = candidate.count, parent.count
    one = n * candidate.variance + m * parent.variance
    two = m * candidate.variance + n * parent.variance
    return math.sqrt(max(one, two) / (n + m))
