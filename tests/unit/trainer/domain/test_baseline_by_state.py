"""Members that met the same prompt are compared there."""

import itertools
import math
import statistics
from typing import Any

import pytest

from trainer.domain.claims import Member
from trainer.domain.row_builder import StepRows, build_rows
from trainer.domain.rows import SampledCompletion
from whetstone.config.trainer import AdvantageScale

Turn = tuple[tuple[int, ...], tuple[int, ...]]
"""A prompt and the answer to it."""
START = (1, 2)


def member(name: str, reward: float, *turns: Turn, group: str = "g", **values: Any) -> Member:
    completions = tuple(
        SampledCompletion(f"{name}-{turn}", prompt, answer, (-0.5,) * len(answer), 0, 1.0)
        for turn, (prompt, answer) in enumerate(turns)
    )
    return Member(name, group, reward, completions, **values)


def game(name: str, reward: float, move: int, group: str = "g", **values: Any) -> Member:
    """Two turns: a move of one token, and an answer of two tokens to the board after it."""
    board = (*START, move, 9)
    return member(name, reward, (START, (move,)), (board, (5, 6)), group=group, **values)


def taught(*members: Member, scale: AdvantageScale = "none") -> StepRows:
    return build_rows(members, max_row_tokens=16, scale=scale, baseline="state")


def advantages(taught: StepRows) -> dict[str, list[float]]:
    """Return the advantages of the sampled tokens by trajectory."""
    by_name: dict[str, list[float]] = {}
    for row in taught.rows:
        sampled = [gap for gap, sampled in zip(row.advantages_T, row.sampled_T, strict=True) if sampled]
        by_name[row.trajectory_id] = by_name.get(row.trajectory_id, []) + sampled
    return by_name


def test_tokens_are_compared_with_those_who_met_their_prompt_and_lone_ones_with_the_group() -> None:
    got = taught(game("a", 1.0, move=3), game("b", 0.0, move=3), game("c", 0.5, move=4), game("d", 0.0, move=7))
    # The first prompt is everybody's: mean 0.375. The board after 3 is a's and b's: mean 0.5. The others are alone.
    assert advantages(got) == {
        "a": [0.625, 0.5, 0.5],
        "b": [-0.375, -0.5, -0.5],
        "c": [0.125, 0.125, 0.125],
        "d": [-0.375, -0.375, -0.375],
    }
    assert got.baselines == dict.fromkeys("abcd", 0.375)
    assert got.state_share == (4 + 4) / 12


def test_a_trajectorys_advantage_is_the_mean_over_its_tokens() -> None:
    got = taught(game("a", 1.0, move=3), game("b", 0.0, move=3), game("c", 0.5, move=4), game("d", 0.0, move=7))
    assert got.advantages == pytest.approx({"a": 1.625 / 3, "b": -1.375 / 3, "c": 0.125, "d": -0.375})
    assert got.advantages["c"] == 0.125


def test_prompts_of_other_groups_count_where_rewards_are_on_one_scale() -> None:
    games = [("a", 1.0, "g", 3), ("b", 0.0, "g", 4), ("c", 0.0, "h", 3), ("d", 0.5, "h", 8)]

    def in_step(**values: Any) -> dict[str, list[float]]:
        return advantages(taught(*(game(name, reward, move, group, **values) for name, reward, group, move in games)))

    assert in_step(reward_scale="") == {
        "a": [0.625, 0.5, 0.5],
        "b": [-0.375, -0.5, -0.5],
        "c": [-0.375, -0.5, -0.5],
        "d": [0.125, 0.25, 0.25],
    }
    # A rank among the attempts of a group says nothing of another group.
    assert in_step() == {"a": [0.5] * 3, "b": [-0.5] * 3, "c": [-0.25] * 3, "d": [0.25] * 3}


def test_rewards_on_different_scales_are_not_compared() -> None:
    one = [game("a", 1.0, 3, reward_scale="chess"), game("b", 0.0, 4, reward_scale="chess")]
    other = [game("c", 0.5, 3, "h", reward_scale="go"), game("d", 0.0, 4, "h", reward_scale="go")]
    ranked = [game("e", 0.5, 3, "k"), game("f", 1.0, 4, "k")]
    assert taught(*one, *other, *ranked).advantages == {
        "a": 0.5, "b": -0.5, "c": 0.25, "d": -0.25, "e": -0.25, "f": 0.25,
    }  # fmt: skip


def test_a_uniform_group_teaches_where_other_groups_had_other_rewards_and_there_alone() -> None:
    won = [game(name, 1.0, move, "won", reward_scale="") for name, move in (("a", 3), ("b", 4))]
    mixed = [
        member("c", 0.0, ((8,), (1,)), ((*START, 3, 9), (5,)), group="mixed", reward_scale=""),
        member("d", 1.0, ((8,), (2,)), group="mixed", reward_scale=""),
    ]
    got = taught(*won, *mixed)
    assert advantages(got) == {"a": [0.0, 0.5, 0.5], "c": [-0.5, -0.5], "d": [0.5]}
    assert got.left_out == {"b": "group_uniform"}  # its first prompt only the winners met
    assert got.baselines == {"a": 1.0, "c": 0.5, "d": 0.5}
    assert got.state_share == 6 / 6
    assert taught(*won).left_out == {"a": "group_uniform", "b": "group_uniform"}


def test_a_prompt_that_a_trajectory_met_twice_counts_once() -> None:
    twice = member("a", 1.0, (START, (3,)), (START, (4,)))
    got = taught(twice, game("b", 0.0, move=3), game("c", 0.5, move=5))
    assert advantages(got)["a"] == [0.5, 0.5]
    assert advantages(got)["b"] == [-0.5] * 3
    alone = taught(member("a", 1.0, ((7,), (3,)), ((7,), (4,))), game("b", 0.0, move=3))
    assert alone.state_share == 0.0 and alone.advantages == {"a": 0.5, "b": -0.5}


def test_a_single_is_compared_where_it_was_not_alone_and_else_with_its_baseline() -> None:
    single = {"alone": True, "reward_scale": ""}
    got = taught(
        game("a", 1.0, 3, "of a", baseline=0.75, **single),
        game("b", 0.0, 4, "of b", baseline=0.75, **single),
        game("first", 0.5, 5, "of first", **single),
    )
    assert advantages(got) == {"a": [0.5, 0.25, 0.25], "b": [-0.5, -0.75, -0.75]}
    assert got.left_out == {"first": "too_few"}
    known = taught(game("a", 1.0, 3, "of a", **single), game("b", 0.0, 4, "of b", baseline=0.0, **single))
    assert advantages(known) == {"a": [0.5, 0.0, 0.0], "b": [-0.5, 0.0, 0.0]}
    assert known.baselines == {"b": 0.0}


def test_rewards_that_are_equal_at_a_state_prefer_nothing_there() -> None:
    got = taught(game("a", 0.9, move=3), game("b", 0.900001, move=3), game("c", 0.0, move=4))
    assert advantages(got)["a"][1:] == [0.0, 0.0] == advantages(got)["b"][1:]
    assert got.advantages["a"] == pytest.approx(0.3 / 3, abs=1e-5)


def test_scaled_advantages_are_divided_by_the_deviation_of_what_is_compared() -> None:
    members = (game("a", 1.0, move=3), game("b", 0.0, move=3), game("c", 0.5, move=4))
    everybody, board = statistics.stdev([1.0, 0.0, 0.5]) + 1e-4, statistics.stdev([1.0, 0.0]) + 1e-4
    assert advantages(taught(*members, scale="group"))["a"] == pytest.approx([0.5 / everybody, *[0.5 / board] * 2])
    assert advantages(taught(*members, scale="batch"))["a"] == pytest.approx([0.5 / everybody] * 3)


def test_a_uniform_group_is_not_blown_up_by_its_own_deviation() -> None:
    won = [game("a", 1.0, 3, "won", reward_scale=""), game("b", 1.00001, 4, "won", reward_scale="")]
    lost = [game("c", 0.0, 3, "lost", reward_scale=""), game("d", 0.5, 5, "lost", reward_scale="")]
    assert max(map(abs, taught(*won, *lost, scale="group").advantages.values())) < 1.5


def test_rewards_that_are_too_far_apart_are_not_compared_at_a_state() -> None:
    near = [game("a", 1.0, 3, "g", reward_scale=""), game("b", 0.0, 4, "g", reward_scale="")]
    far = [game("c", 1e8, 3, "h", reward_scale=""), game("d", 1e8 + 1e5, 4, "h", reward_scale="")]
    assert taught(*near, *far).advantages == {"a": 0.5, "b": -0.5, "c": -5e4, "d": 5e4}


def test_what_is_too_long_leaves_the_comparison_at_a_state_too() -> None:
    long = member("long", 9.0, (START, (3,)), (tuple(range(1, 17)), (5,)))
    got = taught(game("a", 1.0, move=3), game("b", 0.0, move=4), long)
    assert got.advantages == {"a": 0.5, "b": -0.5} and got.left_out == {"long": "too_long"}


def test_where_no_prompt_is_met_twice_nothing_changes() -> None:
    members = [member(str(place), reward, ((place, 1), (2, 3))) for place, reward in enumerate((0.1, 0.7, 0.3))]
    by_group = build_rows(members, max_row_tokens=16)
    got = taught(*members)
    assert repr(got.rows) == repr(by_group.rows) and got.advantages == by_group.advantages
    assert (got.state_share, by_group.state_share) == (0.0, None)


def test_the_expected_gradient_at_each_state_is_the_policy_gradient_times_a_share_of_the_rewards_of_others() -> None:
    """Every three games of two moves, with their probability: no sampling.

    A mean over n trajectories that includes the own one leaves (n - 1)/n of the gradient, where the n - 1 others are
    those that met the state, and the group where none did.
    """
    prefers = {START: 0.3, (*START, 3, 9): 0.6, (*START, 4, 9): 0.8}  # the probability of the first of two answers
    rewards = {(3, 5): 1.0, (3, 6): -0.5, (4, 5): 0.25, (4, 6): 2.0}
    answers = {START: (3, 4)} | {(*START, move, 9): (5, 6) for move in (3, 4)}

    def probability(state: tuple[int, ...], answer: int) -> float:
        return prefers[state] if answer == answers[state][0] else 1 - prefers[state]

    def score(state: tuple[int, ...], answer: int) -> float:
        """Return the derivative of the answer's logprob by the logit of the first answer."""
        return (answer == answers[state][0]) - prefers[state]

    games = {
        (first, second): probability(START, first) * probability((*START, first, 9), second)
        for first, second in rewards
    }
    exact = dict.fromkeys(prefers, 0.0)
    for (first, second), chance in games.items():
        exact[START] += chance * rewards[first, second] * score(START, first)
        exact[*START, first, 9] += chance * rewards[first, second] * score((*START, first, 9), second)

    expected = dict.fromkeys(prefers, 0.0)
    for three in itertools.product(games, repeat=3):
        members = [
            member(str(place), rewards[one], (START, one[:1]), ((*START, one[0], 9), one[1:]))
            for place, one in enumerate(three)
        ]
        for name, (first, second) in advantages(taught(*members)).items():
            (move, answer), chance = three[int(name)], math.prod(games[one] for one in three)
            expected[START] += chance * first * score(START, move) / 3
            expected[*START, move, 9] += chance * second * score((*START, move, 9), answer) / 3

    left = {START: 2 / 3}
    for move in (3, 4):
        met = probability(START, move)
        left[*START, move, 9] = (1 - met) ** 2 * 2 / 3 + 2 * met * (1 - met) * 1 / 2 + met**2 * 2 / 3
    assert expected == pytest.approx({state: left[state] * exact[state] for state in prefers}, rel=1e-12)
