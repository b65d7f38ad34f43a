"""Why a policy does not train now: one sentence and a remedy for each case; gains by hand."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from tests.conftest import NOW
from whetstone.config.trainer import TrainerSettings
from whetstone.doctor.training import Attempts, ScoredGroups, Stack, gain, uniform_groups, why_not

STACK = Stack(runs=True, trainer_alive=True, url="http://127.0.0.1:8000")
NO_GROUPS = {"open": 0, "closed": 0, "scored": 0, "claimed": 0}
NO_PROMPTS = Attempts(held_out=lambda version: {}, training_prompts=lambda version: [])
EMPTY = ScoredGroups(groups=0, singles=0, uniform=0, oldest=None)


def policy(**changed: Any) -> dict[str, Any]:
    row = {"policy": "starter", "state": "training", "last_step": None, "step_asked_at": None, "live_since": None}
    return row | {"groups": NO_GROUPS, "attempts": {}} | changed


def step(state: str, **changed: Any) -> dict[str, Any]:
    return {"step": 8, "state": state, "version_out": 8, "ended_at": None} | changed


def scored(groups: int = 0, singles: int = 0, waited_s: float = 0) -> ScoredGroups:
    return ScoredGroups(groups, singles, uniform=0, oldest=NOW - timedelta(seconds=waited_s))


def sentence(
    row: dict[str, Any], of: ScoredGroups = EMPTY, *, called: bool = True, stack: Stack = STACK, **trainer: Any
) -> tuple[str, str]:
    why = why_not(row, of, called, TrainerSettings(**trainer), stack, NOW)
    assert why is not None
    return why


def test_a_stack_that_is_down_comes_first() -> None:
    what, do = sentence(policy(state="recording"), stack=Stack(runs=False, trainer_alive=None, url=None))
    assert what == "the stack is down" and "whetstone up" in do


@pytest.mark.parametrize(
    ("state", "what"), [("recording", "calls are only recorded"), ("paused", "training is paused")]
)
def test_a_policy_that_does_not_train_names_the_switch(state: str, what: str) -> None:
    assert sentence(policy(state=state)) == (what, "`whetstone policies train on starter`")


def test_a_dead_trainer_is_named_before_what_it_could_not_do() -> None:
    what, do = sentence(policy(), scored(groups=50), stack=Stack(True, False, None))
    assert what == "the training worker is dead" and "whetstone logs trainer" in do


@pytest.mark.parametrize("state", ["claimed", "trained", "loaded"])
def test_a_step_under_way_needs_no_reason(state: str) -> None:
    assert why_not(policy(last_step=step(state)), EMPTY, True, TrainerSettings(), STACK, NOW) is None


def test_a_step_in_the_gate_waits_for_its_tests() -> None:
    what, do = sentence(policy(last_step=step("waiting_gate")))
    assert what == "step 8 waits for the tests of version 8" and "`whetstone versions starter`" in do


def test_a_requested_step_waits_for_its_worker() -> None:
    assert "requested" in sentence(policy(step_asked_at=NOW))[0]


def test_too_few_scored_groups_are_counted() -> None:
    groups = NO_GROUPS | {"open": 3, "closed": 2, "scored": 5}
    what, do = sentence(policy(groups=groups), scored(groups=5))
    assert what == "5 of the 12 scored groups that start a step are there; 5 more wait for members or rewards"
    assert "trainer.groups_per_step" in do and "`whetstone step starter`" in do


def test_single_attempts_count_in_part() -> None:
    # 24 of 192 singles are worth an eighth of 12 groups.
    what, _ = sentence(policy(), scored(groups=2, singles=24))
    assert what.startswith("3.5 of the 12 scored groups") and "24 single attempts count in part" in what


@pytest.mark.parametrize(("waited_s", "what"), [(10, "the step begins"), (1000, "no step has begun")])
def test_enough_groups_wait_for_fresh_answers_and_not_for_long(waited_s: float, what: str) -> None:
    assert what in sentence(policy(), scored(groups=12, waited_s=waited_s))[0]


def test_groups_that_closed_during_a_long_step_wait_for_its_version() -> None:
    promoted = policy(live_since=NOW - timedelta(seconds=30))
    assert "the step begins" in sentence(promoted, scored(groups=12, waited_s=1000))[0]


def test_with_a_launcher_the_last_launch_is_named() -> None:
    stack = replace(STACK, launch="launch 3 runs since 12:00 UTC")
    asked = sentence(policy(step_asked_at=NOW), stack=stack)
    assert asked[0] == "a step is requested; launch 3 runs since 12:00 UTC" and "admin_launches" in asked[1]
    due = sentence(policy(), scored(groups=12, waited_s=1000), stack=stack)
    assert due[0] == "enough scored groups are there; launch 3 runs since 12:00 UTC"


def test_a_schedule_is_named() -> None:
    assert "0 3 * * *" in sentence(policy(), scored(groups=20), schedule="0 3 * * *")[0]


def test_equal_rewards_teach_nothing() -> None:
    what, do = sentence(policy(), ScoredGroups(groups=0, singles=0, uniform=7, oldest=None))
    assert what == "the rewards within all 7 scored groups are equal" and "tasks" in do


def test_groups_without_a_reward_differ_from_groups_that_wait_for_members() -> None:
    groups = NO_GROUPS | {"open": 1}
    what, do = sentence(policy(groups=groups, attempts={"no_reward": 3}))
    assert what == "no attempt has a reward yet, in 1 group" and "post feedback" in do
    what, do = sentence(policy(groups=groups, attempts={"no_reward": 3, "group_open": 2}))
    assert what == "members, or rewards of some, are missing in 1 group" and "X-Group-Size" in do


def test_without_a_call_the_address_is_the_remedy() -> None:
    what, do = sentence(policy(), called=False)
    assert what == "no call has been recorded yet" and "http://127.0.0.1:8000/v1" in do and '"starter"' in do
    assert sentence(policy())[0] == "no call has been recorded in the last 7 days"


@pytest.mark.parametrize(
    ("attempts", "what", "do"),
    [
        ({"no_reward": 9, "open": 1}, "no reward is known of 10 of the last 10 attempts", "post feedback"),
        ({"greedy": 4}, "4 of the last 4 attempts are left out: greedy (Temperature 0", "temperature above 0"),
        ({"trained": 9, "media": 1}, "1 of the last 10 attempts is left out: media (", "--why media"),
        ({"trained": 9}, "all 9 attempts of the last 7 days are trained on", "send more calls"),
        ({"of_another_version": 1}, "1 of the last 1 attempt is left out: of_another_version", "why_not_trained"),
    ],
)
def test_the_commonest_reason_of_attempts_is_named(attempts: dict[str, int], what: str, do: str) -> None:
    shown, remedy = sentence(policy(attempts=attempts))
    assert shown.startswith(what) and do in remedy


def test_equal_rewards_are_named_where_they_are_why_nothing_trains() -> None:
    few = ScoredGroups(groups=3, singles=0, uniform=0, oldest=NOW, recent=12, recent_uniform=9)
    shown = uniform_groups(policy(), few, TrainerSettings())
    assert shown is not None and "harder or easier tasks" in shown[1]
    assert shown[0] == "the rewards are all equal in 9 of the last 12 closed groups (75%), and no step takes those"
    assert uniform_groups(policy(state="recording"), few, TrainerSettings()) is None
    assert uniform_groups(policy(), replace(few, recent_uniform=5), TrainerSettings()) is None, "most differ"
    assert uniform_groups(policy(), replace(few, groups=99), TrainerSettings()) is None, "a step is due"
    assert uniform_groups(policy(), EMPTY, TrainerSettings()) is None


def test_a_gain_uses_held_out_rewards_if_there_are_enough() -> None:
    rewards = {("eval", 0): (100, 40.0, 40.0), ("eval", 3): (100, 70.0, 70.0), ("train", 0): (500, 0.0, 0.0)}
    shown = gain(rewards, 0, 3, NO_PROMPTS)
    assert shown is not None and (shown["split"], shown["rewarded"]) == ("eval", [100, 100])
    assert shown["mean"] == pytest.approx(0.3)
    # 1.97 * sqrt(0.24 / 99 + 0.21 / 99)
    assert (shown["high"] - shown["low"]) / 2 == pytest.approx(0.133, abs=0.001)


def test_a_gain_needs_30_rewards_of_either_version_in_one_split() -> None:
    few = {("eval", 0): (29, 1.0, 1.0), ("eval", 3): (100, 70.0, 70.0)}
    assert gain(few, 0, 3, NO_PROMPTS) is None
    shown = gain(few | {("train", 0): (30, 3.0, 3.0), ("train", 3): (30, 6.0, 6.0)}, 0, 3, NO_PROMPTS)
    assert shown is not None and (shown["split"], shown["same_prompts"]) == ("train", None)
    assert gain({("eval", 0): (100, 40.0, 40.0)}, 0, 0, NO_PROMPTS) is None


def test_held_out_attempts_are_paired_by_prompt() -> None:
    rewards = {("eval", 0): (40, 20.0, 20.0), ("eval", 3): (50, 50.0, 50.0)}
    by_prompt = {0: {"easy": [1.0] * 20, "hard": [0.0] * 20}, 3: {"easy": [1.0] * 40, "hard": [1.0] * 10}}
    shown = gain(rewards, 0, 3, Attempts(by_prompt.__getitem__, lambda version: []))
    # 20 pairs without a difference, 10 with 1; the means alone differ by 0.5.
    assert shown is not None and shown["pairs"] == 30 and shown["mean"] == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("before", "after", "same"),
    [("aabb", "abab", True), ("aabb", "ccdd", False), ("aabb", "aacc", True), ("aabb", "accc", False), ("", "a", None)],
)
def test_a_gain_in_training_says_whether_the_prompts_are_the_same(before: str, after: str, same: bool | None) -> None:
    rewards = {("train", 0): (30, 3.0, 3.0), ("train", 3): (30, 6.0, 6.0)}
    shown = gain(rewards, 0, 3, Attempts(lambda version: {}, {0: before, 3: after}.__getitem__))
    assert shown is not None and shown["same_prompts"] is same
