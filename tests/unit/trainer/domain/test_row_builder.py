"""What each member of a step teaches, or why it teaches nothing."""

import statistics
from dataclasses import replace
from typing import Any

import pytest

from trainer.domain.claims import Member
from trainer.domain.row_builder import StepRows, build_rows
from trainer.domain.rows import SampledCompletion
from whetstone.config.trainer import AdvantageScale


def completion(prompt: tuple[int, ...] = (1, 2), tokens: tuple[int, ...] = (3,), version: int = 0) -> SampledCompletion:
    return SampledCompletion("c", prompt, tokens, (-0.5,) * len(tokens), version, 1.0)


def member(name: str, reward: float, group: str = "g", **values: Any) -> Member:
    return Member(name, group, reward, **({"completions": (completion(),)} | values))


def single(name: str, reward: float, baseline: float | None, **values: Any) -> Member:
    return member(name, reward, group=f"of {name}", alone=True, baseline=baseline, **values)


def taught(*members: Member, scale: AdvantageScale = "none") -> StepRows:
    return build_rows(members, max_row_tokens=16, scale=scale)


def test_a_single_teaches_by_its_distance_from_the_baseline_and_a_group_by_that_from_its_mean() -> None:
    got = taught(member("a", 0.0), member("b", 1.0), single("c", 1.0, 0.75), single("d", 0.0, 0.75))
    assert got.advantages == {"a": -0.5, "b": 0.5, "c": 0.25, "d": -0.75}
    assert {row.trajectory_id: row.advantages_T[-1] for row in got.rows} == got.advantages
    assert got.baselines == {"a": 0.5, "b": 0.5, "c": 0.75, "d": 0.75}
    assert got.left_out == {}


def test_scaled_by_group_a_single_is_measured_by_the_whole_step() -> None:
    members = (member("a", 0.0), member("b", 0.5), single("c", 1.0, 0.75), single("unknown", 0.0, None))
    of_group, of_step = 0.125**0.5 + 1e-4, statistics.stdev([0.0, 0.5, 1.0, 0.0]) + 1e-4
    got = taught(*members, scale="group")
    assert got.advantages == pytest.approx({"a": -0.25 / of_group, "b": 0.25 / of_group, "c": 0.25 / of_step})
    assert {row.trajectory_id: row.advantages_T[-1] for row in got.rows} == got.advantages
    assert got.baselines == {"a": 0.25, "b": 0.25, "c": 0.75}


def test_scaled_by_batch_a_copy_counts_no_more_than_it_does_for_its_group() -> None:
    copies = [member(name, 1.0, seed=(7, 0)) for name in "abc"]
    got = taught(*copies, member("d", 0.0), scale="batch")
    assert got.advantages == pytest.approx({"a": 0.5 / (0.5**0.5 + 1e-4), "d": -0.5 / (0.5**0.5 + 1e-4)})


def test_members_of_a_group_that_is_too_small_are_not_compared_with_one_another() -> None:
    few = [member(name, 1.0, alone=True, baseline=0.5) for name in "ab"]
    assert taught(*few).advantages == {"a": 0.5, "b": 0.5}


def test_a_single_that_nothing_is_known_of_says_so() -> None:
    assert taught(single("a", 1.0, None), single("b", 1.0, 0.5)).left_out == {"a": "too_few"}


def test_a_single_that_is_worth_what_was_expected_counts_among_the_others() -> None:
    assert taught(single("a", 0.5, 0.5), single("b", 1.0, 0.5)).advantages == {"a": 0.0, "b": 0.5}


def test_singles_that_are_all_worth_what_was_expected_teach_nothing() -> None:
    got = taught(single("a", 1.0, 1.0), single("b", 1.0, 1.0), single("c", 0.0, 1.0, completions=(), silent="greedy"))
    assert (got.rows, got.advantages) == ((), {})
    assert got.left_out == {"a": "group_uniform", "b": "group_uniform", "c": "greedy"}


def test_what_a_length_limit_ended_is_trained_on_unless_a_judge_gave_the_reward() -> None:
    members = [member("a", 0.0), member("b", 1.0), member("c", 0.2, cut_off=True)]
    assert taught(*members).advantages == pytest.approx({"a": -0.4, "b": 0.6, "c": -0.2})
    judged = [replace(one, judged=True) for one in members]
    assert (taught(*judged).advantages, taught(*judged).left_out) == ({"a": -0.5, "b": 0.5}, {"c": "cut_off"})
    masked = build_rows(members, max_row_tokens=16, cut_off="mask")
    assert (masked.advantages, masked.left_out) == ({"a": -0.5, "b": 0.5}, {"c": "cut_off"})
    assert build_rows(judged, max_row_tokens=16, cut_off="train").left_out == {}


def test_clamped_it_may_become_less_likely_and_never_likelier() -> None:
    better = [member("a", 0.0), member("b", 1.0, cut_off=True)]
    worse = [member("a", 1.0), member("b", 0.0, cut_off=True)]
    assert build_rows(better, max_row_tokens=16, cut_off="clamp").advantages == {"a": -0.5, "b": 0.0}
    assert build_rows(worse, max_row_tokens=16, cut_off="clamp").advantages == {"a": 0.5, "b": -0.5}


def test_what_cannot_be_trained_on_says_what_its_completions_say() -> None:
    got = taught(
        member("a", 0.0, completions=(), silent="sampling_bent: top_p"),
        member("b", 0.5, completions=(completion(tokens=()),)),
        member("c", 1.0),
    )
    assert got.left_out == {"a": "sampling_bent: top_p", "b": "no_token_ids"}
    assert got.advantages == {"c": 0.5}


def test_of_copies_by_a_fixed_seed_the_first_stays_and_the_others_weigh_nothing() -> None:
    copies = [member(name, reward, seed=(7, 0)) for name, reward in (("a", 1.0), ("b", 1.0), ("c", 1.0))]
    got = taught(*copies, member("d", 0.0))
    assert got.left_out == {"b": "fixed_seed", "c": "fixed_seed"}
    assert got.advantages == {"a": 0.5, "d": -0.5}


@pytest.mark.parametrize(
    "other",
    [
        {"seed": (8, 0)},
        {"seed": None},
        {"seed": (7, 1)},
        {"seed": (7, 0), "group": "h"},
        {"seed": (7, 0), "completions": (completion(prompt=(1, 9)),)},
        {"seed": (7, 0), "completions": (completion(version=1),)},
    ],
    ids=["seed", "no seed", "choice of the same call", "group", "prompt", "version"],
)
def test_what_differs_in_anything_that_is_drawn_from_is_no_copy(other: dict[str, Any]) -> None:
    got = taught(
        member("a", 0.0, seed=(7, 0)), member("b", 1.0, **other), member("c", 0.5), member("d", 0.9, group="h")
    )
    assert "fixed_seed" not in got.left_out.values()


def test_a_row_that_cannot_be_built_leaves_the_others_be() -> None:
    long = member("long", 0.0, completions=(completion(prompt=tuple(range(1, 17))),))
    wrong = member("wrong", 0.0, completions=(SampledCompletion("c", (1,), (2,), (0.5,), 0, 1.0),))
    got = taught(long, wrong, member("a", 1.0))
    assert got.left_out == {"long": "too_long", "wrong": "no_logprobs"}
    assert got.advantages == {"a": 0.5}


LONG = {"completions": (completion(prompt=tuple(range(1, 17))),)}


def test_the_others_of_a_group_are_compared_without_what_is_too_long() -> None:
    # Of the others the mean is 0.25. With the long one it would be 0.5, and nearly all that fits would be pushed down.
    got = taught(member("a", 1.0), *(member(name, 0.0) for name in "bcd"), member("long", 1.5, **LONG))
    assert got.left_out == {"long": "too_long"}
    assert got.advantages == {"a": 0.75, "b": -0.25, "c": -0.25, "d": -0.25}
    assert got.baselines == dict.fromkeys("abcd", 0.25)


def test_nor_does_what_is_too_long_count_in_the_scale() -> None:
    members = (member("a", 1.0), member("b", 0.0), member("long", 9.0, **LONG))
    divided_by = 0.5**0.5 + 1e-4
    for scale in ("group", "batch"):
        assert taught(*members, scale=scale).advantages == pytest.approx(
            {"a": 0.5 / divided_by, "b": -0.5 / divided_by}
        )


def test_one_that_is_left_alone_by_what_is_too_long_teaches_nothing() -> None:
    got = taught(
        member("a", 1.0), member("long", 0.0, **LONG), member("x", 1.0, group="h"), member("y", 0.0, group="h")
    )
    assert got.left_out == {"long": "too_long", "a": "group_uniform"}
    assert got.advantages == {"x": 0.5, "y": -0.5}


def test_what_does_not_fit_into_memory_is_too_long() -> None:
    members = [member("a", 1.0), member("b", 0.0), member("c", 0.25)]
    got = build_rows(members, max_row_tokens=16, unfit={"c"})
    assert got.left_out == {"c": "too_long"}
    assert got.advantages == {"a": 0.5, "b": -0.5}


def test_a_single_whose_reward_differs_from_its_baseline_by_noise_has_no_advantage() -> None:
    assert taught(single("a", 0.800001, 0.8), single("b", 1.0, 0.8)).advantages == {"a": 0.0, "b": pytest.approx(0.2)}
    assert taught(single("a", 0.800001, 0.8), single("b", 0.8, 0.8)).left_out == dict.fromkeys("ab", "group_uniform")


def test_a_group_with_one_monstrous_reward_is_left_out_and_the_others_are_taught() -> None:
    others = [replace(member(name, reward), group_id="h") for name, reward in (("x", 0.0), ("y", 1.0))]
    for monstrous in (1e39, -1.7e308, 2e6):
        got = taught(member("a", monstrous), member("b", 0.0), *others)
        assert got.left_out == {"a": "reward_too_large", "b": "reward_too_large"}
        assert got.advantages == {"x": -0.5, "y": 0.5}


def test_a_single_far_from_its_baseline_is_left_out() -> None:
    alone = [
        replace(member("a", 1.7e308), alone=True, baseline=-1.7e308),
        replace(member("b", 1.0), alone=True, baseline=0.0),
    ]
    got = taught(*alone)
    assert got.left_out == {"a": "reward_too_large"}
    assert got.advantages == {"b": 1.0}
