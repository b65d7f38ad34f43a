"""Compute each version's mean reward in training and held out, with its interval, and its gain over version 0. Pure."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from proxy.dashboard.queries.policies import PolicyRewards, VersionRewards, VersionState
from whetstone.domain import gains
from whetstone.domain.stats import FEWEST_REWARDS, Interval, Sample, sample_of, share_of, t_95

LEAST_ALIKE = 30
"""Number of equal rewards from which their interval may have zero width."""
SUM_ROUNDING = 1e-9
"""The same of a sum in the roll-ups, to which changes were added and from which they were subtracted."""


@dataclass(frozen=True)
class MeanReward:
    """The mean of some rewards with its 95 % interval; the interval is None if there are too few."""

    rewarded: int
    mean: float
    low: float | None
    high: float | None

    @property
    def is_few(self) -> bool:
        """Return whether there are too few rewards for a headline."""
        return self.rewarded < FEWEST_REWARDS


@dataclass(frozen=True)
class MeanRewards:
    """The mean rewards by version; versions without a reward are left out."""

    training: Mapping[int, MeanReward]
    held_out: Mapping[int, MeanReward]


@dataclass(frozen=True)
class Point:
    """A version in the curve; a mean is None if none of its trajectories has a reward."""

    version: int
    state: str
    was_live: bool
    training: MeanReward | None
    held_out: MeanReward | None


@dataclass(frozen=True)
class Comparison:
    """The version that a headline compares with version 0, and the split whose rewards it uses."""

    version: int
    is_held_out: bool


@dataclass(frozen=True)
class Gain:
    """By how much the mean reward of a version exceeds that of version 0."""

    version: int
    is_held_out: bool
    difference: Interval
    pairs: int | None
    """Number of attempts at the same prompt that were paired; None if all rewards were compared, unpaired."""


@dataclass(frozen=True)
class _Scale:
    """Which values the rewards of a policy and split take, as far as their sums show it."""

    is_share: bool
    """All are 0 or 1, and both occur."""
    low: float
    high: float
    """All rewards are between these, so no interval extends beyond them."""


def mean_rewards(rewards: PolicyRewards) -> MeanRewards:
    """Return the mean rewards of all versions, however old."""
    return MeanRewards(*(_means(of_split) for of_split in (rewards.training, rewards.held_out)))


def points(states: Sequence[VersionState], means: MeanRewards) -> list[Point]:
    """Return the versions, in order, each with its mean rewards."""
    return [
        Point(one.version, one.state, one.was_live, means.training.get(one.version), means.held_out.get(one.version))
        for one in states
    ]


@dataclass(frozen=True)
class Beside:
    """The mean rewards of another policy, a control or a baseline for example, at the versions of this one."""

    policy: str
    is_held_out: bool
    means: Mapping[int, MeanReward]
    """By version of this policy. Those of equal number belong together; of a policy that was measured at one version
    only, as other servers' models are, that version is beside all."""


def beside(points: Sequence[Point], policy: str, other: MeanRewards) -> Beside:
    """Return the means of another policy, held out if both have such rewards, else in training."""
    is_held_out = bool(other.held_out) and any(point.held_out for point in points)
    means = other.held_out if is_held_out else other.training
    only = next(iter(means.values())) if len(means) == 1 else None
    by_version = {point.version: only or means.get(point.version) for point in points}
    return Beside(policy, is_held_out, {version: mean for version, mean in by_version.items() if mean is not None})


def comparison(states: Sequence[VersionState], means: MeanRewards, live: int) -> Comparison | None:
    """Return what the headline compares with version 0: the live version, or else the newest that was live and has
    enough rewards; held out, or else in training. None if nothing has enough, or version 0 is live.
    """
    before = (one.version for one in reversed(states) if one.was_live and one.state != "rejected" and one.version > 0)
    for version in chain([live], before) if live else ():
        for is_held_out, by_version in ((True, means.held_out), (False, means.training)):
            both = by_version.get(0), by_version.get(version)
            if all(one is not None and not one.is_few for one in both):
                return Comparison(version, is_held_out)
    return None


def may_be_paired(compared: Comparison, rewards: PolicyRewards) -> bool:
    """Return whether the rewards are held-out rewards, and few enough to be read by prompt."""
    before, after = (
        sum(one.rewarded for one in rewards.held_out if one.version == version) for version in (0, compared.version)
    )
    return compared.is_held_out and gains.may_be_paired(before, after)


def gain(compared: Comparison, rewards: PolicyRewards, before: gains.ByPrompt, after: gains.ByPrompt) -> Gain:
    """Return the gain over version 0. `before`, `after`: held-out rewards of version 0 and of the version, by prompt;
    empty if they are not to be paired."""
    by_version = {one.version: one for one in (rewards.held_out if compared.is_held_out else rewards.training)}
    result = gains.gain(_sample(by_version[0]), _sample(by_version[compared.version]), before, after)
    return Gain(compared.version, compared.is_held_out, result.difference, result.pairs)


def _means(rewards: Sequence[VersionRewards]) -> dict[int, MeanReward]:
    scale = _scale(rewards)
    return {one.version: _mean(one, scale) for one in rewards}


def _mean(rewards: VersionRewards, scale: _Scale) -> MeanReward:
    """Compute Wilson's interval of a share; of other rewards Student's, `mean ± t · s / √n`, s from the sample (n - 1),
    within the scale. A few equal rewards do not show how much others differ, so they get no interval.
    """
    n, sample = rewards.rewarded, _sample(rewards)
    if scale.is_share:
        interval = share_of(rewards.reward_sum, n)
        return MeanReward(n, interval.mean, interval.low, interval.high)
    if not sample.variance and n < LEAST_ALIKE:
        return MeanReward(n, sample.mean, None, None)
    half = t_95(n - 1) * math.sqrt(sample.variance / n)
    return MeanReward(n, sample.mean, max(scale.low, sample.mean - half), min(scale.high, sample.mean + half))


def _sample(rewards: VersionRewards) -> Sample:
    return sample_of(rewards.rewarded, rewards.reward_sum, rewards.reward_squares)


def _scale(rewards: Sequence[VersionRewards]) -> _Scale:
    """Infer the scale: squares of values between 0 and 1 sum to at most their sum, and to just that only of 0 and 1."""
    if any(one.reward_squares > one.reward_sum + _slack(one) for one in rewards):
        return _Scale(is_share=False, low=-math.inf, high=math.inf)
    is_share = all(one.reward_squares >= one.reward_sum - _slack(one) for one in rewards)
    total, count = sum(one.reward_sum for one in rewards), sum(one.rewarded for one in rewards)
    return _Scale(is_share=is_share and 0 < total < count, low=0.0, high=1.0)


def _slack(rewards: VersionRewards) -> float:
    return SUM_ROUNDING * max(rewards.rewarded, rewards.reward_squares)
