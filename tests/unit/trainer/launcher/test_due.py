"""The launcher starts a machine when a worker would take a step, and only then: both are asked of the same tables."""

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest
from sqlalchemy import Engine, update

from migrations import schema
from tests.unit.trainer.store.test_claims import RULES, Tables


@pytest.fixture
def tables(engine: Engine, seed: Any) -> Tables:
    return Tables(engine, seed)


def due(tables: Tables, **changed: Any) -> str | None:
    return tables.store.why_due("starter", RULES.model_copy(update=changed))


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


def asked_while_recording(tables: Tables) -> None:
    recording(tables)
    tables.ask()


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
        (asked_while_recording, "starter: a step was requested"),
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


def test_to_look_claims_nothing_and_discards_nothing_that_the_step_would(tables: Tables) -> None:
    enough(tables)
    tables.group("uniform", rewards=(1.0, 1.0))
    assert due(tables) == due(tables) == "starter: a step of 12 groups is due"
    assert tables.steps() == []
    assert tables.seed.one(schema.groups, "uniform").state == "scored"
    assert tables.claim() is not None
    assert tables.steps()[0].discarded == {"group_uniform": 1}


def test_while_no_step_is_due_groups_are_discarded_as_by_a_worker(tables: Tables) -> None:
    tables.group("g")
    tables.group("uniform", rewards=(1.0, 1.0))
    assert due(tables, fresh_waits_s=0) is None
    assert [tables.seed.one(schema.groups, name).state for name in ("g", "uniform")] == ["scored", "discarded"]


def test_a_schedule_that_has_not_fired_since_has_nothing_due(tables: Tables) -> None:
    enough(tables)
    assert due(tables, schedule="0 3 1 1 *") is None


def test_a_policy_that_does_not_exist_has_nothing_due(tables: Tables) -> None:
    assert tables.store.why_due("other", RULES) is None
