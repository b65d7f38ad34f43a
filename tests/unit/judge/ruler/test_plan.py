"""Which judgements a group needs: of which attempts, by whom, who comes after whom, and how long to wait."""

import random

import pytest

from judge.ruler.plan import (
    DRIFT,
    LONGEST_WAIT_S,
    REWARD,
    PlannedJudgement,
    next_judge,
    sections,
    slots,
    wait_s,
)
from whetstone.config.rewards import RulerSettings
from whetstone.domain.sampling_share import in_share


@pytest.mark.parametrize("attempts", [1, 2, 7, 8])
def test_attempts_that_fit_are_read_together(attempts):
    assert sections(attempts, 8) == [tuple(range(attempts))]


def test_more_attempts_are_read_in_parts_that_overlap_by_half():
    assert sections(6, 4) == [(0, 1, 2, 3), (2, 3, 4, 5), (4, 5, 0, 1)]


@pytest.mark.parametrize("most", [2, 3, 5, 8, 9])
def test_parts_hold_every_attempt_twice_and_hang_together(most):
    for attempts in range(most + 1, 5 * most + 3):
        parts = sections(attempts, most)
        assert all(len(part) == len(set(part)) == most for part in parts)
        assert all(sum(one in part for part in parts) >= 2 for one in range(attempts))
        reached, left = set(parts[0]), list(parts[1:])
        while joined := [part for part in left if reached & set(part)]:
            reached |= {one for part in joined for one in part}
            left = [part for part in left if part not in joined]
        assert reached == set(range(attempts))


def test_the_judgements_go_round_among_the_judges():
    needed = slots(2, RulerSettings(judges=("a", "b"), judgements=3), ("a", "b"), "g")
    assert needed == [
        PlannedJudgement(place, section, REWARD, judge)
        for place, judge in enumerate(("a", "b", "a"))
        for section in (0, 1)
    ]


def test_the_strong_judge_comes_last_and_rewards_nothing():
    ruler = RulerSettings(judges=("a",), judgements=2, strong="s", strong_share=1)
    assert slots(2, ruler, ("a",), "g")[4:] == [PlannedJudgement(2, 0, DRIFT, "s"), PlannedJudgement(2, 1, DRIFT, "s")]
    assert len(slots(2, ruler.model_copy(update={"strong_share": 0}), ("a",), "g")) == 4


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


@pytest.mark.parametrize(("failures", "seconds"), [(1, 2), (2, 4), (5, 32), (11, 2048), (12, 2880), (10**6, 2880)])
def test_the_wait_doubles_up_to_a_bound_and_is_spread(failures, seconds):
    rng = random.Random(0)
    waits = [wait_s(failures, rng) for _ in range(400)]
    assert 0.75 * seconds <= min(waits) < 0.8 * seconds
    assert 1.2 * seconds < max(waits) <= 1.25 * seconds <= LONGEST_WAIT_S


def test_no_wait_is_over_the_longest():
    rng = random.Random(1)
    assert max(wait_s(failures, rng) for failures in range(1, 30) for _ in range(500)) <= LONGEST_WAIT_S == 3600


@pytest.mark.parametrize("share", [0.05, 0.3, 0.9])
def test_a_sample_has_about_its_share(share):
    drawn = sum(in_share(f"strong group-{number}", share) for number in range(20_000))
    # Within five standard deviations.
    assert abs(drawn / 20_000 - share) < 5 * (share * (1 - share) / 20_000) ** 0.5


def test_a_sample_is_the_same_whenever_it_is_drawn_and_grows_with_its_share():
    keys = [f"review {number}" for number in range(500)]
    small, large = ({key for key in keys if in_share(key, share)} for share in (0.2, 0.6))
    assert small == {key for key in keys if in_share(key, 0.2)}
    assert small < large
    assert all(in_share(key, 1) and not in_share(key, 0) for key in keys)
