"""Open database engines and run transactions, with the settings that SQLite and PostgreSQL need."""

import re
import sqlite3
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any, AnyStr

from sqlalchemy import URL, Connection, Engine, ExceptionContext, Pool, Table, create_engine, event, make_url
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import DBAPIError

from whetstone.database.types import as_json

BUSY_TIMEOUT_MS = 20_000
"""How long a writer waits for another process's transaction. Ours take milliseconds; a slow disk may take seconds."""
ASK_AGAIN_S = 0.001
"""How soon a waiting writer retries. SQLite itself retries ever less often, in the end every 100 ms: of two busy
writers, one would sleep while the file is free, and would lose for seconds against a writer that begins again at
once."""
UNDER_WAY_S = 0.1
"""How long `elsewhere` waits for a transaction: several times the duration of one that does not wait itself."""
LEAST_GIVEN_S = 0.005
"""Shortest pause in which others may write, in `giving_way`."""
IDS_PER_STATEMENT = 5_000
"""Ids in one statement, which may contain each twice or more: SQLite takes 32,766 parameters, PostgreSQL 65,535."""

_BEGIN = "BEGIN IMMEDIATE"
_QUOTED = re.compile(r': ".*', re.DOTALL)
"""A value in an error message of PostgreSQL that it could not parse."""
_SQLITE_ARGUMENTS: dict[str, Any] = {
    "timeout": BUSY_TIMEOUT_MS / 1000,
    # Each length of an id list is a separate statement, of about 17 KiB.
    "cached_statements": 32,
}
_SQLITE_POOL = {"pool_size": 15, "max_overflow": 0}
"""As many connections as SQLAlchemy opens at most, but pooled: opening and closing files often fragments memory."""
_SQLITE_CACHE_KIB = 512
"""Page cache of each connection; small, because the kernel caches the pages anyway."""
_SQLITE_WRITER_CACHE_KIB = 4096
"""Page cache of a connection that writes much: room for all pages that a large transaction changes; otherwise they are
written several times."""
_SQLITE_WRITER_LOG_PAGES = 4000
"""Pages in the write-ahead log (4 KiB each) before a checkpoint. Most pages change repeatedly, and each checkpoint
takes two fsyncs. SQLite's default is a quarter of this, three transactions of a proxy under load."""
_POSTGRESQL_ARGUMENTS: dict[str, Any] = {
    # A server that drops packets must not block the writer for the kernel's two minutes.
    "connect_timeout": 5,
    "tcp_user_timeout": 10_000,
    # psycopg would prepare statements while tables are small and keep those plans after the tables have grown.
    "prepare_threshold": None,
}

# sqlite3 looks for an adapter for every value that is neither number nor text. For NULL this takes longer than SQLite's
# own work, unless an adapter is registered.
sqlite3.register_adapter(type(None), lambda _: None)

_PASSWORDS = re.compile(r"(?:^|(?<=//))([^:@/\s]*):(?!//)\S*@|\b(password|passwd)=[^&\s]*")
"""A password in a URL, even in an invalid one: a mistyped password must not appear in a log."""


def connect(url: str | URL) -> Engine:
    """Create an engine for `url` (`sqlite:///…`, a file, or `postgresql+psycopg://…`); it connects lazily.

    SQLite runs in WAL mode with `BEGIN IMMEDIATE`, so that a writing transaction never fails half-way because another
    one wrote first. Readers use `engine.connect()` with `execution_options(isolation_level="AUTOCOMMIT")`.

    Raises:
        sqlalchemy.exc.ArgumentError: `url` is not a database URL.
    """
    sqlite = make_url(url).get_backend_name() == "sqlite"
    engine = create_engine(
        url,
        json_serializer=as_json,
        # Errors are logged, but must not contain the content of calls.
        hide_parameters=True,
        pool_pre_ping=not sqlite,
        connect_args=_SQLITE_ARGUMENTS if sqlite else _POSTGRESQL_ARGUMENTS,
        **(_SQLITE_POOL if sqlite else {}),
    )
    event.listen(engine, "handle_error", _remove_quoted_rows)
    if sqlite:
        event.listen(engine, "connect", _prepare_sqlite)
        event.listen(engine, "begin", _begin_immediate)
    return engine


def of_one_writer(engine: Engine) -> Engine:
    """Return an engine on the same database for the thread that writes most; on PostgreSQL it is the same engine.

    On SQLite it has a single connection of its own, with cache for what a transaction changes and memory for what a
    statement may have to roll back: SQLite keeps a copy of that, which would be a file above 64 KB.
    """
    if engine.dialect.name != "sqlite":
        return engine
    own = connect(engine.url)
    event.listen(own, "connect", _prepare_writer)
    return own


class Transactions:
    """The transactions of one thread, one after the other.

    On SQLite they share one connection, because SQLAlchemy takes longer to check a connection out and in than a small
    transaction takes. After an error, and after the engine was disposed of, a new connection is checked out.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._open_connection: tuple[Connection, Pool] | None = None
        self._lent = 0
        """How many connections were checked out, one after the other."""
        self._under_way = threading.Lock()
        self._began_s = 0.0
        """When the last transaction began (monotonic)."""

    @contextmanager
    def begin(self) -> Iterator[Connection]:
        """Begin a transaction, like `Engine.begin`."""
        if self._engine.dialect.name != "sqlite":
            with self._engine.begin() as connection:
                yield connection
            return
        pool = self._engine.pool
        with self._under_way:
            self._began_s = time.monotonic()
            if self._open_connection is not None and self._open_connection[1] is not pool:
                self._give_back()
            if self._open_connection is None:
                self._open_connection = self._engine.connect(), pool
                self._lent += 1
            connection = self._open_connection[0]
            try:
                with connection.begin():
                    yield connection
            except BaseException:
                self._give_back()
                raise

    def elsewhere(self) -> tuple[int, int] | None:
        """Return a value that changes with each commit to this SQLite file except those of these transactions; None if
        that is unknown at the moment. Thread-safe; waits for a transaction in progress."""
        if not self._under_way.acquire(timeout=max(0.0, self._began_s + UNDER_WAY_S - time.monotonic())):
            return None
        try:
            if self._open_connection is None:
                return None
            driver: Any = self._open_connection[0].connection.dbapi_connection
            # It counts the commits of all other connections.
            return self._lent, driver.execute("PRAGMA data_version").fetchone()[0]
        except sqlite3.Error:
            return None
        finally:
            self._under_way.release()

    def close(self) -> None:
        """Return the connection to the pool."""
        with self._under_way:
            self._give_back()

    def _give_back(self) -> None:
        connected, self._open_connection = self._open_connection, None
        if connected is not None:
            connected[0].close()


def run_sqlite(connection: Connection, sql: str, values: Sequence[Any] = (), *, many: bool = False) -> sqlite3.Cursor:
    """Run a statement on SQLite within a transaction, bypassing SQLAlchemy, which takes five times as long.

    `many`: run it once for each of `values`.

    Raises:
        DBAPIError: the error that SQLAlchemy would raise for the driver's.
    """
    driver: Any = connection.connection.dbapi_connection
    try:
        cursor: sqlite3.Cursor = (driver.executemany if many else driver.execute)(sql, values)
    except sqlite3.Error as error:
        raise _as_sqlalchemy_says(connection, sql, values, error, many=many) from error
    return cursor


def read_sqlite(connection: Connection, sql: str, values: Sequence[Any]) -> list[Any]:
    """Return the rows of a query on SQLite, bypassing SQLAlchemy in the same way.

    Raises:
        DBAPIError: as `run_sqlite`.
    """
    try:
        return run_sqlite(connection, sql, values).fetchall()
    except sqlite3.Error as error:
        raise _as_sqlalchemy_says(connection, sql, values, error) from error


def _as_sqlalchemy_says(
    connection: Connection, sql: str, values: Sequence[Any], error: sqlite3.Error, *, many: bool = False
) -> BaseException:
    return DBAPIError.instance(
        sql, values, error, sqlite3.Error, hide_parameters=True, dialect=connection.dialect, ismulti=many
    )


@contextmanager
def snapshot(url: str) -> Iterator[Connection]:
    """Open a read-only snapshot of the database; the database itself refuses writes.

    Raises:
        sqlalchemy.exc.ArgumentError: `url` is not a database URL.
    """
    with snapshots(url) as taken, taken() as connection:
        yield connection


@contextmanager
def snapshots(url: str) -> Iterator[Callable[[], AbstractContextManager[Connection]]]:
    """Yield a function that opens a snapshot as `snapshot` does, one after the other on the same connection.

    Raises:
        sqlalchemy.exc.ArgumentError: `url` is not a database URL.
    """
    engine = connect(url)
    sqlite = engine.dialect.name == "sqlite"
    level = "AUTOCOMMIT" if sqlite else "REPEATABLE READ"
    reader = engine.execution_options(isolation_level=level, postgresql_readonly=not sqlite)

    @contextmanager
    def taken() -> Iterator[Connection]:
        with reader.connect() as connection:
            if sqlite:
                connection.exec_driver_sql("PRAGMA query_only = ON")
                # Deferred: it keeps its view of the file, and no writer waits for it.
                connection.exec_driver_sql("BEGIN")
            yield connection

    try:
        yield taken
    finally:
        # The connection must not return to a pool that others use: it can no longer write.
        engine.dispose()


@contextmanager
def giving_way(engine: Engine) -> Iterator[None]:
    """Run one transaction of a series; on SQLite, pause afterwards for as long as it took so that others can write.

    SQLite has one writer at a time, and a writer that begins again at once mostly wins against those that retry.
    """
    began_s = time.perf_counter()
    yield
    if engine.dialect.name == "sqlite":
        time.sleep(max(LEAST_GIVEN_S, time.perf_counter() - began_s))


def without_password(url: str) -> str:
    """Return a database or broker URL without its password."""
    return _PASSWORDS.sub(lambda match: f"{match[2]}=***" if match[2] else f"{match[1]}:***@", url)


def chunks(ids: Collection[AnyStr], most: int = IDS_PER_STATEMENT) -> Iterator[list[AnyStr]]:
    """Split ids into sorted lists that fit into one statement: both databases limit the number of parameters."""
    ordered = sorted(ids)
    for start in range(0, len(ordered), most):
        yield ordered[start : start + most]


def insert_new(connection: Connection, table: Table, row: Mapping[str, Any], on: list[str] | None = None) -> bool:
    """Insert a row unless it violates a unique constraint (on the columns `on`; None: any); return whether it did."""
    statement = _insert_new(connection.dialect.name, table, *(on or ()))
    # Not by rowcount: psycopg does not set it when a conflict was possible.
    return connection.execute(statement.returning(*table.primary_key), dict(row)).first() is not None


def insert_all_new(
    connection: Connection, table: Table, rows: Sequence[Mapping[str, Any]], on: list[str] | None = None
) -> None:
    """Insert the rows that violate no unique constraint (on the columns `on`; None: any); all have the same columns."""
    connection.execute(_insert_new(connection.dialect.name, table, *(on or ())), [dict(row) for row in rows])


@cache
def _insert_new(dialect: str, table: Table, *on: str) -> postgresql.Insert | sqlite.Insert:
    """Cached: building the statement costs as much as executing it."""
    insert = postgresql.insert if dialect == "postgresql" else sqlite.insert
    return insert(table).on_conflict_do_nothing(index_elements=on or None)


def _remove_quoted_rows(context: ExceptionContext) -> None:
    """Reduce a PostgreSQL error to its primary message: the rest quotes the row, with the content of calls."""
    error, wrapped = context.original_exception, context.sqlalchemy_exception
    primary = getattr(getattr(error, "diag", None), "message_primary", None)
    if primary is not None:
        message, error.args = str(error), (_QUOTED.sub(": …", primary),)
        if wrapped is not None:
            wrapped.args = tuple(str(one).replace(message, str(error)) for one in wrapped.args)


def _prepare_sqlite(connection: Any, _record: Any) -> None:
    # Switch off sqlite3's own transaction handling, which would begin DEFERRED, and only at the first write.
    connection.isolation_level = None
    _set(connection, "journal_mode=WAL", "synchronous=NORMAL", "foreign_keys=ON", f"cache_size=-{_SQLITE_CACHE_KIB}")


def _prepare_writer(connection: Any, _record: Any) -> None:
    _set(
        connection,
        f"cache_size=-{_SQLITE_WRITER_CACHE_KIB}",
        "temp_store=MEMORY",
        f"wal_autocheckpoint={_SQLITE_WRITER_LOG_PAGES}",
    )


def _set(connection: Any, *pragmas: str) -> None:
    for pragma in pragmas:
        connection.execute(f"PRAGMA {pragma}").close()


def _begin_immediate(connection: Connection) -> None:
    if connection.get_execution_options().get("isolation_level") == "AUTOCOMMIT":
        return
    try:
        _begin(connection.connection.dbapi_connection)
    except sqlite3.Error as error:
        raise _as_sqlalchemy_says(connection, _BEGIN, (), error) from error


def _begin(driver: Any) -> None:
    """Begin a transaction as soon as no other connection writes.

    Raises:
        sqlite3.Error: another writer takes too long, or any other error.
    """
    until_s = time.monotonic() + BUSY_TIMEOUT_MS / 1000
    try:
        # SQLite itself must not wait.
        driver.execute("PRAGMA busy_timeout=0")
        while True:
            try:
                driver.execute(_BEGIN)
                return
            except sqlite3.OperationalError as error:
                # The lowest byte is the kind of error, the bytes above it the detail.
                is_busy = error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY
                if not is_busy or time.monotonic() >= until_s:
                    raise
            time.sleep(ASK_AGAIN_S)
    finally:
        driver.execute(f"PRAGMA busy_timeout={BUSY_TIMEOUT_MS}")
