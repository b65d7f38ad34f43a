"""What is missing until the first step, from counts: which comes next, and the remedy of each."""

from typing import Any

import pytest

from proxy.dashboard.views.first_run import Facts, Milestone, current, milestones
from proxy.dashboard.views.funnel import funnel

CALLS, GROUPS, REWARDS, TRAINING, STEP = range(5)
WAITS = ("3 of the 12 scored groups that start a step are there", "wait for more")


def facts(*counts: tuple[str, str | None, int], **changed: Any) -> Facts:
    values: dict[str, Any] = {
        "policy": "starter", "state": "training", "groups": 0, "has_baseline": False, "ready": 0.0,
        "groups_per_step": 12, "why_not": WAITS,
    }  # fmt: skip
    return Facts(stages=funnel(counts), **(values | changed))


def listed(*counts: tuple[str, str | None, int], **changed: Any) -> list[Milestone]:
    return milestones(facts(*counts, **changed))


OPEN, NO_REWARD = ("open", None, 4), ("ended", "no_reward", 4)
SCORED = ("rewarded", "waiting_step", 8)


def test_an_empty_log_lacks_everything_in_order() -> None:
    all_of_them = listed(state="recording", ready=None, why_not=None)
    assert [one.name for one in all_of_them] == ["Calls", "Groups", "Rewards", "Training", "First step"]
    assert not any(one.is_there for one in all_of_them) and current(all_of_them) == CALLS
    assert all(one.remedy for one in all_of_them[1:]), "the code of a first call stands above the list"


@pytest.mark.parametrize(
    ("counts", "changed", "place"),
    [
        ((), {}, CALLS),
        ((OPEN,), {}, GROUPS),
        ((OPEN,), {"groups": 1}, REWARDS),
        ((NO_REWARD,), {"groups": 1}, REWARDS),
        ((SCORED,), {"groups": 1, "state": "recording", "ready": None}, TRAINING),
        ((SCORED,), {"groups": 1}, STEP),
    ],
)
def test_the_first_that_is_missing_comes_next(
    counts: tuple[tuple[str, str | None, int], ...], changed: dict[str, Any], place: int
) -> None:
    assert current(listed(*counts, **changed)) == place


def test_calls_that_cannot_be_trained_on_name_the_reason_and_its_remedy() -> None:
    calls = listed(("excluded", "greedy", 3), ("excluded", "aborted", 1))[CALLS]
    assert not calls.is_there and calls.status == "0 of 4 attempts can be trained on."
    assert calls.reason == "greedy" and "temperature above 0" in (calls.remedy or "")
    some = listed(("excluded", "greedy", 3), OPEN)[CALLS]
    assert some.is_there and some.status == "4 of 7 attempts can be trained on." and some.reason == "greedy"
    assert listed(OPEN)[CALLS] == Milestone("Calls", True, "4 attempts recorded.", None)


def test_attempts_alone_are_enough_where_a_baseline_compares_them() -> None:
    alone = listed(SCORED, has_baseline=True)[GROUPS]
    assert alone.is_there and "running mean" in alone.status and "X-Group-Id" in (alone.remedy or "")
    assert not listed(OPEN, has_baseline=True)[GROUPS].is_there, "nothing is compared before it has a reward"
    assert not listed(SCORED, has_baseline=False)[GROUPS].is_there
    assert listed(OPEN, groups=2)[GROUPS] == Milestone("Groups", True, "2 groups of two or more attempts.", None)


def test_rewards_are_counted_of_what_can_be_trained_on() -> None:
    rewards = listed(("excluded", "greedy", 3), NO_REWARD, SCORED)[REWARDS]
    assert rewards.is_there and rewards.status == "8 of 12 attempts rewarded."
    assert rewards.reason == "no_reward" and "post feedback" in (rewards.remedy or "").lower()
    assert listed(SCORED)[REWARDS].remedy is None
    assert listed(("excluded", "greedy", 3))[REWARDS].status == "No attempt to reward yet."


@pytest.mark.parametrize(("state", "words"), [("recording", "It is off"), ("paused", "It is paused")])
def test_training_that_is_off_names_the_switch_and_the_command(state: str, words: str) -> None:
    training = listed(SCORED, state=state, ready=None)[TRAINING]
    assert training.status.startswith(words) and "`whetstone policies train on starter`" in (training.remedy or "")


def test_the_step_says_what_status_says() -> None:
    step = listed(SCORED)[STEP]
    assert (step.status, step.remedy) == (f"{WAITS[0]}.", "Wait for more.")
    quoted = listed(SCORED, why_not=("`x` waits", "`whetstone step starter` trains"))[STEP]
    assert (quoted.status, quoted.remedy) == ("`x` waits.", "`whetstone step starter` trains.")
    off = listed(SCORED, state="recording", ready=None, why_not=None)[STEP]
    assert off.status == "It begins once 12 groups with different rewards are there."
    assert listed(SCORED, why_not=None)[STEP].status == "The step begins."
