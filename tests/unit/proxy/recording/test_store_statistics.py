"""A new PostgreSQL under load, which has not looked at its tables yet: a call costs no more than those before it."""

from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, event, text

from migrations import schema
from proxy.recording.store import Store
from tests.unit.proxy.conftest import make_call
from whetstone.database.postgres_stats import ENOUGH, Statistics

pytestmark = [pytest.mark.stack, pytest.mark.postgresql]

READ = text("SELECT idx_tup_fetch + seq_tup_read FROM pg_stat_xact_user_tables WHERE relname = 'trajectories'")
BEGIN_TO_COUNT = text("SELECT pg_stat_force_next_flush()")
"""At this transaction's end."""
KNOWN = text("SELECT reltuples FROM pg_class WHERE relname = 'trajectories'")
TABLES = ("completions", "trajectories")
BATCH = 100


@pytest.fixture
def database_kind() -> str:
    """SQLite plans by rules."""
    return "postgresql"


@pytest.fixture(autouse=True)
def no_autovacuum(engine: Engine) -> Iterator[None]:
    """It looks once a minute, and might look now."""

    def tell(change: str) -> None:
        with engine.begin() as connection:
            for table in TABLES:
                connection.exec_driver_sql(f"ALTER TABLE {table} {change}")

    tell("SET (autovacuum_enabled = off)")
    yield
    tell("RESET (autovacuum_enabled)")


@pytest.fixture
def analysed(engine: Engine) -> list[str]:
    """What is analysed, statement by statement."""
    seen: list[str] = []

    def note(_connection: Connection, _cursor: Any, statement: str, *_: Any) -> None:
        if statement.startswith("ANALYZE"):
            seen.append(statement.removeprefix("ANALYZE (SKIP_LOCKED) "))

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
    assert analysed == [", ".join(TABLES)]
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


def test_who_analyses_waits_for_nobody_who_does_so_already(engine: Engine, seed: Any, analysed: list[str]) -> None:
    writer = Statistics([schema.trajectories, schema.completions])
    for number in range(ENOUGH):
        seed.trajectory(f"t{number}")
    with engine.begin() as other, engine.begin() as connection:
        other.exec_driver_sql("LOCK TABLE completions IN SHARE UPDATE EXCLUSIVE MODE")  # as it does
        connection.exec_driver_sql("SET LOCAL lock_timeout = '10s'")
        writer.begin(connection, ENOUGH)
        writer.begin(connection, 1)
        assert analysed == [", ".join(TABLES)]
        assert connection.execute(KNOWN).scalar_one() >= ENOUGH
