"""Several writers of one SQLite file: who waits for another asks evenly, and not for ever."""

import sqlite3
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError, OperationalError, ProgrammingError

from whetstone.database import engine as database
from whetstone.database.engine import ASK_AGAIN_S, BUSY_TIMEOUT_MS, Transactions, connect, run_sqlite


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    return connect(f"sqlite:///{tmp_path / 'busy.db'}")


def timeout_ms(connection: Connection) -> Any:
    return connection.exec_driver_sql("PRAGMA busy_timeout").scalar()


def test_a_file_that_another_writes_to_for_too_long_is_busy_as_sqlalchemy_says(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "BUSY_TIMEOUT_MS", 20)
    with engine.begin(), pytest.raises(OperationalError, match="database is locked"), engine.begin():
        pass


def test_who_waits_asks_evenly_until_the_other_has_ended(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    holds, enough = threading.Event(), threading.Event()
    real_sleep = time.sleep

    def sleep(seconds: float) -> None:
        if threading.current_thread() is threading.main_thread():
            slept.append(seconds)
        if len(slept) == 50:
            enough.set()
        real_sleep(seconds)

    def hold() -> None:
        with engine.begin():
            holds.set()
            assert enough.wait(30)

    holder = threading.Thread(target=hold)
    holder.start()
    assert holds.wait(30)
    monkeypatch.setattr(time, "sleep", sleep)
    with engine.begin() as connection:
        holder.join()
        assert connection.exec_driver_sql("SELECT 1").scalar() == 1
    assert len(slept) >= 50 and set(slept) == {ASK_AGAIN_S}


def test_whatever_else_waits_waits_as_before(engine: Engine) -> None:
    with engine.begin() as connection:
        assert timeout_ms(connection) == BUSY_TIMEOUT_MS
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        assert timeout_ms(connection) == BUSY_TIMEOUT_MS


def test_who_has_given_up_waits_as_before(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "BUSY_TIMEOUT_MS", 7)
    with engine.begin(), engine.connect() as connection:
        with pytest.raises(OperationalError, match="database is locked"):
            connection.begin()
        driver: Any = connection.connection.dbapi_connection
        assert driver.execute("PRAGMA busy_timeout").fetchone() == (7,)


def test_another_error_is_not_asked_about_again(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("it waits"))
    with engine.connect() as connection:
        driver: Any = connection.connection.dbapi_connection
        driver.execute("BEGIN")
        with pytest.raises(DBAPIError, match="within a transaction") as caught:
            connection.begin()
        assert caught.value.orig.sqlite_errorcode == sqlite3.SQLITE_ERROR  # type: ignore[union-attr]
        run_sqlite(connection, "ROLLBACK")


def test_one_connection_begins_again_and_again_whoever_else_writes(engine: Engine) -> None:
    own, other = Transactions(engine), Transactions(connect(engine.url))
    with own.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE few (number INTEGER)")

    def write(to: Transactions) -> None:
        for _ in range(200):
            with to.begin() as connection:
                connection.exec_driver_sql("INSERT INTO few SELECT count(*) FROM few")

    with ThreadPoolExecutor() as both:
        for written in [both.submit(write, to) for to in (own, other)]:
            written.result()
    with own.begin() as connection:
        assert timeout_ms(connection) == BUSY_TIMEOUT_MS
        assert connection.exec_driver_sql("SELECT count(*), count(DISTINCT number) FROM few").one() == (400, 400)
    own.close()
    other.close()


def test_whatever_fails_while_it_begins_is_an_error_of_sqlalchemys(engine: Engine) -> None:
    with engine.connect() as connection:
        driver: Any = connection.connection.dbapi_connection
        driver.close()
        with pytest.raises(ProgrammingError, match="closed database"):
            connection.begin()
        connection.invalidate()
