"""Feedback in any order, split into any batches, swept by any number of workers: the end is the same."""

import threading
from dataclasses import replace
from datetime import UTC, datetime, timedelta

from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import select

from judge.facts import Feedback, Group, Known, Rules, Trajectory
from judge.settle import settle
from judge.sweep import sweep
from migrations import schema
from whetstone.settings import GroupSettings

RULES = Rules(8, 2, timedelta(days=1), timedelta(minutes=15))
NOW = datetime(2026, 1, 1, tzinfo=UTC)
GROUP = Group("g", "open", None, 0, 0, None, None, None, NOW, None, None)
MEMBERS = ("a", "b")
COMPLETIONS = {(f"{name}-{turn}", 0): (f"{name}-{turn}", name) for name in MEMBERS for turn in range(2)}


def member(name):
    return Trajectory(name, "g", "train", False, "open", None, None, 2, None, None, NOW, NOW, None)


rewards = st.sampled_from([-1.0, 0.0, 0.5, 1.0])
targets = st.one_of(
    st.tuples(st.just("trajectory"), st.sampled_from([*MEMBERS, "nobody"]), rewards, st.none()),
    st.tuples(st.just("completion"), st.sampled_from([target for target, _ in COMPLETIONS]), rewards, st.none()),
    st.tuples(
        st.just("group"), st.just("g"), st.none(), st.dictionaries(st.sampled_from(MEMBERS), rewards, min_size=1)
    ),
)


@st.composite
def histories(draw):
    """Feedback in the order it was given, and the order and batches in which workers come to see it."""
    given_in_order = [
        Feedback(
            f"f{number:02d}", NOW - timedelta(seconds=100 - draw(st.integers(0, 3)) - number), kind, target, 0, reward,
            several, False, "waiting", None, None, None,
        )
        for number, (kind, target, reward, several) in enumerate(draw(st.lists(targets, max_size=10)))
    ]  # fmt: skip
    seen = draw(st.permutations(given_in_order))
    cuts = sorted(draw(st.sets(st.integers(0, len(seen)), max_size=3)))
    return given_in_order, [seen[start:end] for start, end in zip([0, *cuts], [*cuts, len(seen)], strict=True)]


def sequentially(given_in_order):
    """The plain model: one feedback after the other, each overwriting what it speaks of."""
    whole, parts = {}, {name: {} for name in MEMBERS}
    for one in sorted(given_in_order, key=lambda feedback: (feedback.created_at, feedback.id)):
        if one.target_kind == "completion":
            parts[one.target_id[0]][one.target_id] = one.reward
        else:
            whole |= one.rewards or ({one.target_id: one.reward} if one.target_id in MEMBERS else {})
    means = {name: sum(each.values()) / len(each) for name, each in parts.items() if each}
    return {name: (means | whole).get(name) for name in MEMBERS}


@given(histories())
@settings(max_examples=300, deadline=None)
def test_rewards_are_those_of_a_sequential_model_whatever_the_order_and_the_batches(history):
    given_in_order, batches = history
    trajectories = {name: member(name) for name in MEMBERS}
    rows = {one.id: one for one in given_in_order}
    for batch in batches:
        standing = [one for one in rows.values() if one.state == "applied"]
        known = Known(trajectories, {"g": GROUP}, COMPLETIONS, standing)
        settled = settle([rows[one.id] for one in batch], known, NOW, RULES)
        for became in settled.feedback:
            rows[became.id] = replace(
                rows[became.id], state=became.state, trajectory_id=became.trajectory_id,
                completion_id=became.completion_id,
            )  # fmt: skip
        trajectories |= {one.id: one for one in settled.trajectories}
    assert {name: one.reward for name, one in trajectories.items()} == sequentially(given_in_order)
    # What became of each depends on the set alone: all at once gives the same states.
    fresh = {name: member(name) for name in MEMBERS}
    at_once = settle(given_in_order, Known(fresh, {"g": GROUP}, COMPLETIONS, []), NOW, RULES)
    assert {became.id: became.state for became in at_once.feedback} == {one.id: one.state for one in rows.values()}
    assert all(rows[one.id].state == "waiting" for one in given_in_order if one.target_id == "nobody")


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
