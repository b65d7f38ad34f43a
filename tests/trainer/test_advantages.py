import math

import pytest

from trainer.advantages import group_relative
from trainer.errors import RewardError


def test_an_advantage_is_the_reward_minus_the_mean_of_its_group() -> None:
    advantages = group_relative({"g": {"a": 1.0, "b": 0.0, "c": 0.5, "d": 0.5}, "h": {"e": 10.0, "f": 12.0}})
    assert advantages.by_trajectory == {"a": 0.5, "b": -0.5, "c": 0.0, "d": 0.0, "e": -1.0, "f": 1.0}
    assert advantages.uniform_groups == ()


def test_a_small_gap_trains_less_than_a_large_one() -> None:
    advantages = group_relative({"g": {"a": 0.0, "b": 0.001}, "h": {"c": 0.0, "d": 1.0}})
    assert advantages.by_trajectory == {"a": -0.0005, "b": 0.0005, "c": -0.5, "d": 0.5}


def test_groups_that_prefer_nothing_are_set_apart() -> None:
    advantages = group_relative({"same": {"a": 0.1, "b": 0.1, "c": 0.1}, "lone": {"d": 1.0}, "g": {"e": 0.0, "f": 1.0}})
    assert advantages.uniform_groups == ("same", "lone")
    assert set(advantages.by_trajectory) == {"e", "f"}


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_no_number_is_refused_by_name(reward: float) -> None:
    with pytest.raises(RewardError, match="group g: reward .* of trajectory b"):
        group_relative({"g": {"a": 0.0, "b": reward}})


@pytest.mark.parametrize("rewards", [(1.7e308, 1.7e308, 0.0), (1.7e308, -1.7e308, -1.7e308)])
def test_rewards_that_cannot_be_compared_are_refused(rewards: tuple[float, ...]) -> None:
    with pytest.raises(RewardError):
        group_relative({"g": dict(zip("abc", rewards, strict=True))})
