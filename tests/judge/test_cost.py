"""What a sweep costs grows with what is new, not with what is over."""

from datetime import timedelta

import pytest
from sqlalchemy import event

from judge.sweep import sweep
from whetstone.settings import GroupSettings

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
    plans.clear()
    done = sweep(engine, SETTINGS, seed.now + timedelta(seconds=1))
    sweep(engine, SETTINGS, seed.now + timedelta(seconds=10))
    assert (done.placed, done.feedback, done.idle, done.scored) == (3, 4, 1, 1)
    tables = ("trajectories", "completions", "feedback", "groups")
    walks = [
        (step, statement)
        for statement, step in plans
        if any(f" {table}" in step for table in tables)
        and ("(project=?)" in step or (step.startswith("SCAN") and "ix_" not in step))
    ]
    assert walks == []
    partial = {step.split()[-1] for _, step in plans if step.startswith("SCAN") and "ix_" in step}
    assert partial <= {"ix_trajectories_unplaced", "ix_feedback_fresh"}


def test_a_sweep_with_nothing_due_is_one_read(engine, seed):
    seed.group(state="scored", size=2)
    for name in "ab":
        seed.trajectory(name, "g", state="rewarded", reward=1.0, placed_at=seed.now)
    statements = []
    event.listen(engine, "before_cursor_execute", lambda *args: statements.append(args[2]))
    sweep(engine, SETTINGS, seed.now + timedelta(seconds=10))
    assert len([one for one in statements if one.startswith("SELECT")]) == len(statements) == 1
