"""Which groups a step takes."""

from datetime import UTC, datetime, timedelta

import pytest

from trainer.claims import SINGLES_LIMIT, Candidate, CandidateMember, choose, lineage_of, why_silent
from whetstone.settings import TrainerSettings

NOW = datetime(2026, 1, 1, tzinfo=UTC)
RULES = TrainerSettings(
    groups_per_step=2, max_groups_per_step=4, singles_per_step=6, min_fresh_share=0.5, max_staleness=1, fresh_waits_s=60
)
LINEAGE = [3, 2, 0]


def group(
    name: str, version: int, age_s: float = 0, last_version: int | None = None, tokens: int = 5, gap: float = 1.0
) -> Candidate:
    last = version if last_version is None else last_version
    members = tuple(CandidateMember(f"{name}{i}", i * gap, version, last, tokens) for i in range(2))
    return Candidate(name, NOW - timedelta(seconds=age_s), members)


def single(name: str, version: int = 3, age_s: float = 0, reward: float = 1.0, members: int = 1) -> Candidate:
    few = tuple(CandidateMember(f"{name}{i}", reward, version, version, 5) for i in range(members))
    return Candidate(name, NOW - timedelta(seconds=age_s), few, alone=True)


def singles(count: int, version: int = 3) -> list[Candidate]:
    return [single(f"s{place}", version, age_s=count - place) for place in range(count)]


def claimed(*groups: Candidate) -> list[str]:
    return [chosen.group_id for chosen in choose(groups, LINEAGE, NOW, RULES).claimed]


def test_no_step_is_due_with_too_few_groups() -> None:
    assert claimed(group("a", 3)) == []


def test_a_step_takes_all_that_is_there_up_to_its_limit() -> None:
    assert claimed(*(group(name, 3) for name in "abc")) == ["a", "b", "c"]
    assert len(claimed(*(group(name, 3) for name in "abcdef"))) == RULES.max_groups_per_step


def test_a_step_waits_until_enough_was_spoken_by_the_version_it_starts_from() -> None:
    assert claimed(group("a", 2), group("b", 2)) == []
    assert claimed(group("a", 2), group("b", 3)) == ["a", "b"]


def test_fresh_is_counted_in_tokens() -> None:
    assert claimed(group("a", 2, tokens=9), group("b", 3, tokens=8)) == []
    assert claimed(group("a", 2, tokens=8), group("b", 3, tokens=9)) == ["a", "b"]


def test_a_uniform_group_fills_no_place_and_goes_with_the_next_step() -> None:
    uniform = group("u", 3, gap=0.0)
    waiting = choose([uniform, group("a", 3)], LINEAGE, NOW, RULES)
    assert (waiting.claimed, waiting.discarded) == ((), {})
    taken = choose([uniform, group("a", 3), group("b", 3)], LINEAGE, NOW, RULES)
    assert [chosen.group_id for chosen in taken.claimed] == ["a", "b"]
    assert taken.discarded == {"group_uniform": ("u",)}


def test_a_uniform_group_that_waited_in_vain_is_discarded_without_a_step() -> None:
    assert choose([group("u", 3, age_s=61, gap=0.0)], LINEAGE, NOW, RULES).discarded == {"group_uniform": ("u",)}


def test_a_trajectory_that_saw_a_swap_is_not_fresh() -> None:
    assert claimed(group("a", 2), group("b", 2, last_version=3)) == []


def test_places_are_kept_for_fresh_groups_behind_a_long_queue_of_stale_ones() -> None:
    assert claimed(*(group(name, 2) for name in "abcde"), group("f", 3), group("g", 3)) == ["a", "b", "f", "g"]


def test_an_old_group_starts_a_step_without_fresh_ones() -> None:
    assert claimed(group("a", 2, age_s=61), group("b", 2)) == ["a", "b"]


def test_groups_beyond_the_staleness_bound_are_discarded_and_say_so() -> None:
    choice = choose([group("a", 0), group("b", 3)], LINEAGE, NOW, RULES)
    assert choice.discarded == {"stale": ("a",)}
    assert choice.claimed == ()


def test_groups_of_a_version_off_the_lineage_are_discarded_and_say_so() -> None:
    assert choose([group("a", 1)], LINEAGE, NOW, RULES).discarded == {"off_lineage": ("a",)}


def test_a_trajectory_that_ended_off_the_lineage_is_off_it() -> None:
    assert choose([group("a", 2, last_version=1)], LINEAGE, NOW, RULES).discarded == {"off_lineage": ("a",)}


def test_staleness_counts_updates_not_version_numbers() -> None:
    assert choose([], LINEAGE, NOW, RULES).staleness == {3: 0, 2: 1, 0: 2}


def test_the_lineage_leads_over_parents_to_the_base_model() -> None:
    assert lineage_of(5, {0: None, 1: 0, 2: 1, 5: 2, 4: 2}) == [5, 2, 1, 0]


def test_singles_that_agree_are_no_uniform_group() -> None:
    assert not single("s", members=3).uniform
    assert len(claimed(*singles(6))) == 6


def test_a_step_is_due_when_groups_and_singles_together_make_a_whole() -> None:
    assert claimed(*singles(5)) == []
    assert claimed(group("a", 3), *singles(2)) == []
    assert claimed(group("a", 3), *singles(3)) == ["a", "s0", "s1", "s2"]


def test_thirds_make_a_whole() -> None:
    rules = RULES.model_copy(update={"groups_per_step": 3})
    assert choose([group("a", 3), *singles(4)], LINEAGE, NOW, rules).claimed


def test_each_member_that_is_compared_with_a_baseline_is_a_single() -> None:
    assert claimed(single("few", members=3), *singles(2)) == []
    assert claimed(single("few", members=4), *singles(2)) == ["few", "s0", "s1"]


def test_a_step_takes_the_oldest_singles_up_to_its_limit_and_keeps_places_for_fresh_ones() -> None:
    limit = SINGLES_LIMIT * RULES.singles_per_step
    fresh = [single(f"f{place}") for place in range(20)]
    taken = claimed(*singles(40, version=2), *fresh, *(group(name, 3) for name in "abcde"))
    assert set(taken[:4]) == {"a", "b", "c", "d"}
    assert taken[4:] == [f"s{place}" for place in range(limit // 2)] + [f"f{place}" for place in range(limit // 2)]


def test_singles_are_fresh_stale_and_off_the_lineage_as_groups_are() -> None:
    assert claimed(*singles(6, version=2)) == []
    choice = choose([*singles(6), single("old", 0), single("lost", 1)], LINEAGE, NOW, RULES)
    assert choice.discarded == {"stale": ("old",), "off_lineage": ("lost",)}
    assert len(choice.claimed) == 6


def test_rows_of_one_group_become_one_candidate() -> None:
    rows = [
        ("a", NOW, "group", "t1", 1.0, 0, 0, 7, "", ""),
        ("a", NOW, "group", "t2", 0.0, 0, 1, 7, "", ""),
        ("b", NOW, None, "t3", 0.5, 1, 1, 7, "", ""),
        ("c", NOW, "baseline", "t4", 0.5, 1, 1, 7, "task", "user"),
    ]
    first, second, third = Candidate.grouped(rows)
    assert [member.trajectory_id for member in first.members] == ["t1", "t2"]
    assert second.members == (CandidateMember("t3", 0.5, 1, 1, 7),)
    assert [candidate.alone for candidate in (first, second, third)] == [False, False, True]
    assert (third.members[0].task, third.members[0].end_user) == ("task", "user")


@pytest.mark.parametrize(
    ("completions", "why"),
    [
        ([("p", "aborted"), ("p", "greedy"), ("p", "greedy")], "greedy"),
        ([("p", "aborted"), ("p", "greedy")], "aborted"),
        ([("q", None), ("q", "greedy"), ("p", "error")], "error"),
        ([("q", "demonstration")], "other_policy"),
        ([("p", None)], "no_token_ids"),
        ([], "empty"),
    ],
    ids=["the most frequent", "of equals the first", "of this policy", "no other", "rows without ids", "none"],
)
def test_a_silent_trajectory_says_why_its_completions_are(completions: list[tuple[str, str | None]], why: str) -> None:
    assert why_silent("p", completions) == why
