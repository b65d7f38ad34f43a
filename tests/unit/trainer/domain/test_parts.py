"""Members of a group are compared by the parts of their rewards (GDPO, arXiv 2601.05242)."""

import math
from collections.abc import Mapping

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from trainer.domain.advantages import RewardPart, parts_relative
from trainer.domain.claims import Member
from trainer.domain.row_builder import StepRows, build_rows
from trainer.domain.rows import SampledCompletion
from whetstone.config.trainer import TrainerSettings

WEIGHTS = {"right": 1.0, "short": 0.5}


def member(name: str, group: str = "g", weights: Mapping[str, float] = WEIGHTS, **numbers: float) -> Member:
    parts = {part: RewardPart(number, weights[part]) for part, number in numbers.items()}
    reward = math.fsum(part.weight * part.number for part in parts.values())
    return Member(name, group, reward, (completion(),), parts=parts)


def completion(turn: int = 0) -> SampledCompletion:
    return SampledCompletion(f"c{turn}", (1, 2, *range(5, 5 + turn)), (3,), (-0.5,), 0, 1.0, turn=turn)


def without_parts(name: str, reward: float, group: str = "h", **values: object) -> Member:
    return Member(name, group, reward, (completion(),), **values)  # type: ignore[arg-type]


def taught(*members: Member) -> StepRows:
    return build_rows(members, max_row_tokens=16, scale="parts")


def test_two_groups_worked_by_hand() -> None:
    """`right` of g: 0, 1, 1, mean 2/3, s = sqrt(1/3). `short` of g: 4, 2, 0, mean 2, s = 2. In h one part differs.

    The paper then subtracts the mean of the step, 0, and divides by its standard deviation.
    """
    third, e = math.sqrt(1 / 3), 1e-4
    right = [-2 / 3 / (third + e), 1 / 3 / (third + e), 1 / 3 / (third + e)]
    short = [2 / (2 + e), 0.0, -2 / (2 + e)]
    g = [r + 0.5 * s for r, s in zip(right, short, strict=True)]
    half = 0.5 / (math.sqrt(0.5) + e)
    summed = [*g, -half, half]
    spread = math.sqrt(math.fsum(value**2 for value in summed) / 4) + e
    got = taught(
        member("a", right=0, short=4),
        member("b", right=1, short=2),
        member("c", right=1, short=0),
        member("d", "h", right=0, short=1),
        member("e", "h", right=1, short=1),
    )
    assert got.advantages == pytest.approx(dict(zip("abcde", (value / spread for value in summed), strict=True)))
    assert got.left_out == {}


NUMBERS = st.integers(-20, 20).map(float)
GROUP = st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS), min_size=2, max_size=6)


@given(st.lists(GROUP, min_size=1, max_size=4), st.tuples(NUMBERS, NUMBERS, NUMBERS))
def test_steps_have_the_advantages_of_the_papers_formula(
    groups: list[list[tuple[float, float, float]]], weights: tuple[float, float, float]
) -> None:
    """In torch, the batch's mean included, which the implementation leaves out. See `summed_in_torch`."""
    expected_sums = [summed_in_torch(group, weights) for group in groups]
    batch = torch.cat(expected_sums)
    expected = (batch - batch.mean()) / (batch.std() + 1e-4)
    members = [
        member(
            f"{at}-{place}", str(at), dict(zip("xyz", weights, strict=True)), **dict(zip("xyz", numbers, strict=True))
        )
        for at, group in enumerate(groups)
        for place, numbers in enumerate(group)
    ]
    got = taught(*members)
    ours = torch.tensor([got.advantages.get(one.trajectory_id, 0.0) for one in members], dtype=torch.float64)
    torch.testing.assert_close(ours, expected, rtol=1e-7, atol=1e-7)


def summed_in_torch(group: list[tuple[float, float, float]], weights: tuple[float, float, float]) -> torch.Tensor:
    """Return Σ_k w_k · (r_k - mean) / (std + 1e-4) over the group's members; 0 where the parts cancel."""
    numbers_GK = torch.tensor(group, dtype=torch.float64)
    normal_GK = (numbers_GK - numbers_GK.mean(0)) / (numbers_GK.std(0) + 1e-4)
    summed_G = normal_GK @ torch.tensor(weights, dtype=torch.float64)
    cancels = summed_G.abs().max() < 1e-3 * max(map(abs, weights), default=0.0)
    return torch.zeros_like(summed_G) if cancels else summed_G


def test_members_of_equal_rewards_teach_by_parts_that_differ() -> None:
    """Both have 1.0. By parts the whole weight of `right` stands against half a weight of `short`."""
    members = member("a", right=1, short=0), member("b", right=0, short=2)
    assert build_rows(members, 16, "group").left_out == {"a": "group_uniform", "b": "group_uniform"}
    got = taught(*members)
    assert got.advantages == pytest.approx({"a": math.sqrt(0.5), "b": -math.sqrt(0.5)}, rel=1e-3)
    assert got.baselines == {"a": 1.0, "b": 1.0}


def test_parts_that_cancel_prefer_nothing() -> None:
    even = {"right": 1.0, "short": 1.0}
    members = member("a", "g", even, right=1, short=0), member("b", "g", even, right=0, short=0.3)
    assert members[0].reward != members[1].reward
    assert taught(*members).left_out == {"a": "group_uniform", "b": "group_uniform"}


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_the_unit_of_a_part_hardly_matters(scale: float) -> None:
    parts = {name: {"x": RewardPart(number * scale, 1.0)} for name, number in (("a", 0.0), ("b", 5.0), ("c", 7.0))}
    units = {name: {"x": RewardPart(number, 1.0)} for name, number in (("a", 0.0), ("b", 5.0), ("c", 7.0))}
    assert parts_relative(parts) == pytest.approx(parts_relative(units), rel=0.03)


def test_a_group_in_which_a_member_lacks_a_part_is_compared_by_its_rewards() -> None:
    lacks = member("a", right=0), member("b", right=1, short=0.5)
    whole = without_parts("a", 0.0), without_parts("b", 1.25)
    assert taught(*lacks).advantages == taught(*whole).advantages
    step = 1 / (2 * math.sqrt(0.5))
    assert taught(*whole).advantages == pytest.approx({"a": -step, "b": step}, rel=1e-3)


def test_a_single_is_divided_by_the_rewards_of_the_step_and_then_like_all() -> None:
    single = without_parts("s", 1.0, "of s", alone=True, baseline=0.25)
    unknown = without_parts("u", 0.0, "of u", alone=True)
    group = member("a", right=0), member("b", right=1)
    whole = math.sqrt(((0 - 0.5) ** 2 * 2 + (1 - 0.5) ** 2 * 2) / 3) + 1e-4
    gaps = [-0.5 / (math.sqrt(0.5) + 1e-4), 0.5 / (math.sqrt(0.5) + 1e-4), 0.75 / whole]
    mean = sum(gaps) / 3
    spread = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / 2) + 1e-4
    got = taught(*group, single, unknown).advantages
    assert got == pytest.approx({"a": gaps[0] / spread, "b": gaps[1] / spread, "s": gaps[2] / spread})


def test_what_was_earned_at_steps_is_compared_by_turn_on_the_same_scale() -> None:
    turns = (completion(), completion(1))
    earned = [
        Member("a", "g", 1.0, turns, step_rewards={1: 1.0}, parts={"x": RewardPart(1.0, 1.0)}),
        Member("b", "g", 0.0, turns, parts={"x": RewardPart(0.0, 1.0)}),
    ]
    by_turn, by_parts = taught(*earned), taught(member("a", right=1), member("b", right=0))
    assert by_turn.advantages == pytest.approx(by_parts.advantages)


def test_parts_and_a_baseline_by_state_are_refused_together() -> None:
    with pytest.raises(ValidationError, match="set baseline to group"):
        TrainerSettings(advantage_scale="parts", baseline="state")
