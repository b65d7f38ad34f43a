"""A new PostgreSQL under load, which has not looked at its tables yet: a call costs no more than those before it."""

from typing import Any

import pytest
from sqlalchemy import Connection, Engine, event, text

from migrations import schema
from migrations.statistics import ENOUGH, Statistics
from proxy.store import Store
from tests.proxy.conftest import make_call

pytestmark = [pytest.mark.stack, pytest.mark.postgresql]

READ = text("SELECT idx_tup_fetch + seq_tup_read FROM pg_stat_xact_user_tables WHERE relname = 'trajectories'")
BEGIN_TO_COUNT = text("SELECT pg_stat_force_next_flush()")
"""At this transaction's end."""
KNOWN = text("SELECT reltuples FROM pg_class WHERE relname = 'trajectories'")
BATCH = 100


@pytest.fixture
def database_kind() -> str:
    """SQLite plans by rules."""
    return "postgresql"


@pytest.fixture
def analysed(engine: Engine) -> list[str]:
    """What is analysed."""
    seen: list[str] = []

    def note(_connection: Connection, _cursor: Any, statement: str, *_: Any) -> None:
        if statement.startswith("ANALYZE"):
            seen.append(statement.removeprefix("ANALYZE "))

    event.listen(engine, "before_cursor_execute", note)
    return seen


def test_a_call_reads_no_other_trajectories(engine: Engine, seed: Any, analysed: list[str]) -> None:
    store, read = Store(engine), []
    with engine.connect() as connection:
        for batch in range(3 * ENOUGH // BATCH):
            calls = [make_call(f"c{batch}-{number}", f"t{batch}-{number}") for number in range(BATCH)]
            with connection.begin():
                store.calls.write(connection, calls)
                read.append(connection.execute(READ).scalar_one())
                connection.execute(BEGIN_TO_COUNT)
    assert analysed == ["trajectories", "completions"]
    # Its own, for the foreign key.
    assert max(read[-5:]) <= 2 * BATCH


def test_they_are_analysed_once_and_not_where_there_is_little_or_all_is_known(
    engine: Engine, seed: Any, analysed: list[str]
) -> None:
    for number in range(2 * ENOUGH):
        seed.trajectory(f"t{number}")
    for expected in (["trajectories"], []):
        of_one_process = Statistics([schema.trajectories])
        analysed.clear()
        for rows, behind in ((ENOUGH - 1, []), (1, []), (1, expected), (ENOUGH, expected), (ENOUGH, expected)):
            with engine.begin() as connection:
                of_one_process.begin(connection, rows)
            assert analysed == behind
        with engine.connect() as connection:
            assert connection.execute(KNOWN).scalar_one() >= ENOUGH
