"""What becomes of each kind of feedback: parts, demonstrations, ends, closings, judges asked for, and withdrawals."""

import threading
from datetime import timedelta

import pytest

from judge.decisions.feedback import NO_JUDGE
from judge.settlement.sweep import sweep
from migrations import schema
from whetstone.config.rewards import RewardSettings
from whetstone.config.settings import GroupSettings

SETTINGS = GroupSettings(target_size=3, minimum_size=2, prompt_window_s=0)
LEARNING = {"starter": RewardSettings(weights={"accuracy": 2.0, "tone": -0.5, "huge": 1e300})}


@pytest.fixture
def swept(engine, seed):
    def run(after_s=1.0, learning=LEARNING):
        return sweep(engine, SETTINGS, seed.now + timedelta(seconds=after_s), learning)

    return run


@pytest.fixture
def trajectory(seed):
    return lambda trajectory_id="t": seed.one(schema.trajectories, trajectory_id)


@pytest.fixture
def feedback(seed):
    return lambda feedback_id: seed.one(schema.feedback, feedback_id)


@pytest.fixture
def withdraw(engine, seed):
    """As the proxy notes it."""

    def run(*feedback_ids):
        f = schema.feedback.c
        with engine.begin() as connection:
            connection.execute(schema.feedback.update().where(f.id.in_(feedback_ids)).values(withdrawn_at=seed.now))

    return run


def at(seed, seconds):
    return seed.now + timedelta(seconds=seconds)


# --- what is earned at steps


def test_what_is_earned_at_steps_is_added_up_and_to_what_the_attempt_got(seed, swept, trajectory):
    seed.trajectory("t", turns=3)
    seed.feedback("t-0", 0.25, kind="completion", credit="step")
    seed.feedback("t-2", -1.0, kind="completion", credit="step")
    swept()
    assert (trajectory().reward, trajectory().reward_source) == (-0.75, "steps")
    seed.feedback("t-1", 0.5, kind="completion")
    seed.feedback("t-2", 1.0, kind="completion")
    swept()
    assert (trajectory().reward, trajectory().reward_source) == (0.0, "completions")
    seed.feedback("t", 2.0)
    swept()
    assert (trajectory().reward, trajectory().reward_source) == (1.25, "trajectory")


def test_a_later_reward_of_a_step_replaces_the_earlier_and_no_other_reward(seed, swept, trajectory, feedback, withdraw):
    seed.trajectory("t", turns=2)
    first = seed.feedback("t-0", 0.25, kind="completion", credit="step", created_at=at(seed, 0.1))
    plain = seed.feedback("t-0", 0.5, kind="completion", created_at=at(seed, 0.2))
    last = seed.feedback("t-0", 0.75, kind="completion", credit="step", created_at=at(seed, 0.3))
    swept()
    assert [feedback(one).state for one in (first, plain, last)] == ["superseded", "applied", "applied"]
    assert (trajectory().reward, trajectory().reward_source) == (1.25, "completions")
    withdraw(last)
    swept(2.0)
    assert (feedback(first).state, trajectory().reward) == ("applied", 0.75)


# --- parts


def test_parts_make_a_reward_by_the_policys_weights_and_stay(seed, swept, trajectory, feedback):
    seed.trajectory("t")
    given = seed.feedback("t", source="parts", parts={"accuracy": 0.75, "tone": 1.0, "other": 0.25})
    swept()
    assert (trajectory().reward, trajectory().reward_source, trajectory().state) == (1.25, "trajectory", "rewarded")
    assert (feedback(given).state, feedback(given).reward) == ("applied", 1.25)
    assert feedback(given).parts == {"accuracy": 0.75, "tone": 1.0, "other": 0.25}


def test_without_weights_each_part_counts_once_and_completions_go_by_their_mean(seed, swept, trajectory):
    seed.trajectory("t", turns=2)
    seed.feedback("t-0", kind="completion", source="parts", parts={"accuracy": 0.5, "tone": 0.5})
    seed.feedback("t-1", 0.0, kind="completion")
    swept(learning={})
    assert (trajectory().reward, trajectory().reward_source) == (0.5, "completions")


def test_a_weighted_sum_out_of_bounds_fails_and_says_so(seed, swept, trajectory, feedback):
    seed.trajectory("t")
    large = seed.feedback("t", source="parts", parts={"accuracy": 1e9})
    endless = seed.feedback("t", source="parts", parts={"huge": 1e9, "accuracy": 1.0})
    swept()
    assert (feedback(large).state, feedback(endless).state, trajectory().reward) == ("failed", "failed", None)
    assert feedback(large).reason == "its weighted parts make a reward of 2e+09, which is beyond ±1e+09"
    assert feedback(large).reward is None


def test_parts_that_come_too_late_are_weighed_for_evaluation(seed, swept, trajectory, feedback):
    seed.trajectory("t", state="trained", reward=1.0, trained_in_step=7)
    given = seed.feedback("t", source="parts", parts={"accuracy": 1.0})
    swept()
    row = feedback(given)
    assert (row.state, row.reason, row.reward) == ("unused", "trained in step 7", 2.0)
    assert (trajectory().reward, trajectory().state) == (1.0, "trained")


# --- demonstrations


def test_a_demonstration_is_kept_and_changes_nothing(seed, swept, trajectory, feedback):
    seed.trajectory("t")
    given = seed.feedback("t", source="demonstration", demonstration={"role": "assistant", "content": "x"}, final=False)
    swept()
    assert (trajectory().state, trajectory().reward, feedback(given).state) == ("open", None, "applied")


def test_a_reward_beside_a_demonstration_is_superseded_only_with_it(seed, swept, trajectory, feedback):
    seed.trajectory("t")
    message = {"role": "assistant", "content": "x"}
    both = seed.feedback("t", 1.0, demonstration=message)
    reward = seed.feedback("t", 0.5, created_at=at(seed, 1))
    swept()
    assert (feedback(both).state, trajectory().reward) == ("applied", 0.5)
    seed.feedback("t", source="demonstration", demonstration=message, created_at=at(seed, 2))
    swept()
    assert (feedback(both).state, feedback(reward).state) == ("superseded", "applied")


# --- ends, closings, judges


def test_an_end_ends_and_leaves_the_reward_alone(seed, swept, trajectory, feedback):
    seed.trajectory("t")
    seed.feedback("t", 0.5, final=False)
    ended = seed.feedback("t", source="end")
    swept()
    assert (trajectory().state, trajectory().reward, feedback(ended).state) == ("rewarded", 0.5, "applied")
    assert trajectory().ended_at is not None


def test_a_reward_for_a_failure_stands_until_feedback_says_otherwise(seed, swept, trajectory):
    seed.trajectory("t", state="rewarded", reward=-1.0, reward_source="failure")
    seed.feedback("t", source="end")
    swept()
    assert (trajectory().reward, trajectory().reward_source) == (-1.0, "failure")
    seed.feedback("t", 1.0)
    swept()
    assert (trajectory().reward, trajectory().reward_source) == (1.0, "trajectory")


def test_an_end_waits_for_its_trajectory_and_fails_without(seed, swept, trajectory, feedback):
    known, unknown = seed.feedback("t", source="end"), seed.feedback("nobody", source="end")
    swept()
    seed.trajectory("t")
    swept(after_s=900)
    assert (feedback(known).state, trajectory().state) == ("applied", "ended")
    assert (feedback(unknown).state, feedback(unknown).reason) == ("failed", "no such trajectory in this project")


def test_a_closing_is_noted_on_its_group_with_its_own_time_and_the_last_one_counts(seed, swept, feedback):
    seed.group()
    seed.trajectory("t", "g")

    def close(asked_s, swept_s):
        given = seed.feedback("g", kind="group", source="close", created_at=at(seed, asked_s))
        swept(after_s=swept_s)
        assert feedback(given).state == "applied"
        return seed.one(schema.groups, "g").close_asked_at

    assert close(asked_s=2, swept_s=1) == at(seed, 2), "it came after the sweep had begun"
    assert close(asked_s=4, swept_s=5) == at(seed, 4)
    assert close(asked_s=3, swept_s=6) == at(seed, 4), "an earlier one that was seen later changes nothing"


def test_of_two_closings_in_one_sweep_the_last_one_counts(seed, swept):
    seed.group()
    for asked_s in (3, 1):
        seed.feedback("g", kind="group", source="close", created_at=at(seed, asked_s))
    swept(after_s=5)
    assert seed.one(schema.groups, "g").close_asked_at == at(seed, 3)


def test_a_closing_of_nothing_fails_and_one_after_the_claim_is_unused(seed, swept, feedback):
    seed.group("claimed", state="claimed", step=3)
    late = seed.feedback("claimed", kind="group", source="close")
    unknown = seed.feedback("nothing", kind="group", source="close")
    swept()
    assert (feedback(late).state, feedback(late).reason) == ("unused", "trained in step 3")
    assert feedback(unknown).state == "waiting"
    swept(after_s=900)
    assert (feedback(unknown).state, feedback(unknown).reason) == ("failed", "no such group in this project")


def test_a_judge_is_none_in_this_version(seed, swept, feedback):
    seed.group()
    given = seed.feedback("g", kind="group", source="judge", judge={"kind": "ruler"})
    unknown = seed.feedback("nothing", kind="group", source="judge", judge={"kind": "ruler"})
    swept()
    assert (feedback(given).state, feedback(given).reason) == ("failed", NO_JUDGE)
    assert feedback(unknown).state == "waiting"


# --- withdrawals


def test_what_is_withdrawn_before_it_was_applied_never_counts(seed, swept, trajectory, feedback, withdraw):
    given, waiting = seed.feedback("t", 1.0), seed.feedback("nobody", 1.0)
    withdraw(given)
    swept()
    withdraw(waiting)
    seed.trajectory("t")
    swept()
    assert (feedback(given).state, feedback(waiting).state) == ("withdrawn", "withdrawn")
    assert (trajectory().state, trajectory().reward) == ("open", None)


def test_without_any_feedback_left_there_is_no_reward_but_still_an_end(seed, swept, trajectory, feedback, withdraw):
    seed.trajectory("t")
    given = seed.feedback("t", 1.0)
    swept()
    assert trajectory().state == "rewarded"
    withdraw(given)
    swept()
    assert (trajectory().state, trajectory().reward, trajectory().reward_source) == ("ended", None, None)
    assert trajectory().ended_at is not None
    assert feedback(given).state == "withdrawn"


def test_an_open_trajectory_stays_open(seed, swept, trajectory, withdraw):
    seed.trajectory("t")
    given = seed.feedback("t", 1.0, final=False)
    swept()
    withdraw(given)
    swept()
    assert (trajectory().state, trajectory().reward) == ("open", None)


def test_what_it_had_superseded_counts_again(seed, swept, trajectory, feedback, withdraw):
    seed.trajectory("t")
    first, second, third = (seed.feedback("t", reward, created_at=at(seed, reward)) for reward in (0, 1, 2))
    swept()
    assert [feedback(one).state for one in (first, second, third)] == ["superseded", "superseded", "applied"]
    withdraw(second, third)
    swept()
    assert [feedback(one).state for one in (first, second, third)] == ["applied", "withdrawn", "withdrawn"]
    assert trajectory().reward == 0.0


def test_a_superseded_one_that_is_withdrawn_never_comes_back(seed, swept, trajectory, feedback, withdraw):
    seed.trajectory("t")
    first, second = (seed.feedback("t", reward, created_at=at(seed, reward)) for reward in (0, 1))
    swept()
    withdraw(first)
    swept()
    assert (feedback(first).state, trajectory().reward) == ("withdrawn", 1.0)
    withdraw(second)
    swept()
    assert (feedback(second).state, trajectory().reward) == ("withdrawn", None)


def test_a_withdrawn_reward_leaves_the_completions_mean(seed, swept, trajectory, withdraw):
    seed.trajectory("t", turns=2)
    seed.feedback("t-0", 1.0, kind="completion")
    second = seed.feedback("t-1", 0.0, kind="completion")
    whole = seed.feedback("t", -1.0)
    swept()
    withdraw(whole)
    swept()
    assert (trajectory().reward, trajectory().reward_source) == (0.5, "completions")
    withdraw(second)
    swept()
    assert trajectory().reward == 1.0


def test_a_groups_withdrawn_rewards_take_it_back_to_waiting(seed, swept, trajectory, withdraw):
    seed.group()
    for name in "abc":
        seed.trajectory(name, "g")
    seed.feedback("g", kind="group", rewards={"a": 0.0, "b": 1.0, "c": 1.0}, final=True)
    second = seed.feedback("g", kind="group", rewards={"a": 1.0}, final=True, created_at=at(seed, 1))
    own = seed.feedback("b", 0.5, created_at=at(seed, 1))
    swept()
    assert [trajectory(name).reward for name in "abc"] == [1.0, 0.5, 1.0]
    withdraw(second, own)
    swept()
    assert [trajectory(name).reward for name in "abc"] == [0.0, 1.0, 1.0]
    assert seed.one(schema.groups, "g").state == "scored"
    lone = seed.feedback("a", 0.25, created_at=at(seed, 2))
    swept()
    withdraw("f000000", lone)
    swept()
    assert [trajectory(name).reward for name in "abc"] == [None, None, None]
    group = seed.one(schema.groups, "g")
    assert (group.state, group.reward_mean) == ("closed", None)
    assert trajectory("a").why_not_trained == "no_reward"


@pytest.mark.parametrize("state", ["claimed", "trained"])
def test_what_a_step_has_claimed_stands(seed, swept, trajectory, feedback, withdraw, state):
    seed.group(state=state, step=7)
    seed.trajectory("t", "g", state=state, reward=1.0, reward_source="trajectory")
    values = {"state": "applied", "applied_at": seed.now}
    own = seed.feedback("t", 1.0, trajectory_id="t", **values)
    groups = seed.feedback("g", kind="group", rewards={"t": 1.0}, **values)
    withdraw(own, groups)
    swept()
    for one in (own, groups):
        assert (feedback(one).state, feedback(one).withdrawn_at) == ("applied", None)
        assert feedback(one).reason == "withdrawn after a step had claimed its trajectory"
    assert (trajectory().reward, trajectory().state) == (1.0, state)
    assert swept().feedback == 0


def test_a_groups_rewards_that_came_too_late_for_it_are_revised_and_withdrawn_too(
    seed, swept, trajectory, feedback, withdraw
):
    seed.group(state="trained", step=7)
    seed.trajectory("t", "g", state="excluded", why_not_trained="no_reward", placed_at=seed.now)
    first = seed.feedback("g", kind="group", rewards={"t": 1.0})
    swept()
    assert (trajectory().reward, trajectory().state) == (1.0, "rewarded")
    assert trajectory().group_id != "g"  # alone, compared with the baseline
    seed.feedback("t", source="end")
    revised = seed.feedback("g", kind="group", rewards={"t": 0.5}, created_at=at(seed, 1))
    own = seed.feedback("t", 0.25, created_at=at(seed, 2))
    swept()
    assert [feedback(one).state for one in (first, revised, own)] == ["superseded", "applied", "applied"]
    assert trajectory().reward == 0.25
    withdraw(own)
    swept()
    assert trajectory().reward == 0.5
    withdraw(revised)
    swept()
    assert (feedback(first).state, trajectory().reward) == ("applied", 1.0)
    withdraw(first)
    swept()
    assert (trajectory().reward, trajectory().state) == (None, "ended")


def test_what_a_step_left_is_what_counts_again(seed, swept, trajectory, feedback, withdraw):
    seed.trajectory("t", state="excluded", reward=1.0, reward_source="trajectory", why_not_trained="group_uniform")
    seed.feedback("t", 1.0, trajectory_id="t", state="unused", reason="group_uniform", applied_at=seed.now)
    later = seed.feedback("t", 0.0, created_at=at(seed, 1))
    swept(after_s=2)
    assert trajectory().reward == 0.0
    withdraw(later)
    swept(after_s=3)
    assert (trajectory().reward, trajectory().state) == (1.0, "excluded")


def test_withdrawals_and_new_feedback_at_once_end_as_one_after_the_other(engine, seed, withdraw):
    """Four sweeps at a time: 40 trajectories get three feedbacks each, and lose the last one while they come in."""
    for number in range(40):
        seed.trajectory(f"t{number}")
    failures = []
    done = threading.Event()

    def work():
        try:
            while not done.is_set():
                sweep(engine, SETTINGS, at(seed, 60))
            sweep(engine, SETTINGS, at(seed, 60))
        except Exception as error:
            failures.append(error)

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for number in range(40):
        for reward in range(3):
            seed.feedback(f"t{number}", reward, id=f"f{number}-{reward}", created_at=at(seed, reward))
        withdraw(f"f{number}-2")
    done.set()
    for worker in workers:
        worker.join()
    sweep(engine, SETTINGS, at(seed, 60))
    assert failures == []
    with engine.connect() as connection:
        rewards = {row.reward for row in connection.execute(schema.trajectories.select())}
        states = {(row.id[-1], row.state) for row in connection.execute(schema.feedback.select())}
    assert rewards == {1.0}
    assert states == {("0", "superseded"), ("1", "applied"), ("2", "withdrawn")}
