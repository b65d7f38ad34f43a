"""The engine: how every program reaches the database. Knows SQLite's and PostgreSQL's manners; no table of ours."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Connection, Engine, Table, create_engine, event, make_url
from sqlalchemy.dialects import postgresql, sqlite

BUSY_TIMEOUT_MS = 20_000
"""How long a writer waits for another process's transaction. Ours last milliseconds; a slow disk may take seconds."""

_SQLITE_ARGUMENTS: dict[str, Any] = {"timeout": BUSY_TIMEOUT_MS / 1000}
_POSTGRESQL_ARGUMENTS: dict[str, Any] = {
    # A server that drops packets must not hold the writer for the kernel's two minutes.
    "connect_timeout": 5,
    # psycopg would prepare statements while tables are small and keep those plans when they have grown.
    "prepare_threshold": None,
}


def connect(url: str) -> Engine:
    """Open an engine on `url` (`sqlite:///…` or `postgresql+psycopg://…`); connects lazily.

    SQLite runs in WAL mode with `BEGIN IMMEDIATE`, so that a transaction that will write never fails half-way because
    another one wrote first. Readers use `engine.connect()` with `execution_options(isolation_level="AUTOCOMMIT")`.

    Raises:
        sqlalchemy.exc.ArgumentError: `url` is not a database URL.
    """
    sqlite = make_url(url).get_backend_name() == "sqlite"
    engine = create_engine(
        url,
        json_serializer=_compact_json,
        # Errors are logged; what apps said is not.
        hide_parameters=True,
        pool_pre_ping=not sqlite,
        connect_args=_SQLITE_ARGUMENTS if sqlite else _POSTGRESQL_ARGUMENTS,
    )
    if sqlite:
        event.listen(engine, "connect", _prepare_sqlite)
        event.listen(engine, "begin", _begin_immediate)
    return engine


@contextmanager
def snapshot(url: str) -> Iterator[Connection]:
    """The database as it is at this moment, to read from; the database itself refuses whatever would write.

    Raises:
        sqlalchemy.exc.ArgumentError: `url` is not a database URL.
    """
    engine = connect(url)
    sqlite = engine.dialect.name == "sqlite"
    options = {"isolation_level": "AUTOCOMMIT" if sqlite else "REPEATABLE READ", "postgresql_readonly": not sqlite}
    try:
        with engine.execution_options(**options).connect() as connection:
            if sqlite:
                connection.exec_driver_sql("PRAGMA query_only = ON")
                # Deferred: it holds its view of the file, and no writer waits for it.
                connection.exec_driver_sql("BEGIN")
            yield connection
    finally:
        # The connection must not go back to a pool: it can no longer write.
        engine.dispose()


def insert_new(connection: Connection, table: Table, row: Mapping[str, Any], on: list[str] | None = None) -> bool:
    """Insert unless a unique key (of the columns `on`; None: any) forbids it; whether it did."""
    insert = postgresql.insert if connection.dialect.name == "postgresql" else sqlite.insert
    statement = insert(table).values(**row).on_conflict_do_nothing(index_elements=on).returning(*table.primary_key)
    # Not by rowcount: psycopg's says nothing where a conflict was possible.
    return connection.execute(statement).first() is not None


def _compact_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def _prepare_sqlite(connection: Any, _record: Any) -> None:
    # sqlite3's own transaction handling would begin DEFERRED, and only at the first write: switch it off.
    connection.isolation_level = None
    cursor = connection.cursor()
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA synchronous=NORMAL")
    cursor.execute("PRAGMA foreign_keys=ON")
    cursor.close()


def _begin_immediate(connection: Any) -> None:
    if connection.get_execution_options().get("isolation_level") != "AUTOCOMMIT":
        connection.exec_driver_sql("BEGIN IMMEDIATE")
