"""What a sweep costs grows with what is new, not with what is over."""

from datetime import timedelta

import pytest
from sqlalchemy import event

from judge.settlement.sweep import sweep
from migrations import schema
from whetstone.config.settings import GroupSettings

SETTINGS = GroupSettings(target_size=2)


@pytest.fixture
def plans(engine, database_kind):
    """How SQLite looks up each statement that is run, as (statement, step of its plan)."""
    if database_kind == "postgresql":
        pytest.skip("read from SQLite's plans, which need no statistics")
    found = []

    def explain(connection, _cursor, statement, parameters, _context, executemany):
        if statement.startswith(("SELECT", "UPDATE")):
            plain = connection.connection.dbapi_connection.cursor()
            plain.execute(f"EXPLAIN QUERY PLAN {statement}", parameters[0] if executemany else parameters)
            found.extend((statement, row[3]) for row in plain.fetchall())

    event.listen(engine, "before_cursor_execute", explain)
    return found


def test_every_look_up_goes_by_an_index_that_finds_only_what_it_needs(engine, seed, plans):
    seed.group()
    for name in "ab":
        seed.trajectory(name, "g")
    seed.trajectory("idle", last_seen_at=seed.now - timedelta(days=1))
    seed.feedback("a", 1.0)
    seed.feedback("chatcmpl-b-0", 1.0, kind="completion", final=True)
    seed.feedback("g", kind="group", rewards={"a": 0.0, "b": 1.0}, final=True)
    seed.feedback("nobody", 1.0)
    for name in "pqr":
        seed.trajectory(name, prompt_hash="a" * 32)
    seed.group("p.shadow", formed_by="shadow", target_size=1)
    seed.trajectory("p.s0", "p.shadow")
    seed.group("over", state="trained")
    seed.trajectory("late", "over", placed_at=seed.now)
    seed.feedback("late", 1.0)
    plans.clear()
    done = sweep(engine, SETTINGS, seed.now + timedelta(seconds=1))
    sweep(engine, SETTINGS, seed.now + timedelta(seconds=10))
    # `late` is placed again once it is rewarded.
    assert (done.placed, done.feedback, done.idle, done.scored) == (8, 5, 1, 2)
    assert walks(plans) == []
    partial = {step.split()[-1] for _, step in plans if step.startswith("SCAN") and "ix_" in step}
    assert partial <= {"ix_trajectories_unplaced", "ix_feedback_fresh"}


def test_what_is_withdrawn_is_looked_up_by_its_own_index(engine, seed, plans):
    seed.trajectory("a")
    values = {"trajectory_id": "a", "applied_at": seed.now, "withdrawn_at": seed.now}
    for number, state in enumerate(("waiting", "applied", "superseded")):
        seed.feedback("a", 1.0, state=state, due_at=seed.now + timedelta(days=1), **values | {"id": f"f{number}"})
    plans.clear()
    assert sweep(engine, SETTINGS, seed.now + timedelta(seconds=1)).feedback == 3
    assert walks(plans) == []
    assert sum("ix_feedback_withdrawn (withdrawn_at<?)" in step for _, step in plans) == 3  # the look, and both kinds
    assert not any(step.startswith("SCAN feedback") for _, step in plans if "ix_feedback_fresh" not in step)


def walks(plans):
    """What goes through more than it needs."""
    tables = ("trajectories", "completions", "feedback", "groups")
    return [
        (step, statement)
        for statement, step in plans
        if any(f" {table}" in step for table in tables)
        and ("(project=?)" in step or (step.startswith("SCAN") and "ix_" not in step))
    ]


@pytest.fixture
def work(engine, database_kind):
    """Counts SQLite's own steps, a thousand at a time."""
    if database_kind == "postgresql":
        pytest.skip("counted by SQLite")
    counted = []

    def connected(connection, _record, _proxy):
        connection.set_progress_handler(lambda: counted.append(1), 1000)

    event.listen(engine, "checkout", connected)
    return counted


@pytest.mark.parametrize("before", ["trained", "scored"])
def test_placing_costs_the_same_however_often_the_prompt_was_asked(engine, seed, work, before):
    """With 20 and with 20,000 trajectories of one prompt behind it, whether or not a step has taken them."""
    costs = []
    for asked, number in ((0, 10), (10, 10_000)):
        add_groups(engine, seed.now, before, range(asked, number))
        began = seed.now + timedelta(seconds=number)
        name = f"new{number}"
        seed.trajectory(name, prompt_hash="a" * 32, created_at=began, last_seen_at=began)
        work.clear()
        assert sweep(engine, SETTINGS, began + timedelta(seconds=1)).placed == 1
        costs.append(len(work))
        group_id = seed.one(schema.trajectories, name).group_id
        assert seed.one(schema.groups, group_id).created_at == began
    assert costs[1] <= costs[0] + 2


def add_groups(engine, now, state, numbers):
    """Full groups of one prompt, one a second."""
    shared = {"project": "default", "policy": "starter"}
    groups, members = [], []
    for number in numbers:
        began = now + timedelta(seconds=number)
        of_group = {"state": state, "formed_by": "prompt", "prompt_hash": "a" * 32, "size": 2, "rewarded": 2}
        groups.append(shared | of_group | {"id": f"g{number}", "created_at": began, "closed_at": began})
        for choice in range(2):
            of_member = {
                "id": f"t{number}.{choice}", "group_id": f"g{number}", "split": "train", "no_train": False,
                "state": "rewarded", "reward": 1.0, "completions": 1, "sampled_tokens": 1, "prompt_hash": "a" * 32,
            }  # fmt: skip
            times = dict.fromkeys(("created_at", "last_seen_at", "ended_at", "placed_at"), began)
            members.append(shared | of_member | times)
    with engine.begin() as connection:
        connection.execute(schema.groups.insert(), groups)
        connection.execute(schema.trajectories.insert(), members)


def test_a_sweep_with_nothing_due_is_one_read(engine, seed):
    seed.group(state="scored", size=2)
    for name in "ab":
        seed.trajectory(name, "g", state="rewarded", reward=1.0, placed_at=seed.now)
    statements = []
    event.listen(engine, "before_cursor_execute", lambda *args: statements.append(args[2]))
    sweep(engine, SETTINGS, seed.now + timedelta(seconds=10))
    assert len([one for one in statements if one.startswith("SELECT")]) == len(statements) == 1
