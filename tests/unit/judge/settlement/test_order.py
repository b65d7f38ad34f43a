"""Feedback in any order, split into any batches, swept by any number of workers: the end is the same."""

import threading
from dataclasses import replace
from datetime import UTC, datetime, timedelta

from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import select

from judge.decisions.feedback import apply_feedback
from judge.decisions.model import Feedback, FeedbackContext, Group, Rules, Trajectory
from judge.settlement.sweep import sweep
from migrations import schema
from whetstone.config.settings import GroupSettings

RULES = Rules(8, 2, timedelta(days=1), timedelta(minutes=15))
NOW = datetime(2026, 1, 1, tzinfo=UTC)
GROUP = Group("g", "open", None, 0, 0, None, None, None, NOW, None, None)
MEMBERS = ("a", "b")
COMPLETIONS = {(f"{name}-{turn}", 0): (f"{name}-{turn}", name) for name in MEMBERS for turn in range(2)}


def member(name):
    return Trajectory(name, "g", "train", False, "ended", None, None, 2, None, None, NOW, NOW, NOW)


rewards = st.sampled_from([-1.0, 0.0, 0.5, 1.0])
targets = st.one_of(
    st.tuples(st.just("trajectory"), st.sampled_from([*MEMBERS, "nobody"]), rewards | st.none(), st.none()),
    st.tuples(st.just("completion"), st.sampled_from([target for target, _ in COMPLETIONS]), rewards, st.none()),
    st.tuples(
        st.just("group"), st.just("g"), st.none(), st.dictionaries(st.sampled_from(MEMBERS), rewards, min_size=1)
    ),
)


@st.composite
def histories(draw):
    """Feedback in the order it was given; what is withdrawn; the batches in which workers come to see either."""
    given_in_order = [
        Feedback(
            id=f"f{number:02d}", created_at=NOW - timedelta(seconds=100 - draw(st.integers(0, 3)) - number),
            target_kind=kind, target_id=target, choice=0, reward=reward, rewards=several, parts=None,
            demonstrates=draw(st.booleans()), source="reward", final=False, state="waiting", reason=None,
            trajectory_id=None, completion_id=None, applied_at=None, withdrawn_at=None,
        )
        for number, (kind, target, reward, several) in enumerate(draw(st.lists(targets, max_size=10)))
    ]  # fmt: skip
    ids = [one.id for one in given_in_order]
    withdrawn = draw(st.sets(st.sampled_from(ids))) if ids else set()
    seen = draw(st.permutations([*((one, "settle") for one in ids), *((one, "withdraw") for one in withdrawn)]))
    cuts = sorted(draw(st.sets(st.integers(0, len(seen)), max_size=4)))
    return given_in_order, withdrawn, [seen[a:b] for a, b in zip([0, *cuts], [*cuts, len(seen)], strict=True)]


def sequentially(given_in_order, withdrawn):
    """The plain model: one feedback after the other, each overwriting what it speaks of; withdrawn ones never were."""
    whole, parts = {}, {name: {} for name in MEMBERS}
    for one in sorted(given_in_order, key=lambda feedback: (feedback.created_at, feedback.id)):
        if one.id in withdrawn:
            continue
        if one.target_kind == "completion":
            parts[one.target_id[0]][one.target_id] = one.reward
        elif one.target_id in MEMBERS and one.reward is not None:
            whole[one.target_id] = one.reward
        else:
            whole |= one.rewards or {}
    means = {name: sum(each.values()) / len(each) for name, each in parts.items() if each}
    return {name: (means | whole).get(name) for name in MEMBERS}


@given(histories())
@settings(max_examples=500, deadline=None)
def test_rewards_are_those_of_a_sequential_model_whatever_the_order_and_the_batches(history):
    given_in_order, withdrawn, batches = history
    trajectories = {name: member(name) for name in MEMBERS}
    rows = {one.id: one for one in given_in_order}

    def look(batch):
        standing = [one for one in rows.values() if one.state in ("applied", "superseded")]
        settled = apply_feedback(batch, FeedbackContext(trajectories, {"g": GROUP}, COMPLETIONS, standing), NOW, RULES)
        for became in settled.feedback:
            fields = ("state", "reason", "reward", "trajectory_id", "completion_id", "applied_at")
            rows[became.id] = replace(rows[became.id], **{name: getattr(became, name) for name in fields})
        trajectories.update({one.id: one for one in settled.trajectories})

    for batch in batches:
        for feedback_id in (one for one, what in batch if what == "withdraw"):
            rows[feedback_id] = replace(rows[feedback_id], withdrawn_at=NOW)
        touched = dict.fromkeys(one for one, _ in batch)
        look([rows[one] for one in touched if rows[one].state == "waiting"])
        look([rows[one] for one in touched if rows[one].state in ("applied", "superseded") and rows[one].withdrawn_at])
    assert {name: one.reward for name, one in trajectories.items()} == sequentially(given_in_order, withdrawn)
    assert all((one.state == "rewarded") == (one.reward is not None) for one in trajectories.values())
    # What became of each depends on the set alone: all at once gives the same states.
    fresh = {name: member(name) for name in MEMBERS}
    at_once = [one if one.id not in withdrawn else replace(one, withdrawn_at=NOW) for one in given_in_order]
    settled = apply_feedback(at_once, FeedbackContext(fresh, {"g": GROUP}, COMPLETIONS, []), NOW, RULES)
    assert {became.id: became.state for became in settled.feedback} == {one.id: one.state for one in rows.values()}
    assert {one.id for one in rows.values() if one.state == "withdrawn"} == withdrawn


def test_two_workers_at_once_do_everything_once(engine, seed):
    """400 feedbacks, revised, on 40 groups: four sweeps at a time, while it still comes in."""
    rules = GroupSettings(target_size=4)
    with engine.begin() as connection:
        for group in range(40):
            connection.execute(schema.groups.insert().values(**group_row(group, seed.now)))
            for number in range(4):
                connection.execute(schema.trajectories.insert().values(**member_row(group, number, seed.now)))
    failures = []
    given_all = threading.Event()

    def work():
        try:
            while not given_all.is_set():
                sweep(engine, rules, seed.now + timedelta(seconds=60))
            sweep(engine, rules, seed.now + timedelta(seconds=60))
        except Exception as error:
            failures.append(error)

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for revision in range(2):
        for group in range(40):
            with engine.begin() as connection:
                rows = [feedback_row(group, number, revision, seed.now) for number in range(4)]
                connection.execute(schema.feedback.insert(), rows)
    given_all.set()
    for worker in workers:
        worker.join()
    sweep(engine, rules, seed.now + timedelta(seconds=60))
    assert failures == []
    with engine.connect() as connection:
        states = connection.execute(select(schema.feedback.c.state, schema.feedback.c.id)).all()
        groups = connection.execute(select(schema.groups)).all()
        rewards = dict(connection.execute(select(schema.trajectories.c.id, schema.trajectories.c.reward)).all())
    assert {(feedback_id[-1], state) for state, feedback_id in states} == {("0", "superseded"), ("1", "applied")}
    assert {(group.state, group.size, group.rewarded, group.reward_mean) for group in groups} == {("scored", 4, 4, 1.5)}
    assert rewards == {f"t{group}-{number}": float(number) for group in range(40) for number in range(4)}


def group_row(group, now):
    return {
        "project": "default", "id": f"g{group}", "policy": "starter", "formed_by": "header", "state": "open",
        "size": 0, "rewarded": 0, "created_at": now,
    }  # fmt: skip


def member_row(group, number, now):
    return {
        "project": "default", "id": f"t{group}-{number}", "group_id": f"g{group}", "policy": "starter",
        "split": "train", "no_train": False, "state": "open", "completions": 1, "sampled_tokens": 1,
        "created_at": now, "last_seen_at": now,
    }  # fmt: skip


def feedback_row(group, number, revision, now):
    return {
        "project": "default", "id": f"f{group}-{number}-{revision}", "target_kind": "trajectory",
        "target_id": f"t{group}-{number}", "choice": 0, "reward": number if revision else 9.0, "source": "reward",
        "final": True, "state": "waiting", "created_at": now + timedelta(seconds=revision),
    }  # fmt: skip
