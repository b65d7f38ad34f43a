"""What the judge makes of feedback, time and members: on both databases, through the tables the proxy writes."""

from datetime import timedelta

import pytest

from judge.settlement.sweep import sweep
from migrations import schema
from whetstone.config.rewards import RewardSettings
from whetstone.config.settings import GroupSettings

SETTINGS = GroupSettings(target_size=3, minimum_size=2, deadline_s=3600, idle_s=600, feedback_waits_s=900)
DEADLINE = timedelta(seconds=3600)
NO_BASELINE = {"starter": RewardSettings(baseline=False)}


@pytest.fixture
def swept(engine, seed):
    """Sweep some seconds after everything was seeded; return what was done."""

    def run(after_s=1.0, settings=SETTINGS, learning=None):
        return sweep(engine, settings, seed.now + timedelta(seconds=after_s), learning)

    return run


@pytest.fixture
def trajectory(seed):
    return lambda trajectory_id, project="default": seed.one(schema.trajectories, trajectory_id, project)


@pytest.fixture
def group(seed):
    return lambda group_id="g": seed.one(schema.groups, group_id)


@pytest.fixture
def feedback(seed):
    return lambda feedback_id, project="default": seed.one(schema.feedback, feedback_id, project)


def test_a_trajectory_gets_its_reward_and_ends(seed, swept, trajectory, feedback):
    seed.trajectory("t")
    given = seed.feedback("t", 0.75)
    swept()
    assert (trajectory("t").reward, trajectory("t").reward_source, trajectory("t").state) == (
        0.75,
        "trajectory",
        "rewarded",
    )
    assert trajectory("t").ended_at is not None
    assert (feedback(given).state, feedback(given).trajectory_id) == ("applied", "t")
    assert feedback(given).applied_at is not None


def test_a_reward_of_zero_is_a_reward(seed, swept, trajectory):
    seed.trajectory("t")
    seed.feedback("t", 0.0)
    swept()
    assert (trajectory("t").reward, trajectory("t").state) == (0.0, "rewarded")


def test_feedback_that_is_not_final_leaves_the_trajectory_open_until_it_idles(seed, swept, trajectory):
    seed.trajectory("t")
    seed.feedback("t", 1.0, final=False)
    swept()
    assert (trajectory("t").reward, trajectory("t").state) == (1.0, "open")
    swept(after_s=600)
    assert trajectory("t").state == "rewarded"


def test_an_idle_trajectory_ends_without_a_reward(seed, swept, trajectory):
    seed.trajectory("t")
    swept(after_s=599)
    assert trajectory("t").state == "open"
    swept(after_s=600)
    assert (trajectory("t").state, trajectory("t").reward, trajectory("t").why_not_trained) == (
        "ended",
        None,
        "no_reward",
    )


def test_a_later_feedback_supersedes_an_earlier_one(seed, swept, trajectory, feedback):
    seed.trajectory("t")
    first = seed.feedback("t", 0.0)
    swept()
    second = seed.feedback("t", 1.0, created_at=seed.now + timedelta(seconds=1))
    swept()
    assert (feedback(first).state, feedback(second).state, trajectory("t").reward) == ("superseded", "applied", 1.0)
    assert feedback(first).applied_at is not None


def test_an_earlier_feedback_that_is_seen_late_changes_nothing(seed, swept, trajectory, feedback):
    seed.trajectory("t")
    second = seed.feedback("t", 1.0, created_at=seed.now + timedelta(seconds=1))
    swept()
    first = seed.feedback("t", 0.0)
    swept()
    assert (feedback(first).state, feedback(second).state, trajectory("t").reward) == ("superseded", "applied", 1.0)


def test_completions_count_as_their_mean_until_the_trajectory_is_rewarded_as_a_whole(seed, swept, trajectory, feedback):
    seed.trajectory("t", turns=2)
    seed.feedback("t-0", 1.0, kind="completion")
    by_upstream_id = seed.feedback("chatcmpl-t-1", 0.5, kind="completion")
    swept()
    assert (trajectory("t").reward, trajectory("t").reward_source, trajectory("t").state) == (
        0.75,
        "completions",
        "open",
    )
    assert (feedback(by_upstream_id).trajectory_id, feedback(by_upstream_id).completion_id) == ("t", "t-1")
    seed.feedback("t", -1.0)
    swept()
    assert (trajectory("t").reward, trajectory("t").reward_source) == (-1.0, "trajectory")
    seed.feedback("t-0", 0.0, kind="completion", created_at=seed.now + timedelta(seconds=2))
    swept()
    assert trajectory("t").reward == -1.0


def test_a_choice_of_a_call_is_found_by_its_number(seed, swept, trajectory):
    seed.trajectory("t", turns=0)
    seed.trajectory("t.1", turns=0)
    seed.completion("t", 0, upstream_id="chatcmpl-x")
    seed.completion("t.1", 0, upstream_id="chatcmpl-x", choice=1)
    seed.feedback("chatcmpl-x", 1.0, kind="completion", choice=1)
    swept()
    assert (trajectory("t").reward, trajectory("t.1").reward) == (None, 1.0)


def test_a_groups_rewards_reach_each_member(seed, swept, trajectory, group, feedback):
    seed.group()
    for name in "abc":
        seed.trajectory(name, "g")
    given = seed.feedback("g", kind="group", rewards={"a": 0.0, "b": 1.0, "c": 1.0}, final=True)
    swept()
    assert [trajectory(name).reward for name in "abc"] == [0.0, 1.0, 1.0]
    assert {trajectory(name).reward_source for name in "abc"} == {"group"}
    assert group().state == "scored"
    assert (feedback(given).state, feedback(given).reason) == ("applied", None)


def test_a_groups_rewards_in_two_parts_both_count(seed, swept, trajectory, feedback):
    seed.group()
    for name in "abc":
        seed.trajectory(name, "g")
    first = seed.feedback("g", kind="group", rewards={"a": 0.0, "b": 0.0})
    second = seed.feedback("g", kind="group", rewards={"b": 1.0}, created_at=seed.now + timedelta(seconds=1))
    swept()
    assert [trajectory(name).reward for name in "abc"] == [0.0, 1.0, None]
    assert (feedback(first).state, feedback(second).state) == ("applied", "applied")
    seed.feedback("g", kind="group", rewards={"a": 1.0}, created_at=seed.now + timedelta(seconds=2))
    swept()
    assert (feedback(first).state, feedback(second).state) == ("superseded", "applied")


def test_a_groups_rewards_wait_for_members_and_then_say_who_never_came(seed, swept, trajectory, feedback):
    seed.group()
    seed.trajectory("a", "g")
    given = seed.feedback("g", kind="group", rewards={"a": 1.0, "nobody": 0.0})
    swept()
    assert (feedback(given).state, trajectory("a").reward) == ("waiting", None)
    swept(after_s=900)
    assert (feedback(given).state, feedback(given).reason) == ("applied", "no such trajectory in this group: nobody")
    assert trajectory("a").reward == 1.0


def test_feedback_that_comes_before_its_target_waits_for_it(seed, swept, trajectory, feedback):
    given = seed.feedback("chatcmpl-t-0", 1.0, kind="completion")
    swept()
    assert (feedback(given).state, feedback(given).reason) == ("waiting", None)
    seed.trajectory("t")
    swept(after_s=3)
    assert (feedback(given).state, trajectory("t").reward) == ("applied", 1.0)


@pytest.mark.parametrize("kind", ["trajectory", "completion", "group"])
def test_feedback_for_an_unknown_target_fails_after_its_wait(seed, swept, feedback, kind):
    given = seed.feedback("nobody", 1.0, kind=kind, rewards={"x": 1.0} if kind == "group" else None)
    swept(after_s=899)
    assert feedback(given).state == "waiting"
    swept(after_s=900)
    assert (feedback(given).state, feedback(given).reason) == ("failed", "no such trajectory in this project")


def test_waiting_feedback_is_looked_at_ever_more_rarely(seed, swept):
    seed.feedback("nobody", 1.0)
    looks = sum(swept(after_s=second).feedback for second in range(900))
    assert 5 <= looks <= 15


def test_another_projects_trajectory_is_an_unknown_one(seed, swept, trajectory, feedback):
    seed.project("other")
    seed.trajectory("t")
    seed.trajectory("t", project="other")
    given = seed.feedback("t", 1.0, project="other")
    foreign = seed.feedback("t-0", 1.0, kind="completion", project="third")
    swept(after_s=900)
    assert (trajectory("t").reward, trajectory("t", "other").reward) == (None, 1.0)
    assert feedback(given, "other").state == "applied"
    assert feedback(foreign, "third").state == "failed"


@pytest.mark.parametrize("state", ["claimed", "trained"])
def test_feedback_after_a_step_claimed_the_trajectory_is_unused_and_says_which(
    seed, swept, trajectory, feedback, state
):
    seed.group(state=state, step=7, size=3)
    seed.trajectory("t", "g", state=state, reward=1.0, trained_in_step=7 if state == "trained" else None)
    given = seed.feedback("t", 0.0)
    by_group = seed.feedback("g", kind="group", rewards={"t": 0.0})
    swept()
    assert (feedback(given).state, feedback(given).reason) == ("unused", "trained in step 7")
    assert (feedback(by_group).state, feedback(by_group).reason) == ("unused", "trained in step 7")
    assert (trajectory("t").reward, trajectory("t").state) == (1.0, state)


def test_a_group_of_its_target_size_is_scored_once_all_are_rewarded(seed, swept, trajectory, group):
    seed.group()
    for name, reward in (("a", 0.0), ("b", 1.0)):
        seed.trajectory(name, "g")
        seed.feedback(name, reward)
    swept()
    assert (group().state, trajectory("a").why_not_trained) == ("open", "group_open")
    seed.trajectory("c", "g")
    seed.feedback("c", 1.0)
    done = swept()
    assert done.scored == 1
    row = group()
    assert (row.state, row.size, row.rewarded, row.reward_mean) == ("scored", 3, 3, pytest.approx(2 / 3))
    assert row.reward_spread == pytest.approx(0.4714045)
    assert row.closed_at is not None
    assert {trajectory(name).why_not_trained for name in "abc"} == {"waiting_step"}
    assert swept().groups == 0


def test_a_group_with_an_open_member_stays_open(seed, swept, group):
    seed.group()
    for name in "abc":
        seed.trajectory(name, "g")
        seed.feedback(name, 1.0, final=name != "c")
    swept()
    assert group().state == "open"


def test_a_closed_group_waits_for_its_rewards(seed, swept, trajectory, group):
    seed.group()
    for name in "abc":
        seed.trajectory(name, "g")
    seed.feedback("a", 1.0)
    seed.feedback("b", 0.0)
    swept(after_s=600)
    assert (group().state, group().size, group().rewarded, group().reward_mean) == ("closed", 3, 2, None)
    assert (trajectory("a").why_not_trained, trajectory("c").why_not_trained) == ("group_open", "no_reward")
    seed.feedback("c", 0.5)
    swept(after_s=601)
    assert (group().state, group().reward_mean) == ("scored", 0.5)


def test_a_closed_groups_unrewarded_members_are_excluded_at_last(seed, swept, trajectory, group):
    seed.group()
    for name in "abc":
        seed.trajectory(name, "g")
    seed.feedback("a", 1.0)
    seed.feedback("b", 0.0)
    swept(after_s=600)
    swept(after_s=600 + 3599)
    assert group().state == "closed"
    swept(after_s=600 + 3600)
    assert (group().state, group().size, group().rewarded) == ("scored", 3, 2)
    assert (trajectory("c").state, trajectory("c").why_not_trained) == ("excluded", "no_reward")
    seed.feedback("c", 0.5, created_at=seed.now + timedelta(seconds=4200))
    swept(after_s=600 + 3601)
    assert (group().rewarded, group().reward_mean, trajectory("c").state) == (3, 0.5, "rewarded")


def test_without_a_baseline_a_closed_group_with_too_few_rewards_is_discarded(seed, swept, trajectory, group):
    seed.group()
    for name in "abc":
        seed.trajectory(name, "g")
    seed.feedback("a", 1.0)
    swept(after_s=600, learning=NO_BASELINE)
    swept(after_s=600 + 3600, learning=NO_BASELINE)
    assert (group().state, group().reason, group().due_at) == ("discarded", "too_few", None)
    assert (trajectory("a").why_not_trained, trajectory("b").why_not_trained) == ("too_few", "no_reward")
    seed.feedback("b", 1.0)
    swept(after_s=600 + 3601, learning=NO_BASELINE)
    assert (group().state, trajectory("b").why_not_trained, trajectory("b").reward) == ("discarded", "late", 1.0)


def test_a_small_group_closes_at_its_deadline_and_ends_who_is_still_open(seed, swept, trajectory, group):
    seed.group()
    for name in "abc":
        seed.trajectory(name, "g", last_seen_at=seed.now + DEADLINE)
    seed.feedback("a", 1.0)
    seed.feedback("b", 0.0)
    seed.feedback("c", 0.5, final=False)
    swept(after_s=3599)
    assert group().state == "open"
    swept(after_s=3600)
    assert (group().state, trajectory("c").state, group().rewarded) == ("scored", "rewarded", 3)


def test_without_a_baseline_a_group_below_its_minimum_is_discarded_at_its_deadline(seed, swept, trajectory, group):
    seed.group()
    seed.trajectory("a", "g")
    seed.feedback("a", 1.0)
    swept(after_s=3600, learning=NO_BASELINE)
    assert (group().state, group().reason, trajectory("a").why_not_trained) == ("discarded", "too_few", "too_few")


def test_a_late_member_reopens_a_scored_group(seed, swept, trajectory, group):
    seed.group()
    for name in "abc":
        seed.trajectory(name, "g")
        seed.feedback(name, 1.0)
    swept()
    assert group().state == "scored"
    seed.trajectory("d", "g")
    swept(after_s=2)
    row = group()
    assert (row.state, row.size, row.closed_at, row.reward_mean) == ("open", 0, None, None)
    assert trajectory("a").why_not_trained == "group_open"
    seed.feedback("d", 0.0)
    swept(after_s=3)
    assert (group().state, group().size, group().reward_mean) == ("scored", 4, 0.75)


def test_a_late_member_after_the_deadline_gets_a_deadline_of_its_own(seed, swept, trajectory, group):
    seed.group()
    for name in "ab":
        seed.trajectory(name, "g")
        seed.feedback(name, 1.0)
    swept(after_s=3600)
    assert group().state == "scored"
    began = seed.now + timedelta(seconds=4000)
    seed.trajectory("c", "g", created_at=began, last_seen_at=began + DEADLINE)
    swept(after_s=4001)
    assert (group().state, trajectory("c").state) == ("open", "open")
    swept(after_s=4000 + 3600)
    assert (group().state, trajectory("c").state) == ("closed", "ended")


def test_without_a_baseline_a_late_member_of_a_claimed_group_leaves_it_alone(seed, swept, trajectory, group):
    seed.group(state="claimed", step=1, size=3)
    seed.trajectory("d", "g")
    seed.feedback("d", 1.0)
    swept(learning=NO_BASELINE)
    assert (group().state, group().size) == ("claimed", 3)
    assert (trajectory("d").state, trajectory("d").reward, trajectory("d").why_not_trained) == ("rewarded", 1.0, "late")


def test_a_revised_reward_rescores_an_unclaimed_group(seed, swept, group):
    seed.group()
    for name in "abc":
        seed.trajectory(name, "g")
        seed.feedback(name, 1.0)
    swept()
    closed_at = group().closed_at
    seed.feedback("a", 0.0, created_at=seed.now + timedelta(seconds=1))
    swept(after_s=2)
    assert (group().state, group().reward_mean, group().closed_at) == ("scored", pytest.approx(2 / 3), closed_at)


@pytest.mark.parametrize(
    ("values", "why"), [({"split": "eval"}, "split_eval"), ({"no_train": True}, "no_train"), ({"turns": 0}, "empty")]
)
def test_a_member_that_does_not_count_keeps_its_reward_and_says_why(seed, swept, trajectory, group, values, why):
    seed.group()
    for name in "abc":
        seed.trajectory(name, "g")
        seed.feedback(name, 1.0)
    seed.trajectory("x", "g", **values)
    seed.feedback("x", 0.0)
    swept()
    assert (group().state, group().size, group().rewarded, group().reward_mean) == ("scored", 4, 3, 1.0)
    assert (trajectory("x").reward, trajectory("x").state, trajectory("x").why_not_trained) == (0.0, "rewarded", why)


def test_without_a_baseline_an_ungrouped_trajectory_says_so(seed, swept, trajectory):
    seed.trajectory("t")
    swept(learning=NO_BASELINE)
    assert trajectory("t").why_not_trained == "no_reward"
    seed.feedback("t", 1.0)
    swept(learning=NO_BASELINE)
    assert (trajectory("t").state, trajectory("t").why_not_trained) == ("rewarded", "no_group")


def test_a_reason_of_the_proxy_or_the_trainer_stays(seed, swept, trajectory):
    seed.trajectory("t", why_not_trained="sampling_bent: top_p")
    seed.feedback("t", 1.0)
    swept()
    assert trajectory("t").why_not_trained == "sampling_bent: top_p"


def test_a_reason_that_lasts_wins_over_what_its_group_waits_for(seed, swept, trajectory, group):
    seed.group()
    for name in "abc":
        seed.trajectory(name, "g", why_not_trained="greedy" if name == "a" else None)
    swept()
    assert [trajectory(name).why_not_trained for name in "abc"] == ["greedy", "no_reward", "no_reward"]
    for name in "abc":
        seed.feedback(name, float(name == "a"))
    swept()
    assert (group().state, group().rewarded) == ("scored", 3), "it is compared with the others all the same"
    assert [trajectory(name).why_not_trained for name in "abc"] == ["greedy", "waiting_step", "waiting_step"]


def test_a_second_sweep_finds_nothing_to_do(seed, swept):
    seed.group()
    for name in "abc":
        seed.trajectory(name, "g")
        seed.feedback(name, 1.0)
    swept()
    done = swept()
    assert (done.placed, done.feedback, done.idle, done.groups) == (0, 0, 0, 0)
