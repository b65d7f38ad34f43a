"""What is compared with a baseline, what comes too late, and what failed: on both databases."""

import pytest

from migrations import schema


def claim(judge, group_id, state="claimed", reason=None):
    """What the trainer leaves of a group: its rewarded members go with it."""
    g, t = schema.groups.c, schema.trajectories.c
    member = "excluded" if state == "discarded" else state
    with judge.engine.begin() as connection:
        connection.execute(schema.groups.update().where(g.id == group_id).values(state=state, reason=reason, step=1))
        connection.execute(
            schema.trajectories.update()
            .where(t.group_id == group_id, t.state == "rewarded")
            .values(state=member, why_not_trained=reason)
        )


def test_a_prompt_that_nobody_shared_is_scored_against_the_baseline_as_soon_as_its_window_ends(judge):
    judge.prompt("a")
    judge.reward("a", value=0.25)
    judge.sweep(after_s=59)
    assert judge.group_of("a").state == "open"
    done = judge.sweep(after_s=60)
    row = judge.group_of("a")
    assert (row.state, row.formed_by, row.compared_with) == ("scored", "single", "baseline")
    assert (row.size, row.rewarded, row.reward_mean, row.reward_spread) == (1, 1, 0.25, 0.0)
    assert (done.scored, judge.trajectory("a").why_not_trained) == (1, "waiting_step")


def test_it_is_scored_as_soon_as_its_reward_comes_after_the_window(judge):
    judge.prompt("a")
    judge.sweep(after_s=61)
    assert (judge.group_of("a").state, judge.group_of("a").formed_by) == ("open", "single")
    judge.reward("a", after_s=70)
    judge.sweep(after_s=70)
    assert (judge.group_of("a").state, judge.group_of("a").compared_with) == ("scored", "baseline")


def test_without_a_baseline_it_is_discarded(judge):
    judge.policy(baseline=False)
    judge.prompt("a")
    judge.reward("a")
    judge.sweep(after_s=60)
    row = judge.group_of("a")
    assert (row.state, row.reason, row.compared_with) == ("discarded", "too_few", None)
    assert judge.trajectory("a").why_not_trained == "too_few"


def test_with_a_window_of_zero_feedback_scores_a_lone_trajectory_in_the_same_sweep(judge):
    judge.rules(prompt_window_s=0)
    judge.prompt(*"ab")
    judge.sweep()
    judge.reward("a")
    done = judge.sweep(after_s=2)
    row = judge.group_of("a")
    assert (row.state, row.formed_by, row.compared_with, row.size) == ("scored", "single", "baseline", 1)
    assert (done.scored, judge.trajectory("a").why_not_trained) == (1, "waiting_step")
    assert judge.groups() == ["a"], "one without a reward needs no group"
    assert judge.sweep(after_s=3).groups == 0


def test_what_was_rewarded_before_it_was_placed_needs_no_second_sweep_either(judge):
    judge.rules(prompt_window_s=0)
    judge.prompt("a")
    judge.reward("a")
    assert judge.sweep().scored == 1


def test_a_lone_trajectory_that_goes_on_is_scored_when_it_ends(judge):
    judge.rules(prompt_window_s=0)
    judge.prompt("a")
    judge.reward("a", final=False)
    judge.sweep()
    assert (judge.trajectory("a").state, judge.trajectory("a").why_not_trained) == ("open", "no_group")
    judge.sweep(after_s=600)
    assert judge.group_of("a").state == "scored"


@pytest.mark.parametrize("values", [{"split": "eval"}, {"no_train": True}, {"why_not_trained": "greedy"}])
def test_what_is_never_trained_gets_no_group_of_its_own(judge, values):
    judge.rules(prompt_window_s=0)
    judge.prompt("a", **values)
    judge.reward("a")
    judge.sweep()
    assert (judge.trajectory("a").group_id, judge.trajectory("a").state) == (None, "rewarded")


def test_a_group_with_one_reward_waits_for_the_others_and_is_then_scored_against_the_baseline(judge):
    judge.seed.group()
    for name in "abc":
        judge.seed.trajectory(name, "g")
    judge.reward("a")
    judge.sweep(after_s=600)
    judge.sweep(after_s=600 + 3599)
    assert judge.group_of("a").state == "closed"
    judge.sweep(after_s=600 + 3600)
    row = judge.group_of("a")
    assert (row.state, row.formed_by, row.compared_with, row.rewarded) == ("scored", "header", "baseline", 1)
    assert [judge.trajectory(name).why_not_trained for name in "abc"] == ["waiting_step", "no_reward", "no_reward"]
    judge.reward("b", value=0.0, after_s=4300)
    judge.sweep(after_s=4300)
    assert (judge.group_of("a").compared_with, judge.group_of("a").rewarded) == ("group", 2)


def test_a_group_below_its_minimum_is_scored_against_the_baseline_at_its_deadline(judge):
    judge.seed.group()
    judge.seed.trajectory("a", "g")
    judge.reward("a")
    judge.sweep(after_s=3600)
    assert (judge.group_of("a").state, judge.group_of("a").compared_with) == ("scored", "baseline")


def test_a_group_without_any_reward_is_discarded(judge):
    judge.seed.group()
    for name in "abc":
        judge.seed.trajectory(name, "g")
    judge.sweep(after_s=600)
    judge.sweep(after_s=600 + 3600)
    assert (judge.group_of("a").state, judge.group_of("a").reason) == ("discarded", "too_few")
    assert judge.trajectory("a").why_not_trained == "no_reward"


@pytest.mark.parametrize("state", ["claimed", "trained", "discarded"])
def test_a_reward_that_comes_after_its_group_was_taken_makes_a_group_of_its_own(judge, state):
    judge.seed.group()
    for name in "abc":
        judge.seed.trajectory(name, "g")
    judge.reward("a")
    judge.reward("b", value=0.0)
    judge.sweep(after_s=600)
    judge.sweep(after_s=600 + 3600)
    claim(judge, "g", state, "stale" if state == "discarded" else None)
    late = judge.seed.feedback("c", 0.5)
    judge.sweep(after_s=5000)
    row = judge.group_of("c")
    assert (row.state, row.formed_by, row.compared_with, row.reward_mean) == ("scored", "single", "baseline", 0.5)
    assert (judge.trajectory("c").state, judge.trajectory("c").why_not_trained) == ("rewarded", "waiting_step")
    assert judge.seed.one(schema.feedback, late).state == "applied"
    assert judge.trajectory("a").group_id == "g"
    judge.seed.feedback("c", 0.75, created_at=judge.seed.now.replace(hour=23))
    judge.sweep(after_s=5001)
    assert (judge.group_of("c").id, judge.group_of("c").reward_mean) == (row.id, 0.75)


def test_a_late_member_of_a_taken_group_gets_one_of_its_own(judge):
    judge.seed.group(state="claimed", step=1, size=3)
    judge.seed.trajectory("d", "g")
    judge.sweep()
    assert judge.trajectory("d").group_id == "g"
    judge.reward("d")
    judge.sweep(after_s=2)
    assert (judge.group_of("d").formed_by, judge.group_of("d").state) == ("single", "scored")


def test_rewards_given_to_the_group_still_count_for_what_was_moved_from_it(judge):
    judge.seed.group(state="trained", step=1, size=3)
    for name in "cd":
        judge.seed.trajectory(name, "g")
    judge.seed.feedback("g", kind="group", rewards={"c": 0.0, "d": 1.0}, final=True)
    judge.sweep()
    assert (judge.group_of("c").formed_by, judge.group_of("d").reward_mean) == ("single", 1.0)
    judge.seed.feedback("d-0", -1.0, kind="completion")
    judge.sweep(after_s=2)
    assert (judge.trajectory("d").reward, judge.trajectory("d").reward_source) == (1.0, "group")
    later = judge.seed.now.replace(hour=23)
    revised = judge.seed.feedback("g", kind="group", rewards={"c": 0.5}, created_at=later)
    judge.sweep(after_s=3)
    assert judge.seed.one(schema.feedback, revised).state == "applied"
    assert (judge.trajectory("c").reward, judge.group_of("c").reward_mean) == (0.5, 0.5)


@pytest.mark.parametrize("reason", ["group_uniform", "stale", "off_lineage", "step_failed"])
def test_what_a_step_left_out_does_not_come_back(judge, reason):
    judge.seed.group(state="discarded", reason=reason, step=1)
    judge.seed.trajectory("a", "g", state="excluded", reward=1.0, why_not_trained=reason)
    judge.reward("a", value=0.0)
    judge.sweep()
    row = judge.trajectory("a")
    assert (row.group_id, row.state, row.why_not_trained) == ("g", "excluded", reason)


@pytest.mark.parametrize("state", ["claimed", "trained"])
def test_what_a_step_has_taken_does_not_come_back(judge, state):
    judge.seed.group(state=state, step=1)
    judge.seed.trajectory("a", "g", state=state, reward=1.0)
    judge.reward("a", value=0.0)
    judge.sweep()
    assert (judge.trajectory("a").group_id, judge.trajectory("a").reward) == ("g", 1.0)


def broken(judge, trajectory_id, status):
    c = schema.completions.c
    with judge.engine.begin() as connection:
        connection.execute(
            schema.completions.update().where(c.trajectory_id == trajectory_id, c.turn == 1).values(status=status)
        )


@pytest.mark.parametrize("status", ["aborted", "error"])
def test_what_broke_off_and_never_went_on_gets_the_policys_failure_reward(judge, status):
    judge.policy(failure_reward=-1.0)
    judge.seed.group()
    for name in "ab":
        judge.seed.trajectory(name, "g", turns=2)
    broken(judge, "a", status)
    judge.sweep(after_s=600)
    row = judge.trajectory("a")
    assert (row.state, row.reward, row.reward_source) == ("rewarded", -1.0, "failure")
    assert row.why_not_trained == "group_open"
    assert (judge.trajectory("b").state, judge.trajectory("b").reward) == ("ended", None)


def test_a_lone_failure_is_compared_with_the_baseline(judge):
    judge.policy(failure_reward=-1.0)
    judge.rules(prompt_window_s=0)
    judge.prompt("a", turns=2)
    broken(judge, "a", "error")
    judge.sweep(after_s=600)
    assert (judge.group_of("a").compared_with, judge.group_of("a").reward_mean) == ("baseline", -1.0)


def test_without_a_failure_reward_what_broke_off_has_none(judge):
    judge.seed.trajectory("a", turns=2)
    broken(judge, "a", "error")
    judge.sweep(after_s=600)
    assert (judge.trajectory("a").state, judge.trajectory("a").reward) == ("ended", None)


def test_what_broke_off_after_it_was_rewarded_keeps_its_reward(judge):
    judge.policy(failure_reward=-1.0)
    judge.seed.trajectory("a", turns=2)
    broken(judge, "a", "aborted")
    judge.reward("a", value=0.5, final=False)
    judge.sweep(after_s=600)
    assert (judge.trajectory("a").reward, judge.trajectory("a").reward_source) == (0.5, "trajectory")


def test_members_of_whom_nobody_told_get_the_failure_reward_at_the_deadline(judge):
    judge.policy(failure_reward=-1.0)
    judge.seed.group()
    for name in "abc":
        judge.seed.trajectory(name, "g")
    judge.seed.trajectory("x", "g", split="eval")
    judge.reward("a")
    judge.sweep(after_s=600)
    assert judge.group_of("a").state == "closed"
    judge.sweep(after_s=600 + 3600)
    row = judge.group_of("a")
    assert (row.state, row.rewarded, row.compared_with) == ("scored", 3, "group")
    assert {judge.trajectory(name).reward_source for name in "bc"} == {"failure"}
    assert judge.trajectory("x").reward is None


def test_a_group_of_which_nobody_told_anything_has_not_failed(judge):
    judge.policy(failure_reward=-1.0)
    judge.seed.group()
    for name in "abc":
        judge.seed.trajectory(name, "g")
    judge.sweep(after_s=600)
    judge.sweep(after_s=600 + 3600)
    assert judge.group_of("a").state == "discarded"
    assert {judge.trajectory(name).reward for name in "abc"} == {None}


def test_a_real_reward_replaces_the_failures_until_a_step_claims_it(judge):
    judge.policy(failure_reward=-1.0)
    judge.seed.group()
    for name in "abc":
        judge.seed.trajectory(name, "g")
    judge.reward("a", "b")
    judge.sweep(after_s=600)
    judge.sweep(after_s=600 + 3600)
    assert judge.group_of("a").reward_mean == pytest.approx(1 / 3)
    judge.reward("c", value=0.25, after_s=4300)
    judge.sweep(after_s=4300)
    assert (judge.trajectory("c").reward, judge.trajectory("c").reward_source) == (0.25, "trajectory")
    assert judge.group_of("a").reward_mean == 0.75
    claim(judge, "g")
    judge.reward("c", value=1.0, after_s=4400)
    judge.sweep(after_s=4400)
    assert judge.trajectory("c").reward == 0.25
