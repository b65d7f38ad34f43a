"""What rewards are worth beside one another."""

import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.domain.advantages import SMALLEST_SPREAD, divisors, group_relative, uniform
from trainer.errors import RewardError
from whetstone.config.trainer import AdvantageScale


def test_an_advantage_is_the_reward_minus_the_mean_of_its_group() -> None:
    advantages = group_relative({"g": {"a": 1.0, "b": 0.0, "c": 0.5, "d": 0.5}, "h": {"e": 10.0, "f": 12.0}})
    assert advantages.by_trajectory == {"a": 0.5, "b": -0.5, "c": 0.0, "d": 0.0, "e": -1.0, "f": 1.0}
    assert advantages.means == {"g": 0.5, "h": 11.0}


def test_a_small_gap_trains_less_than_a_large_one() -> None:
    advantages = group_relative({"g": {"a": 0.0, "b": 0.001}, "h": {"c": 0.0, "d": 1.0}})
    assert advantages.by_trajectory == {"a": -0.0005, "b": 0.0005, "c": -0.5, "d": 0.5}


def test_groups_that_prefer_nothing_are_set_apart() -> None:
    advantages = group_relative({"same": {"a": 0.1, "b": 0.1, "c": 0.1}, "lone": {"d": 1.0}, "g": {"e": 0.0, "f": 1.0}})
    assert advantages.means.keys().isdisjoint({"same", "lone"})
    assert set(advantages.by_trajectory) == {"e", "f"}


@pytest.mark.parametrize("unit", [1e-6, 1.0, 1e6])
def test_rewards_that_differ_by_noise_are_equal_in_any_unit(unit: float) -> None:
    noise = {"a": 0.8 * unit, "b": 0.800001 * unit, "c": 0.79999 * unit}
    assert group_relative({"g": noise}).by_trajectory == {}
    apart = {"a": 0.8 * unit, "b": 0.801 * unit}
    assert group_relative({"g": apart}).by_trajectory == pytest.approx({"a": -0.0005 * unit, "b": 0.0005 * unit})


def test_beside_nothing_every_reward_differs() -> None:
    assert not uniform([0.0, 1e-6]) and not uniform([-1e-6, 1e-6])
    assert uniform([0.0, 0.0]) and uniform([1e-6]) and uniform([])


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_no_number_is_refused_by_name(reward: float) -> None:
    with pytest.raises(RewardError, match="group g: reward .* of trajectory b"):
        group_relative({"g": {"a": 0.0, "b": reward}})


@pytest.mark.parametrize("rewards", [(1.7e308, 1.7e308, 0.0), (1.7e308, -1.7e308, -1.7e308)])
def test_rewards_that_cannot_be_compared_are_refused(rewards: tuple[float, ...]) -> None:
    with pytest.raises(RewardError):
        group_relative({"g": dict(zip("abc", rewards, strict=True))})


REWARDS = st.floats(-100, 100).map(lambda reward: round(reward, 1))
GROUPS = st.dictionaries(
    st.sampled_from("gh"), st.dictionaries(st.integers(0, 30).map(str), REWARDS, min_size=2, max_size=8), min_size=1
).map(lambda groups: {group: {group + name: r for name, r in of.items()} for group, of in groups.items()})
SINGLES = st.dictionaries(st.integers(0, 30).map(lambda name: f"s{name}"), REWARDS, max_size=6)


def as_trl(groups: dict[str, dict[str, float]], scale: str) -> dict[str, float]:
    """(r - mean of its group) / (sample standard deviation of the group, or of the batch, + 1e-4), in torch."""
    batch = torch.tensor([reward for of in groups.values() for reward in of.values()], dtype=torch.float64)
    expected = {}
    for of in groups.values():
        rewards = torch.tensor(list(of.values()), dtype=torch.float64)
        spread = rewards.std() if scale == "group" else batch.std()
        expected |= dict(zip(of, ((rewards - rewards.mean()) / (spread + 1e-4)).tolist(), strict=True))
    return expected


def scaled(groups: dict[str, dict[str, float]], scale: AdvantageScale) -> dict[str, float]:
    by, differing = divisors(groups, {}, scale), group_relative(groups).by_trajectory
    return {name: advantage / by[name] for name, advantage in differing.items()}


@pytest.mark.parametrize("scale", ["group", "batch"])
@given(groups=GROUPS)
def test_scaled_advantages_are_those_of_trl(groups: dict[str, dict[str, float]], scale: AdvantageScale) -> None:
    ours, expected = scaled(groups, scale), as_trl(groups, scale)
    assert {name: expected[name] for name in ours} == pytest.approx(ours, rel=1e-6, abs=1e-6)
    for name in expected.keys() - ours.keys():
        assert expected[name] == pytest.approx(0, abs=1e-6)


@given(GROUPS, SINGLES)
def test_unscaled_nothing_is_divided(groups: dict[str, dict[str, float]], singles: dict[str, float]) -> None:
    assert set(divisors(groups, singles, "none").values()) == {1.0}


@given(GROUPS, SINGLES, st.sampled_from(["group", "batch"]))
def test_a_divisor_keeps_signs_and_order(
    groups: dict[str, dict[str, float]], singles: dict[str, float], scale: AdvantageScale
) -> None:
    found = divisors(groups, singles, scale)
    assert found.keys() == {name for of in (*groups.values(), singles) for name in of}
    assert all(divisor >= SMALLEST_SPREAD for divisor in found.values())
    for of in groups.values():
        assert len({found[name] for name in of}) == 1


@given(GROUPS, SINGLES, st.sampled_from(["group", "batch"]), REWARDS)
def test_what_all_rewards_have_in_common_scales_nothing(
    groups: dict[str, dict[str, float]], singles: dict[str, float], scale: AdvantageScale, shift: float
) -> None:
    moved = {group: {name: reward + shift for name, reward in of.items()} for group, of in groups.items()}
    alike = {name: reward + shift for name, reward in singles.items()}
    assert divisors(moved, alike, scale) == pytest.approx(divisors(groups, singles, scale), abs=1e-9)


def test_singles_are_divided_by_the_spread_of_the_whole_step() -> None:
    groups, singles = {"g": {"a": 0.0, "b": 1.0}}, {"s": 2.0, "t": 3.0}
    whole = statistics.stdev([0.0, 1.0, 2.0, 3.0]) + 1e-4
    by_group, by_batch = (divisors(groups, singles, scale) for scale in ("group", "batch"))
    assert by_batch == pytest.approx(dict.fromkeys("abst", whole))
    assert by_group == pytest.approx({"a": 0.5**0.5 + 1e-4, "b": 0.5**0.5 + 1e-4, "s": whole, "t": whole})


@pytest.mark.parametrize("singles", [{"s": 1.0}, {"s": 1.0, "t": 1.0}])
def test_singles_of_equal_rewards_have_no_scale_and_are_not_blown_up(singles: dict[str, float]) -> None:
    assert set(divisors({}, singles, "batch").values()) == {1.0}


def test_rewards_too_far_apart_for_a_standard_deviation_are_refused() -> None:
    far = {"g": {"a": 1.7e308, "b": -1.7e308, "c": 1.7e308, "d": -1.7e308}}
    with pytest.raises(RewardError, match="group g|step"):
        divisors(far, {}, "group")


def test_divided_by_their_mean_rare_successes_weigh_more() -> None:
    rare, often = {"a": 1.0, "b": 0.0, "c": 0.0, "d": 0.0}, {"e": 1.0, "f": 1.0, "g": 1.0, "h": 0.0}
    assert scaled({"rare": rare, "often": often}, "mean") == pytest.approx(
        {"a": 3.0, "b": -1.0, "c": -1.0, "d": -1.0, "e": 1 / 3, "f": 1 / 3, "g": 1 / 3, "h": -1.0}
    )


def test_a_group_with_a_negative_reward_is_not_divided_by_its_mean() -> None:
    assert scaled({"g": {"a": 1.0, "b": -0.5}}, "mean") == {"a": 0.75, "b": -0.75}


def test_singles_are_divided_by_the_mean_of_the_step() -> None:
    assert divisors({"g": {"a": 1.0, "b": 0.0}}, {"s": 0.5}, "mean") == {"a": 0.5, "b": 0.5, "s": 0.5}
    assert divisors({}, {"s": 0.25, "t": 0.75}, "mean") == {"s": 0.5, "t": 0.5}
