"""The launcher starts a machine when a worker would take a step, and only then: both are asked of the same tables."""

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest
from sqlalchemy import Engine, update

from migrations import schema
from tests.unit.trainer.store.test_claims import RULES, Tables
from trainer.launcher.due import why_due


@pytest.fixture
def tables(engine: Engine, seed: Any) -> Tables:
    return Tables(engine, seed)


def due(tables: Tables) -> str | None:
    with tables.engine.connect() as connection:
        return why_due(connection, "default", "starter", RULES, datetime.now(UTC))


def enough(tables: Tables) -> None:
    for number in range(RULES.groups_per_step):
        tables.group(f"g{number}")


def few(tables: Tables) -> None:
    tables.group("g")


def asked(tables: Tables) -> None:
    tables.group("g")
    tables.ask()


def recording(tables: Tables) -> None:
    enough(tables)
    tables.policy(state="recording")


def asked_while_paused(tables: Tables) -> None:
    asked(tables)
    tables.policy(state="paused")


def promoted_just_now(tables: Tables) -> None:
    for number in range(RULES.groups_per_step):
        tables.group(f"g{number}", version=0)
    tables.seed.insert(
        schema.policy_versions, project="default", id="starter@v1", policy="starter", version=1, parent=0, state="live",
        served=True, created_at=datetime.now(UTC), promoted_at=datetime.now(UTC),
    )  # fmt: skip
    tables.policy(live_version=1, next_version=2)


def under_way(tables: Tables) -> None:
    enough(tables)
    assert tables.claim() is not None


def left_by_its_worker(tables: Tables) -> None:
    under_way(tables)
    tables.lease_ends()


def in_tests(tables: Tables) -> None:
    left_by_its_worker(tables)
    with tables.engine.begin() as connection:
        connection.execute(update(schema.steps).values(state="waiting_gate"))


@pytest.mark.parametrize(
    ("arrange", "says"),
    [
        (enough, "starter: a step of 12 groups is due"),
        (asked, "starter: a step was requested"),
        (left_by_its_worker, "starter: the worker of step 1 has ended"),
        (few, None),
        (recording, None),
        (asked_while_paused, None),
        (promoted_just_now, None),
        (under_way, None),
        (in_tests, None),
    ],
)
def test_what_is_due_is_what_a_worker_would_claim(
    tables: Tables, arrange: Callable[[Tables], None], says: str | None
) -> None:
    arrange(tables)
    assert due(tables) == says
    assert (tables.claim() is not None) is (says is not None)


def test_to_ask_changes_nothing(tables: Tables) -> None:
    enough(tables)
    assert due(tables) == due(tables)
    assert tables.steps() == []


def test_a_policy_that_does_not_exist_has_nothing_due(tables: Tables) -> None:
    with tables.engine.connect() as connection:
        assert why_due(connection, "default", "other", RULES, datetime.now(UTC)) is None
