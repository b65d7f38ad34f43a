"""Run one query of the user's, read-only, row by row, with a time limit.

Both databases refuse writes. In addition, SQLite gets a list of allowed operations, because `ATTACH` and `VACUUM INTO`
create files without writing to the database; PostgreSQL accepts no second statement. Errors come with advice: the right
name, among the admin views and their tables, for one that the database does not know.
"""

import difflib
import re
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from itertools import islice
from typing import Any

import psycopg
from psycopg.errors import QueryCanceled, ReadOnlySqlTransaction
from psycopg.pq import ExecStatus
from sqlalchemy.exc import SQLAlchemyError

from migrations import schema
from migrations.views import BY_NAME
from whetstone.database.engine import snapshot
from whetstone.errors import WhetstoneError

ROWS_AT_ONCE = 500
"""Rows in memory at once; a result may be larger."""
READS = frozenset({sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE})
LOOKS = frozenset({"table_info", "table_xinfo", "table_list", "index_list", "index_info", "foreign_key_list"})
"""PRAGMAs that only read."""
_UNKNOWN_TABLE = re.compile(r'no such table: (\S+)|relation "([^"]+)" does not exist')
_UNKNOWN_COLUMN = re.compile(r'no such column: (\S+)|column "?([^"\s]+)"? does not exist')
_SECOND = re.compile(r"only execute one statement|multiple commands|one statement at a time")
REFUSED = "that is no query: `whetstone sql` only reads (SELECT, WITH, VALUES, EXPLAIN)"


class QueryFailed(WhetstoneError):
    """The query failed; the message is the database's own, plus a suggestion."""


@contextmanager
def asking(url: str, sql: str, timeout_s: float | None = None) -> Iterator[tuple[list[str], Iterator[tuple[Any, ...]]]]:
    """Run one query on a snapshot of the database, and yield its columns and its rows, which are read as they are
    consumed. `timeout_s`: how long the database may work on it; None: no limit.

    Raises:
        QueryFailed: it is not a query, it would write, it took too long, or the database is unavailable; also raised
            while rows are read.
    """
    try:
        with snapshot(url) as connection:
            dbapi: Any = connection.connection.dbapi_connection
            if connection.dialect.name == "sqlite":
                with _only_reads(dbapi):
                    clock = _Clock(sql, timeout_s, dbapi.interrupt)
                    columns, batches = _from_sqlite(dbapi, sql, clock)
                    yield columns, _rows(batches, clock)
            else:
                # Times then look as they do in SQLite.
                connection.exec_driver_sql("SET LOCAL TIME ZONE 'UTC'")
                columns, clock = _described(dbapi, sql), _Clock(sql, timeout_s, dbapi.cancel_safe)
                # Always closed: it holds the connection, and closing cancels a running query.
                size = ROWS_AT_ONCE if psycopg.capabilities.has_stream_chunked() else 1
                with closing(dbapi.cursor().stream(sql, size=size)) as rows:
                    batches = iter(lambda: list(islice(rows, ROWS_AT_ONCE)), [])
                    yield columns, _rows(batches, clock)
    except (SQLAlchemyError, sqlite3.Error, sqlite3.Warning, psycopg.Error) as error:
        raise QueryFailed(_why(error, sql)) from error


def _rows(batches: Iterator[Sequence[tuple[Any, ...]]], clock: "_Clock") -> Iterator[tuple[Any, ...]]:
    while True:
        with clock.running():
            batch = next(batches, ())
        if not batch:
            return
        yield from batch


def _from_sqlite(dbapi: sqlite3.Connection, sql: str, clock: "_Clock") -> tuple[list[str], Iterator[Any]]:
    cursor = dbapi.cursor()
    with clock.running():
        cursor.execute(sql)  # up to its first row
    if cursor.description is None:
        raise QueryFailed(REFUSED)
    return [one[0] for one in cursor.description], iter(lambda: cursor.fetchmany(ROWS_AT_ONCE), [])


def _described(dbapi: "psycopg.Connection[Any]", sql: str) -> list[str]:
    """Return the column names before the query runs: an empty result would not have them. Refuse a second statement."""
    prepared = dbapi.pgconn.prepare(b"", sql.encode())
    if prepared.status == ExecStatus.COMMAND_OK:
        prepared = dbapi.pgconn.describe_prepared(b"")
    if prepared.status != ExecStatus.COMMAND_OK:
        raise psycopg.errors.error_from_result(prepared)
    if not prepared.nfields:
        raise QueryFailed(REFUSED)
    return [(prepared.fname(place) or b"").decode() for place in range(prepared.nfields)]


@contextmanager
def _only_reads(dbapi: sqlite3.Connection) -> Iterator[None]:
    def allowed(action: int, first: str | None, second: str | None, *_of: str | None) -> int:
        if action == sqlite3.SQLITE_PRAGMA:
            return sqlite3.SQLITE_OK if first in LOOKS else sqlite3.SQLITE_DENY
        loads = action == sqlite3.SQLITE_FUNCTION and second == "load_extension"
        return sqlite3.SQLITE_OK if action in READS and not loads else sqlite3.SQLITE_DENY

    dbapi.set_authorizer(allowed)
    try:
        yield
    finally:
        dbapi.set_authorizer(None)


class _Clock:
    """Stops the database when it has worked for too long. Time in which the caller processes rows does not count."""

    def __init__(self, sql: str, timeout_s: float | None, stop: Callable[[], None]) -> None:
        self._timed_out: str | None = None
        """Why the database was stopped; None if it was not."""
        self._left_s = threading.TIMEOUT_MAX if timeout_s is None else timeout_s
        self._sql, self._timeout_s, self._stop = sql, timeout_s, stop

    @contextmanager
    def running(self) -> Iterator[None]:
        """Let the database work in this block.

        Raises:
            QueryFailed: it took too long, or failed.
        """
        timer = threading.Timer(max(self._left_s, 0), self._end)
        timer.daemon = True
        begun = time.monotonic()
        timer.start()
        try:
            yield
        except (sqlite3.Error, psycopg.Error) as error:
            raise QueryFailed(self._timed_out or _why(error, self._sql)) from error
        finally:
            timer.cancel()
            self._left_s -= time.monotonic() - begun

    def _end(self) -> None:
        self._timed_out = (
            f"that took longer than {self._timeout_s:g} s: --timeout gives it more (setting sql.timeout_s)"
        )
        # The query may have just ended.
        with suppress(sqlite3.Error, psycopg.Error):
            self._stop()


def _why(error: Exception, sql: str) -> str:
    own = getattr(error, "orig", None) or error
    message = str(getattr(getattr(own, "diag", None), "message_primary", None) or own).strip()
    if isinstance(own, ReadOnlySqlTransaction) or message in ("not authorized", "attempt to write a readonly database"):
        return f"{REFUSED}; the database says: {message}"
    if isinstance(own, QueryCanceled):
        return f"{message}: --timeout gives it more, unless the database itself has a limit"
    return message.rstrip(".") + _advice(message, sql)


def _advice(message: str, sql: str) -> str:
    """Return advice to append to the database's error `message`; empty if there is none."""
    if match := _UNKNOWN_TABLE.search(message):
        return _of_table(_bare(match[1] or match[2]))
    if match := _UNKNOWN_COLUMN.search(message):
        return _of_column(_bare(match[1] or match[2]), sql)
    if _SECOND.search(message):
        return "; ask one query at a time"
    return ""


def _of_table(name: str) -> str:
    if name in BY_NAME or name in schema.metadata.tables:
        return ". This database is of an earlier version: `whetstone migrate` brings it to this one"
    # People often omit the prefix that all views share.
    likely = next((view for view in (f"admin_{name}", f"admin_{name}s") if view in BY_NAME), name)
    return f"{_did_you_mean(likely, [*BY_NAME, *schema.metadata.tables])} `whetstone sql` lists the views"


def _of_column(name: str, sql: str) -> str:
    views = [view for view in BY_NAME if re.search(rf"\b{view}\b", sql, re.IGNORECASE)]
    if not views:
        return ""
    columns = list(dict.fromkeys(column.name for view in views for column in BY_NAME[view].columns))
    if name in columns:
        return f"; it is one of {', '.join(views)}: is its name in front of it right, or the database older?"
    return f"{_did_you_mean(name, columns)} `whetstone sql {views[0]}` lists its columns"


def _did_you_mean(name: str, among: list[str]) -> str:
    nearest = difflib.get_close_matches(name.lower(), among, n=1, cutoff=0.5)
    return f". Did you mean {nearest[0]}?" if nearest else "."


def _bare(name: str) -> str:
    return name.rsplit(".", 1)[-1].strip('"')
