"""What the members of a step teach where it learns from preferences."""

from dataclasses import replace
from typing import Any

import pytest

from trainer.domain.claims import Member
from trainer.domain.measured import MeasuredRows
from trainer.domain.preference_rows import dpo_rows, kto_rows
from trainer.domain.rows import Row, SampledCompletion
from whetstone.config.trainer import TrainerSettings

SETTINGS = TrainerSettings(max_row_tokens=16)


def completion(prompt: tuple[int, ...] = (1, 2), tokens: tuple[int, ...] = (3, 4), turn: int = 0) -> SampledCompletion:
    return SampledCompletion("c", prompt, tokens, (-0.5,) * len(tokens), 0, 1.0, turn=turn)


def member(name: str, reward: float, group: str = "g", **values: Any) -> Member:
    return Member(name, group, reward, **({"completions": (completion(),)} | values))


def signs(rows: tuple[Row, ...]) -> dict[str, set[float]]:
    return {row.trajectory_id: {a for a, s in zip(row.advantages_T, row.sampled_T, strict=True) if s} for row in rows}


def test_kto_takes_singles_and_groups_alike_and_goes_by_the_threshold() -> None:
    got = kto_rows(
        [member("up", 1.0, alone=True), member("half", 0.5, alone=True), member("down", 0.0), member("more", 0.7)],
        SETTINGS,
    )
    assert got.advantages == {"up": 1.0, "half": -1.0, "down": -1.0, "more": 1.0}
    assert signs(got.rows) == {name: {sign} for name, sign in got.advantages.items()}
    assert (got.left_out, got.answers, {row.pair for row in got.rows}) == ({}, 4, {""})
    settings = SETTINGS.model_copy(update={"kto_desirable_above": -0.5})
    assert kto_rows([member("a", 0.0), member("b", -1.0)], settings).advantages == {"a": 1.0, "b": -1.0}


@pytest.mark.parametrize("reward", [0.0, 1.0])
def test_kto_needs_good_and_bad(reward: float) -> None:
    got = kto_rows([member("a", reward), member("b", reward), member("c", 1 - reward, completions=())], SETTINGS)
    assert (got.rows, got.advantages) == ((), {})
    assert got.left_out == {"a": "group_uniform", "b": "group_uniform", "c": "no_token_ids"}


def test_dpo_pairs_the_best_with_the_worst_as_long_as_they_differ() -> None:
    rewards = {"a": 0.2, "b": 1.0, "c": 0.5, "d": 0.0, "e": 0.5}
    got = dpo_rows([member(name, reward) for name, reward in rewards.items()], SETTINGS)
    assert got.advantages == {"b": 1.0, "d": -1.0, "c": 1.0, "a": -1.0} or got.advantages == {
        "b": 1.0, "d": -1.0, "e": 1.0, "a": -1.0
    }  # fmt: skip
    pairs = [
        {row.trajectory_id for row in got.rows if row.pair == pair} for pair in dict.fromkeys(r.pair for r in got.rows)
    ]
    assert [len(pair) for pair in pairs] == [2, 2]
    assert {"b", "d"} in pairs
    assert set(got.left_out.values()) == {"group_uniform"}
    assert set(got.left_out) | set(got.advantages) == set(rewards)


def test_dpo_compares_within_a_group_and_after_the_same_prompt() -> None:
    other = (completion(prompt=(9,)),)
    members = [
        member("a", 1.0),
        member("b", 0.0, completions=other),
        member("c", 0.0, group="h"),
        member("d", 0.0, alone=True),
        member("e", 0.5, completions=other),
    ]
    got = dpo_rows(members, SETTINGS)
    assert got.advantages == {"e": 1.0, "b": -1.0}
    assert got.left_out == {"a": "group_uniform", "c": "group_uniform", "d": "too_few"}


def test_a_trajectory_of_several_turns_is_one_side_of_a_pair() -> None:
    turns = (completion(), completion(prompt=(1, 2, 3, 4, 5), turn=1), completion(prompt=(7, 8), turn=2))
    got = dpo_rows([member("a", 1.0, completions=turns), member("b", 0.0)], SETTINGS)
    assert [(row.trajectory_id, sum(row.sampled_T), row.pair) for row in got.rows] == [
        ("a", 4, "a"), ("a", 2, "a"), ("b", 2, "a")
    ]  # fmt: skip
    assert signs(got.rows) == {"a": {1.0}, "b": {-1.0}}
    assert got.answers == 4


def test_what_is_too_long_copied_or_does_not_fit_is_nobodys_partner() -> None:
    members = [
        member("long", 1.0, completions=(completion(tokens=(3,) * 16),)),
        member("first", 0.9, seed=(7, 0)),
        member("copy", 0.8, seed=(7, 0)),
        member("large", 0.7),
        member("worst", 0.1),
    ]
    for made in (dpo_rows, kto_rows):
        got = made(members, SETTINGS, unfit={"large"})
        assert got.advantages == {"first": 1.0, "worst": -1.0}
        assert got.left_out == {"long": "too_long", "copy": "fixed_seed", "large": "too_long"}


@pytest.mark.parametrize("cut_off", ["mask", "clamp"])
def test_what_a_length_limit_ended_may_be_left_out(cut_off: str) -> None:
    settings = SETTINGS.model_copy(update={"cut_off": cut_off})
    members = [member("a", 1.0, cut_off=True), member("b", 0.9), member("c", 0.0)]
    for made in (dpo_rows, kto_rows):
        assert made(members, SETTINGS).advantages["a"] == 1.0
        got = made(members, settings)
        assert (got.advantages, got.left_out) == ({"b": 1.0, "c": -1.0}, {"a": "cut_off"})


def test_whose_partner_constraints_took_is_left_out_too() -> None:
    got = dpo_rows([member("a", 1.0), member("b", 0.0), member("c", 1.0, "h"), member("d", 0.0, "h")], SETTINGS)
    rows = tuple(replace(row) for row in got.rows if row.trajectory_id != "b")
    left = got.without(MeasuredRows(rows, {}, frozenset({"b"})))
    assert left.advantages == {"c": 1.0, "d": -1.0}
    assert {row.trajectory_id for row in left.rows} == {"c", "d"}
    assert left.left_out == {"a": "too_few", "b": "constrained"}


def test_the_partner_of_a_trajectory_that_lost_a_row_stays() -> None:
    turns = (completion(), completion(prompt=(7, 8), turn=1))
    got = dpo_rows([member("a", 1.0, completions=turns), member("b", 0.0)], SETTINGS)
    assert len(got.without(MeasuredRows(got.rows[1:], {}, frozenset())).rows) == 2
