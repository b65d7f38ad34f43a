"""Judges that are left alone: for how long, and what ends it; which judge comes after which."""

import random
from datetime import UTC, datetime, timedelta

import pytest

from judge.ruler.judgement import LONGEST_WAIT_S, Judges, Pause, next_judge
from whetstone.config.settings import Settings

NOW = datetime(2025, 1, 1, tzinfo=UTC)


def seconds(number):
    return timedelta(seconds=number)


@pytest.fixture
def judges():
    return Judges({}, {}, Settings(), rng=random.Random(0))


def test_sixteen_refusals_at_once_are_one_failure(judges):
    waits = [judges.pause("a", NOW + seconds(0.01 * call), "429", 1.0) for call in range(16)]
    assert max(waits) <= 2.5
    assert judges.paused["a"].failures == 1


def test_refusals_that_say_nothing_wait_for_the_pause_that_runs(judges):
    first = judges.pause("a", NOW, "429", None)
    assert judges.pause("a", NOW + seconds(1), "500", None) == pytest.approx(first - 1)
    assert judges.paused["a"] == Pause(NOW + seconds(first), "429", 1)


def test_a_pause_becomes_longer_by_what_another_refusal_says_never_shorter(judges):
    judges.pause("a", NOW, "429", 60.0)
    assert judges.pause("a", NOW + seconds(10), "late", 30.0) == 50
    assert judges.paused["a"] == Pause(NOW + seconds(60), "429", 1)
    assert judges.pause("a", NOW + seconds(10), "later", 300.0) == 300
    assert judges.paused["a"] == Pause(NOW + seconds(310), "later", 1)


def test_a_judge_that_fails_after_its_pause_is_left_alone_for_longer(judges):
    now, waits = NOW, []
    for _ in range(14):
        waits.append(judges.pause("a", now, "500", None))
        now += seconds(waits[-1])
    assert all(0.75 * 2**n <= wait <= 1.25 * 2**n for n, wait in enumerate(waits[:11], 1))
    assert max(waits) <= LONGEST_WAIT_S
    assert judges.paused["a"].failures == 14


def test_only_an_answer_after_the_pause_ends_it(judges):
    wait = judges.pause("a", NOW, "500", None)
    judges.answers("a", NOW + seconds(wait / 2))
    assert "a" in judges.paused
    judges.answers("a", NOW + seconds(wait))
    assert "a" not in judges.paused
    judges.answers("b", NOW)


def test_each_judge_is_left_alone_for_itself(judges):
    judges.pause("a", NOW, "500", None)
    judges.pause("b", NOW, "500", None)
    assert [judges.paused[name].failures for name in "ab"] == [1, 1]


@pytest.mark.parametrize(("failures", "seconds"), [(1, 2), (2, 4), (5, 32), (11, 2048), (12, 2880), (10**6, 2880)])
def test_the_wait_doubles_up_to_a_bound_and_is_spread(judges, failures, seconds):
    waits = [judges.wait_s(failures) for _ in range(400)]
    assert 0.75 * seconds <= min(waits) < 0.8 * seconds
    assert 1.2 * seconds < max(waits) <= 1.25 * seconds <= LONGEST_WAIT_S


def test_no_wait_is_over_the_longest(judges):
    assert max(judges.wait_s(failures) for failures in range(1, 30) for _ in range(500)) <= LONGEST_WAIT_S == 3600


def test_who_comes_after_whom():
    assert next_judge("a", "a", ()) is None
    assert next_judge("a", "a", ("b", "c")) == "b"
    assert next_judge("b", "a", ("b", "c")) == "c"
    assert next_judge("c", "a", ("b", "c")) is None


def test_nobody_is_asked_again_for_being_a_fallback_too():
    assert next_judge("b", "b", ("b", "c")) == "c"
    assert next_judge("c", "b", ("b", "c")) is None


def test_a_judge_that_the_settings_name_no_more_makes_room_for_the_first():
    assert next_judge("gone", "a", ("b",)) == "a"


def test_everybody_left_is_asked_once():
    asked = ["b"]
    while following := next_judge(asked[-1], "b", ("a", "b", "c")):
        asked.append(following)
    assert asked == ["b", "a", "c"]
