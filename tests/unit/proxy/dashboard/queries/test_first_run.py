"""The SQL until the first step, on both databases: steps, the newest call, groups of several attempts."""

import re
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, event

from migrations import schema
from proxy.dashboard.queries import first_run
from tests.conftest import NOW, Seed


def test_a_step_of_any_policy_of_the_project_is_a_step(engine: Engine, seed: Seed) -> None:
    seed.project("acme")
    seed.insert(
        schema.steps, project="acme", id="starter#1", policy="starter", number=1, version_in=0, groups=1,
        trajectories=2, config={}, attempt=1, state="claimed", created_at=NOW,
    )  # fmt: skip
    with engine.connect() as connection:
        assert first_run.has_step(connection, "acme") and not first_run.has_step(connection, "default")


def test_the_newest_call_is_the_newest_trajectory_of_the_project(engine: Engine, seed: Seed) -> None:
    with engine.connect() as connection:
        assert first_run.newest_call(connection, "default") is None
    seed.project("acme")
    seed.trajectory("first")
    seed.trajectory("second", created_at=NOW + timedelta(seconds=1))
    seed.trajectory("theirs", project="acme", created_at=NOW + timedelta(seconds=2))
    with engine.connect() as connection:
        newest = first_run.newest_call(connection, "default")
    assert newest is not None and (newest["id"], newest["policy"]) == ("second", "starter")


def test_groups_of_several_are_counted_open_ones_by_their_members(engine: Engine, seed: Seed) -> None:
    seed.group("open")
    seed.group("lonely")
    seed.trajectory("a", "open", turns=0)
    seed.trajectory("b", "open", turns=0)
    seed.trajectory("c", "lonely", turns=0)
    seed.group("scored", state="scored", size=2, closed_at=NOW)
    seed.group("single", state="scored", size=1, closed_at=NOW, formed_by="single")
    seed.group("uniform", state="discarded", size=4, closed_at=NOW, reason="group_uniform")
    with engine.connect() as connection:
        assert first_run.groups_of_several(connection, "default", "starter") == 3
        assert first_run.groups_of_several(connection, "default", "other") == 0


def test_only_the_newest_groups_are_looked_at(engine: Engine, seed: Seed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_run, "LOOKED_AT", 2)
    for number in range(4):
        at = NOW + timedelta(seconds=number)
        seed.group(f"g{number}", state="scored", size=2 if number < 2 else 1, closed_at=at)
    with engine.connect() as connection:
        assert first_run.groups_of_several(connection, "default", "starter") == 0


def test_every_query_goes_by_an_index_in_order(engine: Engine, seed: Seed) -> None:
    """So that a log of a million calls without a step is read as fast as an empty one."""
    if engine.dialect.name != "sqlite":
        pytest.skip("PostgreSQL plans by statistics")
    seed.group("open")
    with engine.connect() as connection:
        statements: list[tuple[str, Any]] = []
        event.listen(connection, "before_cursor_execute", lambda *of: statements.append((of[2], of[3])))
        first_run.has_step(connection, "default")
        first_run.newest_call(connection, "default")
        first_run.groups_of_several(connection, "default", "starter")
        queries, statements = statements, []
        plans = [
            row.detail
            for statement, values in queries
            for row in connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", values)
        ]
    assert len(queries) == 7
    tables = [plan for plan in plans if re.match(r"(SCAN|SEARCH) (steps|trajectories|groups)", plan)]
    assert len(tables) == 7 and all("INDEX" in plan and plan.startswith("SEARCH") for plan in tables), plans
    assert not [plan for plan in plans if "ORDER BY" in plan], plans
