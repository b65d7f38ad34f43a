"""When a step is due, and which groups it takes."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from celery.schedules import crontab
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from trainer.domain.eligible_groups import Candidate, CandidateMember
from trainer.domain.triggers import SINGLES_LIMIT, Choice, choose, last_fired
from whetstone.config.trainer import TrainerSettings

NOW = datetime(2026, 1, 1, tzinfo=UTC)
RULES = TrainerSettings(
    groups_per_step=2, max_groups_per_step=4, singles_per_step=6, min_fresh_share=0.5, max_staleness=1, fresh_waits_s=60
)
LINEAGE = [3, 2, 0]


def group(
    name: str, version: int, age_s: float = 0, last_version: int | None = None, tokens: int = 5, gap: float = 1.0
) -> Candidate:
    last = version if last_version is None else last_version
    members = tuple(CandidateMember(f"{name}{i}", 1 + i * gap, version, last, tokens) for i in range(2))
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


@pytest.mark.parametrize("gap", [0.0, 1e-6])
def test_a_uniform_group_fills_no_place_and_goes_with_the_next_step(gap: float) -> None:
    uniform = group("u", 3, gap=gap)
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


@pytest.mark.parametrize(("live_for_s", "due"), [(0, False), (59, False), (60, True)])
def test_groups_that_closed_during_a_long_step_wait_for_its_version(live_for_s: float, due: bool) -> None:
    stale = [group("a", 2, age_s=300), group("b", 2, age_s=200)]
    choice = choose(stale, LINEAGE, NOW, RULES, live_since=NOW - timedelta(seconds=live_for_s))
    assert bool(choice.claimed) is due
    assert due or "that version has been live for" in (choice.waits_for or "")


def test_fresh_groups_do_not_wait_for_the_time_of_a_version() -> None:
    fresh = [group("a", 3), group("b", 3)]
    assert choose(fresh, LINEAGE, NOW, RULES, live_since=NOW).claimed


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


def chosen(*groups: Candidate, by_hand: bool = False, **rules: Any) -> Choice:
    return choose(groups, LINEAGE, NOW, RULES.model_copy(update=rules), by_hand=by_hand)


def taken(choice: Choice) -> list[str]:
    return [group.group_id for group in choice.claimed]


def test_a_few_groups_that_waited_long_enough_make_a_step_due() -> None:
    few = [group(name, 3, age_s=30) for name in "ab"]
    patient = {"groups_per_step": 4, "min_groups_per_step": 2}
    assert chosen(*few, **patient).waits_for == "2 of 4 groups are there"
    waiting = chosen(*few, **patient, step_waits_s=31.0)
    assert waiting.waits_for == "2 of 4 groups are there; the oldest has waited for 30 of 31 s"
    assert taken(waiting) == []
    assert taken(chosen(*few, **patient, step_waits_s=30.0)) == ["a", "b"]


def test_it_is_the_oldest_group_that_has_waited() -> None:
    patient = {"groups_per_step": 4, "min_groups_per_step": 2, "step_waits_s": 30.0}
    assert taken(chosen(group("old", 3, age_s=30), group("new", 3), **patient)) == ["old", "new"]


def test_too_few_groups_wait_for_ever() -> None:
    alone = chosen(group("a", 3, age_s=1e6), groups_per_step=4, min_groups_per_step=2, step_waits_s=30.0)
    assert alone.waits_for == "1 of 2 groups are there"


def test_singles_count_in_part_towards_the_few_that_waited() -> None:
    patient = {"groups_per_step": 4, "min_groups_per_step": 2, "step_waits_s": 30.0}
    halves = [single(f"s{place}", age_s=30) for place in range(3)]
    assert taken(chosen(*halves, **patient)) == ["s0", "s1", "s2"]
    assert chosen(*halves[:2], **patient).waits_for == "0 groups and 2 singles are there, worth 1.3 of 2 groups"


def test_waiting_makes_nothing_fresh() -> None:
    patient = {"groups_per_step": 4, "min_groups_per_step": 2, "step_waits_s": 10.0}
    told = chosen(group("a", 2, age_s=30), group("b", 2), **patient).waits_for
    assert told == "0% of their tokens are version 3's, of 50% needed; the oldest has waited for 30 of 60 s"


NIGHTLY = {"schedule": "0 3 * * *", "min_groups_per_step": 2, "groups_per_step": 2}
AT_FOUR = datetime(2026, 1, 1, 4, tzinfo=UTC)


def at_four(*groups: Candidate, **rules: Any) -> Choice:
    return choose(groups, LINEAGE, AT_FOUR, RULES.model_copy(update=NIGHTLY | rules))


def closed(name: str, at: str, version: int = 3) -> Candidate:
    """A group that closed at that hour of the night."""
    return group(name, version, age_s=(NOW - datetime.fromisoformat(f"2026-01-01T{at}+00:00")).total_seconds())


def test_a_schedule_takes_what_was_closed_before_it_fired_and_nothing_else() -> None:
    choice = at_four(closed("a", "02:00"), closed("b", "02:59"), closed("at", "03:00"), closed("late", "03:01"))
    assert taken(choice) == ["a", "b"]


def test_a_schedule_waits_for_enough_of_it() -> None:
    choice = at_four(closed("a", "02:00"), *(closed(f"late{place}", "03:30") for place in range(9)))
    assert taken(choice) == []
    assert choice.waits_for == (
        "of what was closed before the schedule last fired (2026-01-01 03:00 UTC), 1 of 2 groups are there"
    )


def test_a_schedule_trains_on_what_waiting_cannot_freshen() -> None:
    assert taken(at_four(closed("a", "02:00", version=2), closed("b", "02:00", version=2), fresh_waits_s=1e9)) == [
        "a", "b",
    ]  # fmt: skip


def test_with_a_schedule_neither_numbers_nor_waiting_start_a_step() -> None:
    many = [closed(f"g{place}", "03:30") for place in range(4)]
    assert taken(at_four(*many, step_waits_s=1.0)) == []


def test_what_is_stale_goes_without_waiting_for_the_schedule() -> None:
    assert at_four(closed("old", "03:30", version=0)).discarded == {"stale": ("old",)}


def test_by_hand_a_step_takes_whatever_can_teach() -> None:
    assert taken(chosen(group("a", 2), groups_per_step=4, by_hand=True)) == ["a"]
    assert taken(chosen(single("s"), by_hand=True)) == ["s"]
    assert taken(chosen(group("late", 3), schedule="0 3 * * *", by_hand=True)) == ["late"]


def test_by_hand_too_it_takes_no_more_than_a_step_holds() -> None:
    assert len(taken(chosen(*(group(name, 3) for name in "abcdef"), by_hand=True))) == RULES.max_groups_per_step


@pytest.mark.parametrize(
    ("groups", "why"),
    [
        ([], "no group is scored"),
        ([group("u", 3, gap=0.0)], "of 1 scored groups none can teach: 1 group_uniform"),
        (
            [group("u", 3, gap=0.0), group("old", 0), group("lost", 1), group("lost too", 1)],
            "of 4 scored groups none can teach: 1 group_uniform, 2 off_lineage, 1 stale",
        ),
    ],
)
def test_where_nothing_can_teach_it_says_why(groups: list[Candidate], why: str) -> None:
    for by_hand in (False, True):
        choice = chosen(*groups, by_hand=by_hand)
        assert (choice.waits_for, choice.claimed) == (why, ())
        assert "group_uniform" not in choice.discarded


def test_a_group_of_more_singles_than_a_step_holds_is_a_step_of_its_own() -> None:
    large = single("large", members=SINGLES_LIMIT * RULES.singles_per_step + 1, age_s=9)
    assert taken(chosen(large, single("small"))) == ["large"]


SCHEDULES = st.builds(
    "{} {} {} {} {}".format,
    st.sampled_from(["*", "0", "7", "*/15", "5,55"]),
    st.sampled_from(["*", "0", "3", "*/6", "1-4,23"]),
    st.sampled_from(["*", "1", "15,31", "28-31"]),
    st.sampled_from(["*", "2", "1,7", "*/3"]),
    st.sampled_from(["*", "0", "mon-fri", "6"]),
)


@given(SCHEDULES, st.datetimes(datetime(2024, 1, 1), datetime(2030, 1, 1), timezones=st.just(UTC)))  # noqa: DTZ001
@examples(max_examples=300, deadline=None)
def test_a_schedule_last_fired_when_celery_would_have(schedule: str, now: datetime) -> None:
    fired = last_fired(schedule, now)
    assert fired <= now

    def next_after(moment: datetime) -> datetime:
        minute, hour, day, month, weekday = schedule.split()
        cron = crontab(minute, hour, weekday, day, month, nowfun=lambda: moment)
        began, ahead, _ = cron.remaining_delta(moment, tz=UTC)
        return (began + ahead).astimezone(UTC)

    assert next_after(fired - timedelta(minutes=1)) == fired
    assert next_after(fired) > now


def test_the_very_moment_counts() -> None:
    at_three = datetime(2026, 3, 1, 3, tzinfo=UTC)
    assert last_fired("0 3 * * *", at_three) == at_three
    assert last_fired("0 3 * * *", at_three - timedelta(microseconds=1)) == at_three - timedelta(days=1)


def test_a_schedule_counts_in_utc_wherever_the_clock_stands() -> None:
    in_tokyo = datetime.fromisoformat("2026-01-02T08:00:00+09:00")  # 23:00 UTC, the day before
    assert last_fired("30 22 * * *", in_tokyo) == datetime(2026, 1, 1, 22, 30, tzinfo=UTC)


def test_leap_days_are_found() -> None:
    assert last_fired("0 0 29 2 *", NOW) == datetime(2024, 2, 29, tzinfo=UTC)
