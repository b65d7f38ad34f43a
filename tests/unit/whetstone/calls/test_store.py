"""Calls as they come, in SQL: each when it ends, by every filter, of one project, and without reading the table."""

import itertools
from datetime import datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, text

from tests.conftest import NOW, Seed
from whetstone.calls import store
from whetstone.calls.store import LONGEST, Filter, NewCalls, ended_since, newest

ALL = Filter("default")


def ids(rows: list[dict[str, Any]]) -> list[str]:
    return [row["completion_id"] for row in rows]


def since(engine: Engine, when: datetime, wanted: Filter = ALL, limit: int = 50) -> NewCalls:
    with engine.connect() as connection:
        return ended_since(connection, wanted, when, NOW + timedelta(days=1), limit)


@pytest.fixture
def calls(seed: Seed) -> Seed:
    """Calls that arrived one a second, each of which took a second more than the one before."""
    seed.trajectory("t", turns=0, task="x")
    for turn in range(5):
        seed.completion("t", turn, total_ms=1000.0 * turn, created_at=NOW + timedelta(seconds=turn))
    return seed


def test_a_call_comes_when_it_ends_in_the_order_of_arrival(calls: Seed) -> None:
    assert ids(since(calls.engine, NOW).rows) == [f"t-{turn}" for turn in range(5)]
    assert ids(since(calls.engine, NOW + timedelta(seconds=3)).rows) == ["t-2", "t-3", "t-4"]
    assert since(calls.engine, NOW + timedelta(seconds=8.001)) == NewCalls([], 0)


def test_looks_that_follow_one_another_count_each_call_once(calls: Seed) -> None:
    moments = [NOW + timedelta(seconds=place * 1.5) for place in range(8)]
    counts, listed = [], set()
    with calls.engine.connect() as connection:
        for before, after in itertools.pairwise(moments):
            new = ended_since(connection, ALL, before, after, 50)
            counts.append(new.ended)
            listed |= set(ids(new.rows))
    assert (sum(counts), max(counts), len(listed)) == (5, 1, 5)


def test_a_long_call_that_began_before_comes_when_it_ends(calls: Seed) -> None:
    for turn, took in ((5, LONGEST - timedelta(seconds=1)), (6, LONGEST + timedelta(seconds=2))):
        end = NOW + timedelta(minutes=1)
        calls.completion("t", turn, created_at=end - took, total_ms=1000 * took.total_seconds())
    assert ids(since(calls.engine, NOW + timedelta(seconds=59)).rows) == ["t-5"]


def test_of_too_many_the_last_to_end_come_and_all_are_counted(calls: Seed) -> None:
    new = since(calls.engine, NOW, limit=2)
    assert (ids(new.rows), new.ended) == (["t-3", "t-4"], 5)


def test_a_call_whose_time_is_unknown_ends_when_it_began(calls: Seed) -> None:
    calls.completion("t", 5, created_at=NOW + timedelta(seconds=9), total_ms=None, status="aborted")
    assert ids(since(calls.engine, NOW + timedelta(seconds=8.5)).rows) == ["t-5"]


@pytest.mark.parametrize(
    ("wanted", "matching"),
    [
        ({"policy": "starter"}, ["t-0", "other-0"]),
        ({"policy": "nobody"}, []),
        ({"status": "error"}, ["other-0"]),
        ({"task": "x"}, ["t-0"]),
        ({"task": "x", "status": "error"}, []),
        ({"version": 3}, ["other-0"]),
        ({"version": 0}, ["t-0"]),
        ({"key_id": "k1"}, ["other-0"]),
        ({"least_ms": 500.0}, ["other-0"]),
        ({"least_ms": 501.0}, []),
    ],
    ids=str,
)
def test_filters_hold_for_the_newest_calls_and_for_new_calls(
    seed: Seed, wanted: dict[str, Any], matching: list[str]
) -> None:
    seed.trajectory("t", task="x")
    seed.trajectory("other", turns=0)
    row = {"policy_version": 3, "status": "error", "key_id": "k1", "total_ms": 500.0}
    seed.completion("other", 0, created_at=NOW + timedelta(seconds=1), **row)
    chosen = Filter("default", **wanted)
    assert ids(since(seed.engine, NOW, chosen).rows) == matching
    with seed.engine.connect() as connection:
        assert ids(newest(connection, chosen, 10)) == matching


def test_another_projects_calls_do_not_come(seed: Seed) -> None:
    seed.project("elsewhere")
    seed.trajectory("t", project="elsewhere")
    seed.trajectory("t")
    assert len(since(seed.engine, NOW - LONGEST).rows) == 1
    assert ids(since(seed.engine, NOW, Filter("elsewhere")).rows) == ["t-0"]


def test_only_the_newest_calls_are_looked_at(calls: Seed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "MOST_IN_FLIGHT", 2)
    monkeypatch.setattr(store, "MOST_WALKED", 2)
    assert ids(since(calls.engine, NOW).rows) == ["t-3", "t-4"]
    with calls.engine.connect() as connection:
        assert ids(newest(connection, Filter("default", "starter"), 10)) == ["t-3", "t-4"]


def plan(connection: Connection, run: Any) -> str:
    """SQLite's plan of the statements that a function runs."""
    statements: list[tuple[str, Any]] = []
    driver: Any = connection.connection.dbapi_connection
    driver.set_trace_callback(lambda statement: statements.append((statement, None)))
    run()
    driver.set_trace_callback(None)
    rows = [row for one, _ in statements for row in driver.execute(f"EXPLAIN QUERY PLAN {one}").fetchall()]
    return "\n".join(row[3] for row in rows)


@pytest.mark.parametrize("wanted", [ALL, Filter("default", "starter", "error", "x", 1, "k", 5.0)], ids=["all", "one"])
def test_rows_are_read_by_indexes_alone(engine: Engine, seed: Seed, wanted: Filter) -> None:
    if engine.dialect.name != "sqlite":
        pytest.skip("PostgreSQL plans by statistics")
    seed.trajectory("t", task="x")
    with engine.connect() as connection:
        for run in (lambda: ended_since(connection, wanted, NOW, NOW, 50), lambda: newest(connection, wanted, 50)):
            of = plan(connection, run)
            assert "ix_completions_project_created_at (project=?" in of, of
            assert "SCAN completions" not in of and "SCAN trajectories" not in of, of


def test_a_look_among_many_calls_lists_the_newest_and_counts_the_others(engine: Engine, seed: Seed) -> None:
    """20,000 calls at 200 a second: a look every two seconds is of the last 400."""
    seed.trajectory("t")
    columns = "project, upstream_id, call_id, choice, trajectory_id, policy, policy_version, endpoint, streamed, status"
    moment = {
        "sqlite": "strftime('%Y-%m-%d %H:%M:%f', created_at, '+' || (n * 0.005) || ' seconds') || '000'",
        "postgresql": "created_at + n * interval '5 milliseconds'",
    }[engine.dialect.name]
    with engine.begin() as connection:
        connection.execute(
            text(f"""
                WITH RECURSIVE numbers(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM numbers WHERE n < 20000)
                INSERT INTO completions (id, turn, created_at, new_messages, total_ms, threaded_by, {columns})
                SELECT 'c' || n, n, {moment}, new_messages, total_ms, threaded_by, {columns}
                FROM completions, numbers WHERE id = 't-0'
            """)
        )
    for look in range(5):
        answer = since(engine, NOW + timedelta(seconds=90 + 2 * look))
        assert len(answer.rows) == 50 and answer.ended == 2001 - 400 * look
