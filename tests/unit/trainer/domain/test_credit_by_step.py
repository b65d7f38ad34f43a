"""Turns of a group in which something was earned at steps have the advantage of their return to go."""

import itertools
import random
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import pytest

from trainer.domain.advantages import turn_credit
from trainer.domain.claims import Member
from trainer.domain.row_builder import StepRows, build_rows
from trainer.domain.rows import SampledCompletion
from trainer.domain.usable_members import LARGEST_GAP
from whetstone.config.trainer import AdvantageScale

WAYS: list[AdvantageScale] = ["none", "group", "batch", "mean"]


def member(name: str, turns: int, earned: Mapping[int, float], whole: float = 0.0, **values: Any) -> Member:
    """A trajectory of turns with one sampled token each, which got `whole` beside what it earned at its turns."""
    reads = itertools.accumulate(((7, turn) for turn in range(turns)), lambda before, added: (*before, 1, *added))
    completions = tuple(
        SampledCompletion(f"{name}-{turn}", prompt, (1,), (-0.5,), 0, 1.0, turn=turn)
        for turn, prompt in enumerate(reads)
    )
    reward = whole + sum(earned.values())
    return Member(name, values.pop("group", "g"), reward, completions, step_rewards=earned, **values)


def advantages(members: list[Member], scale: AdvantageScale = "none", **others: Any) -> dict[str, list[float]]:
    """Return the advantage of each turn, by trajectory."""
    taught: StepRows = build_rows(members, 1000, scale, **others)
    by_name: dict[str, list[float]] = {}
    for row in taught.rows:
        by_name[row.trajectory_id] = [
            gap for gap, sampled in zip(row.advantages_T, row.sampled_T, strict=True) if sampled
        ]
    return by_name


def test_returns_to_go_are_compared_turn_by_turn_among_those_who_reach_the_turn() -> None:
    got = advantages(
        [
            member("a", 3, {0: 1.0, 2: 3.0}),  # to go: 4, 3, 3
            member("b", 2, {1: 2.0}, whole=0.5),  # 2.5, 2.5: what it got as a whole counts until its end
            member("c", 1, {0: 1.0}),  # 1
        ]
    )
    # Turn 0: mean 2.5. Turn 1: 3 and 2.5, mean 2.75. Turn 2 is a's alone.
    assert got == {"a": [1.5, 0.25, 0.0], "b": [0.0, -0.25], "c": [-1.5]}


def by_hand(members: list[Member]) -> dict[str, list[float]]:
    """Return the exact advantages, from the definition, in fractions."""
    turns = {one.trajectory_id: len(one.completions) for one in members}

    def to_go(one: Member, turn: int) -> Fraction:
        earned = {at: Fraction(reward) for at, reward in one.step_rewards.items()}
        whole = Fraction(one.reward) - sum(earned.values())
        return whole + sum((reward for at, reward in earned.items() if at >= turn), Fraction(0))

    exact: dict[str, list[float]] = {}
    for one in members:
        gaps = []
        for turn in range(turns[one.trajectory_id]):
            returns = [to_go(other, turn) for other in members if turns[other.trajectory_id] > turn]
            gaps.append(float(to_go(one, turn) - sum(returns, Fraction(0)) / len(returns)))
        exact[one.trajectory_id] = gaps
    return exact


@pytest.mark.parametrize("seed", range(50))
def test_generated_trees_have_the_exact_advantages(seed: int) -> None:
    rng = random.Random(seed)
    members = []
    for number in range(rng.randint(2, 6)):
        turns = rng.randint(1, 7)
        earned = {turn: rng.choice((-1.0, 0.25, 0.5, 2.0)) for turn in range(turns) if rng.random() < 0.5}
        members.append(member(str(number), turns, earned, whole=rng.choice((0.0, 0.0, 1.0))))
    members[0] = member("0", len(members[0].completions), {0: 8.0})
    got, exact = advantages(members), by_hand(members)
    assert got.keys() == exact.keys()
    for name, gaps in exact.items():
        assert got[name] == pytest.approx(gaps, abs=1e-12), name


@pytest.mark.parametrize("scale", WAYS)
@pytest.mark.parametrize("seed", range(10))
def test_with_all_reward_at_the_end_and_equal_lengths_it_is_the_trajectorys(seed: int, scale: AdvantageScale) -> None:
    rng = random.Random(seed)
    turns, rewards = rng.randint(1, 6), [rng.random() for _ in range(rng.randint(2, 8))]
    by_step = [member(str(number), turns, {turns - 1: reward}) for number, reward in enumerate(rewards)]
    whole = [member(str(number), turns, {}, whole=reward) for number, reward in enumerate(rewards)]
    for name, gaps in advantages(whole, scale).items():
        assert advantages(by_step, scale)[name] == pytest.approx(gaps, abs=1e-15)


def test_other_groups_of_the_step_are_as_before() -> None:
    plain = [member("x", 2, {}, whole=1.0, group="h"), member("y", 2, {}, group="h")]
    got = advantages([member("a", 2, {0: 1.0}), member("b", 2, {}), *plain])
    assert got == {"a": [0.5, 0.0], "b": [-0.5, 0.0], "x": [0.5, 0.5], "y": [-0.5, -0.5]}


def test_attempts_with_equal_sums_still_differ_by_turn() -> None:
    assert advantages([member("a", 2, {0: 1.0}), member("b", 2, {1: 1.0})]) == {"a": [0.0, -0.5], "b": [0.0, 0.5]}


def test_a_single_is_compared_with_its_baseline_as_a_whole() -> None:
    one = member("a", 2, {0: 1.0}, alone=True, baseline=0.25)
    assert advantages([one]) == {"a": [0.75, 0.75]}


def test_where_states_are_compared_it_is_by_their_return_to_go() -> None:
    # All met the same two prompts.
    got = advantages([member("a", 2, {0: 1.0}), member("b", 2, {1: 3.0})], baseline="state")
    assert got == {"a": [-1.0, -1.5], "b": [1.0, 1.5]}


def test_a_turn_whose_returns_are_too_far_apart_teaches_nothing() -> None:
    far = 2 * LARGEST_GAP
    assert advantages([member("a", 2, {0: -far, 1: far}), member("b", 2, {1: 1.0})]) == {
        "a": [-0.5, 0.0],
        "b": [0.5, 0.0],
    }


def test_scores_of_turns_add_up_to_nothing_whoever_is_stricter() -> None:
    mild, strict = [0.9, 0.7, 0.8], [0.3, 0.1, 0.2]
    assert turn_credit([mild]) == pytest.approx([0.1 / 3, -0.1 / 3, 0.0])
    assert turn_credit([mild, strict]) == pytest.approx(turn_credit([mild]))
    assert sum(turn_credit([mild, [0.0, 1.0, 0.3]])) == pytest.approx(0.0, abs=1e-15)
    assert turn_credit([[0.4]]) == [0.0]
