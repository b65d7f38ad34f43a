"""Means, intervals and gains of versions: what is shown of few rewards, of shares, of pairs at the same prompt."""

from collections.abc import Sequence

import pytest

from proxy.dashboard.queries.policies import PolicyRewards, VersionRewards, VersionState
from proxy.dashboard.views.version_rewards import (
    Comparison,
    Gain,
    MeanReward,
    beside,
    comparison,
    gain,
    may_be_paired,
    mean_rewards,
    points,
)
from whetstone.domain.gains import MOST_PAIRED
from whetstone.domain.stats import FEWEST_REWARDS, Sample, paired, share_of, welch

LIVE = Comparison(2, is_held_out=True)


def sums(version: int, rewards: Sequence[float]) -> VersionRewards:
    return VersionRewards(version, len(rewards), sum(rewards), sum(reward * reward for reward in rewards))


def of(version: int, *rewards: float) -> MeanReward:
    """The mean of a version whose policy has no other rewards."""
    return mean_rewards(PolicyRewards([sums(version, rewards)])).training[version]


def some(version: int, count: int = FEWEST_REWARDS, won: int = 10) -> VersionRewards:
    return sums(version, [1.0] * won + [0.0] * (count - won))


def states(*names: str) -> list[VersionState]:
    return [VersionState(version, name, was_live=name != "candidate") for version, name in enumerate(names)]


def test_the_interval_is_that_of_the_mean() -> None:
    """Rewards 0, 1, 1, 2: mean 1, sample variance 2/3, standard error sqrt(2/3/4)."""
    mean, half = of(3, 0, 1, 1, 2), 3.1824 * (2 / 3 / 4) ** 0.5
    assert (mean.mean, mean.low, mean.high) == (1.0, pytest.approx(1 - half), pytest.approx(1 + half))


def test_one_reward_has_no_interval_and_none_no_mean() -> None:
    none, one = points(states("retired", "live"), mean_rewards(PolicyRewards([sums(1, [0.5])])))
    assert none.training is None and none.held_out is None and one.held_out is None
    assert one.training == MeanReward(1, 0.5, None, None)


def test_rewards_of_0_and_1_are_a_share() -> None:
    means = mean_rewards(PolicyRewards([sums(1, [0.5])], [sums(0, [0.0] * 5), sums(1, [1.0] * 5)]))
    assert means.held_out[1] == MeanReward(5, 1.0, share_of(5, 5).low, 1.0), "whatever rewards training has"
    assert of(1, 1.0, 1.0) == MeanReward(2, 1.0, None, None), "nothing shows yet that a reward can be 0"


def test_an_interval_stays_within_rewards_from_0_to_1() -> None:
    assert of(1, 0.9, 1.0, 0.5).high == 1.0
    assert of(1, 0.1, 0.0, 0.4).low == 0.0
    assert (of(1, 0.9, 1.0, 1.2).high or 0) > 1.2, "1.2 is beyond"
    assert (of(1, -1.0, 0.0, 1.0).low or 0) < -1.0


@pytest.mark.parametrize(("count", "is_few"), [(FEWEST_REWARDS - 1, True), (FEWEST_REWARDS, False)])
def test_fewer_than_thirty_are_few(count: int, is_few: bool) -> None:
    assert of(1, *[0.5] * count).is_few == is_few


def compared(names: Sequence[str], live: int, training: Sequence[int], held_out: Sequence[int]) -> Comparison | None:
    """What is compared, with so many rewards of each version."""
    rewards = PolicyRewards(
        *([some(version, count, count // 2) for version, count in enumerate(counts) if count] for counts in
          (training, held_out))
    )  # fmt: skip
    return comparison(states(*names), mean_rewards(rewards), live)


def test_held_out_rewards_come_before_those_of_training() -> None:
    names = ("retired", "retired", "live")
    assert compared(names, 2, (90, 90, 90), (30, 0, 30)) == Comparison(2, is_held_out=True)
    assert compared(names, 2, (90, 90, 90), (29, 0, 30)) == Comparison(2, is_held_out=False)
    assert compared(names, 2, (90, 90, 90), (30, 0, 29)) == Comparison(2, is_held_out=False)


def test_while_the_live_version_has_few_the_newest_that_was_live_is_compared() -> None:
    names = ("retired", "retired", "rejected", "live", "candidate")
    assert compared(names, 3, (30, 30, 30, 5, 90), ()) == Comparison(1, is_held_out=False)
    assert compared(names, 3, (30, 0, 30, 5, 90), ()) is None


def test_version_0_has_no_gain() -> None:
    assert compared(("live", "rejected"), 0, (90, 90), (90, 90)) is None


def test_attempts_at_the_same_prompt_are_paired() -> None:
    before = {"a": [0.0] * 20, "b": [1.0] * 20, "only here": [1.0]}
    after = {"a": [1.0] * 25, "b": [1.0] * 15}
    rewards = PolicyRewards([], [sums(0, [*before["a"], *before["b"], 1.0]), sums(2, [1.0] * 40)])
    expected = paired([[1.0] * 20, [0.0] * 15])
    assert gain(LIVE, rewards, before, after) == Gain(2, True, expected, 35)


@pytest.mark.parametrize(
    ("same", "others"),
    [(FEWEST_REWARDS - 1, 0), (FEWEST_REWARDS, 2 * FEWEST_REWARDS + 1)],
    ids=["too few pairs", "of too small a part"],
)
def test_prompts_that_rarely_repeat_are_not_paired(same: int, others: int) -> None:
    before = {"a": [0.0] * same, "b": [0.0, 1.0] + [0.0] * others}
    after = {"a": [1.0] * same, "c": [0.0, 1.0] + [0.0] * others}
    every = [[reward for of_prompt in rewards.values() for reward in of_prompt] for rewards in (before, after)]
    rewards = PolicyRewards([], [sums(0, every[0]), sums(2, every[1])])
    result = gain(LIVE, rewards, before, after)
    assert result.pairs is None
    n, variances = same + others + 2, []
    for values in every:
        mean = sum(values) / n
        variances.append(sum((value - mean) ** 2 for value in values) / (n - 1))
    expected = welch(Sample(n, sum(every[0]) / n, variances[0]), Sample(n, sum(every[1]) / n, variances[1]))
    assert result.difference.mean == pytest.approx(expected.mean)
    assert result.difference.low == pytest.approx(expected.low)


def test_training_and_very_many_rewards_are_not_read_by_prompt() -> None:
    few = PolicyRewards([some(0), some(2)], [some(0), some(1, MOST_PAIRED), some(2)])
    assert may_be_paired(LIVE, few) and not may_be_paired(Comparison(2, is_held_out=False), few)
    assert not may_be_paired(LIVE, PolicyRewards([], [some(0, MOST_PAIRED), some(2)]))
    unpaired = gain(Comparison(2, is_held_out=False), few, {}, {})
    assert (unpaired.pairs, unpaired.difference.mean) == (None, 0.0)


def test_another_policy_is_laid_beside_version_by_version_or_all_along() -> None:
    own = points(states("retired", "retired", "live"), mean_rewards(PolicyRewards([some(0), some(2)], [some(0)])))
    control = mean_rewards(PolicyRewards([some(0), some(1), some(7)], [some(0, won=3), some(2, won=9)]))
    held_out = beside(own, "control", control)
    assert (held_out.policy, held_out.is_held_out, set(held_out.means)) == ("control", True, {0, 2})
    assert held_out.means[2] == control.held_out[2]

    baseline = mean_rewards(PolicyRewards([some(0, won=21)]))
    all_along = beside(own, "gpt", baseline)
    assert not all_along.is_held_out
    assert [all_along.means[version].mean for version in (0, 1, 2)] == pytest.approx([0.7] * 3)
    assert beside(own, "new", mean_rewards(PolicyRewards([]))).means == {}
