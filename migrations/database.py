"""The engine: how every program reaches the database. Knows SQLite's and PostgreSQL's manners; no table of ours."""

import re
import sqlite3
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

from sqlalchemy import URL, Connection, Engine, ExceptionContext, Pool, Table, create_engine, event, make_url
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import DBAPIError

from migrations.types import as_json

BUSY_TIMEOUT_MS = 20_000
"""How long a writer waits for another process's transaction. Ours last milliseconds; a slow disk may take seconds."""
ASK_AGAIN_S = 0.001
"""How soon it asks again whether that has ended. SQLite itself asks ever more seldom, every 100 ms at last: of two that
write a lot one would sleep while nobody writes, and to whoever begins again at once the others lose for seconds."""
UNDER_WAY_S = 0.1
"""How long a transaction is waited for by `elsewhere`: several times what one takes that does not wait itself."""
LEAST_GIVEN_S = 0.005
"""How long others may write at least, where `giving_way`."""
IDS_PER_STATEMENT = 5_000
"""Ids in one statement, which may name them more than once: SQLite takes 32,766 parameters, PostgreSQL 65,535."""

_BEGIN = "BEGIN IMMEDIATE"
_QUOTED = re.compile(r': ".*', re.DOTALL)
"""A value that PostgreSQL could not read, in its own words."""
_SQLITE_ARGUMENTS: dict[str, Any] = {
    "timeout": BUSY_TIMEOUT_MS / 1000,
    # A list of ids is a statement of its own for each length, of some 17 KiB.
    "cached_statements": 32,
}
_SQLITE_POOL = {"pool_size": 15, "max_overflow": 0}
"""As many as SQLAlchemy opens at once, but kept: to open and close files again and again leaves holes in memory."""
_SQLITE_CACHE_KIB = 512
"""Pages of each connection: the kernel has them anyway."""
_SQLITE_WRITER_CACHE_KIB = 4096
"""Of one that writes much: all pages that a large transaction changes, or they are written several times over."""
_SQLITE_WRITER_LOG_PAGES = 4000
"""Pages in the write-ahead log (4 KiB each) before they go to where they belong: most change again and again, and each
time takes two fsyncs. SQLite's default is a quarter of it, three transactions of a proxy under load."""
_POSTGRESQL_ARGUMENTS: dict[str, Any] = {
    # A server that drops packets must not hold the writer for the kernel's two minutes.
    "connect_timeout": 5,
    "tcp_user_timeout": 10_000,
    # psycopg would prepare statements while tables are small and keep those plans when they have grown.
    "prepare_threshold": None,
}

# sqlite3 asks of whatever is no number and no text whether it can be adapted, which for NULL takes longer than SQLite
# takes for the value, unless somebody has said how.
sqlite3.register_adapter(type(None), lambda _: None)

_PASSWORDS = re.compile(r"(?:^|(?<=//))([^:@/\s]*):(?!//)\S*@|\b(password|passwd)=[^&\s]*")
"""In a URL, also one that is none: whoever mistyped it must not find their password in a log."""


def connect(url: str | URL) -> Engine:
    """Open an engine on `url` (`sqlite:///…`, a file, or `postgresql+psycopg://…`); connects lazily.

    SQLite runs in WAL mode with `BEGIN IMMEDIATE`, so that a transaction that will write never fails half-way because
    another one wrote first. Readers use `engine.connect()` with `execution_options(isolation_level="AUTOCOMMIT")`.

    Raises:
        sqlalchemy.exc.ArgumentError: `url` is not a database URL.
    """
    sqlite = make_url(url).get_backend_name() == "sqlite"
    engine = create_engine(
        url,
        json_serializer=as_json,
        # Errors are logged; what apps said is not.
        hide_parameters=True,
        pool_pre_ping=not sqlite,
        connect_args=_SQLITE_ARGUMENTS if sqlite else _POSTGRESQL_ARGUMENTS,
        **(_SQLITE_POOL if sqlite else {}),
    )
    event.listen(engine, "handle_error", _quote_nothing)
    if sqlite:
        event.listen(engine, "connect", _prepare_sqlite)
        event.listen(engine, "begin", _begin_immediate)
    return engine


def of_one_writer(engine: Engine) -> Engine:
    """An engine on the same database for the one thread that writes most; on PostgreSQL it is the same engine.

    On SQLite it has one connection, of its own, with room for what a transaction changes, and for what a statement
    would have to change back: SQLite keeps a copy of that, which beyond 64 KB would be a file.
    """
    if engine.dialect.name != "sqlite":
        return engine
    own = connect(engine.url)
    event.listen(own, "connect", _prepare_writer)
    return own


class Transactions:
    """Those of one thread, one after the other.

    On SQLite all are of one connection, for SQLAlchemy takes longer to lend one and to take it back than a small
    transaction does; after an error, and when the engine was disposed of, one is lent anew.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._kept: tuple[Connection, Pool] | None = None
        self._lent = 0
        """How many were, one after the other."""
        self._under_way = threading.Lock()
        self._began_s = 0.0
        """When the last began (monotonic)."""

    @contextmanager
    def begin(self) -> Iterator[Connection]:
        """As `Engine.begin`."""
        if self._engine.dialect.name != "sqlite":
            with self._engine.begin() as connection:
                yield connection
            return
        pool = self._engine.pool
        with self._under_way:
            self._began_s = time.monotonic()
            if self._kept is not None and self._kept[1] is not pool:
                self._give_back()
            if self._kept is None:
                self._kept = self._engine.connect(), pool
                self._lent += 1
            connection = self._kept[0]
            try:
                with connection.begin():
                    yield connection
            except BaseException:
                self._give_back()
                raise

    def elsewhere(self) -> tuple[int, int] | None:
        """Another value after whatever was committed to this SQLite file, but not by these transactions; None where
        that cannot be told now. From any thread; where a transaction is under way, behind it."""
        if not self._under_way.acquire(timeout=max(0.0, self._began_s + UNDER_WAY_S - time.monotonic())):
            return None
        try:
            if self._kept is None:
                return None
            driver: Any = self._kept[0].connection.dbapi_connection
            # It counts the commits of all other connections.
            return self._lent, driver.execute("PRAGMA data_version").fetchone()[0]
        except sqlite3.Error:
            return None
        finally:
            self._under_way.release()

    def close(self) -> None:
        """Give the connection back."""
        with self._under_way:
            self._give_back()

    def _give_back(self) -> None:
        kept, self._kept = self._kept, None
        if kept is not None:
            kept[0].close()


def run_sqlite(connection: Connection, sql: str, values: Sequence[Any] = (), *, many: bool = False) -> sqlite3.Cursor:
    """Run a statement on SQLite within a transaction, past SQLAlchemy, which takes five times as long as the driver.

    `many`: once for each of `values`.

    Raises:
        DBAPIError: what SQLAlchemy would have made of the driver's.
    """
    driver: Any = connection.connection.dbapi_connection
    try:
        cursor: sqlite3.Cursor = (driver.executemany if many else driver.execute)(sql, values)
    except sqlite3.Error as error:
        raise _as_sqlalchemy_says(connection, sql, values, error, many=many) from error
    return cursor


def read_sqlite(connection: Connection, sql: str, values: Sequence[Any]) -> list[Any]:
    """The rows that a query on SQLite finds, likewise.

    Raises:
        DBAPIError: as `run_sqlite`.
    """
    cursor = run_sqlite(connection, sql, values)
    try:
        return cursor.fetchall()
    except sqlite3.Error as error:
        raise _as_sqlalchemy_says(connection, sql, values, error) from error


def _as_sqlalchemy_says(
    connection: Connection, sql: str, values: Sequence[Any], error: sqlite3.Error, *, many: bool = False
) -> BaseException:
    dialect = connection.dialect
    return DBAPIError.instance(sql, values, error, sqlite3.Error, hide_parameters=True, dialect=dialect, ismulti=many)


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


@contextmanager
def giving_way(engine: Engine) -> Iterator[None]:
    """One transaction of many in a row: on SQLite others may write behind it for as long as it took.

    There one writes at a time, and to whoever begins again at once the others, who ask again and again, mostly lose.
    """
    began_s = time.perf_counter()
    yield
    if engine.dialect.name == "sqlite":
        time.sleep(max(LEAST_GIVEN_S, time.perf_counter() - began_s))


def without_password(url: str) -> str:
    """A URL as it may be told: without its password. A broker's will do as well."""
    return _PASSWORDS.sub(lambda found: f"{found[2]}=***" if found[2] else f"{found[1]}:***@", url)


def chunks(ids: Collection[str]) -> Iterator[list[str]]:
    """In order, and few enough for one statement: both databases bound the number of its parameters."""
    ordered = sorted(ids)
    for start in range(0, len(ordered), IDS_PER_STATEMENT):
        yield ordered[start : start + IDS_PER_STATEMENT]


def insert_new(connection: Connection, table: Table, row: Mapping[str, Any], on: list[str] | None = None) -> bool:
    """Insert unless a unique key (of the columns `on`; None: any) forbids it; whether it did."""
    statement = _insert_new(connection.dialect.name, table, None if on is None else tuple(on))
    # Not by rowcount: psycopg's says nothing where a conflict was possible.
    return connection.execute(statement.returning(*table.primary_key), dict(row)).first() is not None


def insert_all_new(
    connection: Connection, table: Table, rows: Sequence[Mapping[str, Any]], on: list[str] | None = None
) -> None:
    """Insert those rows that no unique key (of the columns `on`; None: any) forbids; all have the same columns."""
    statement = _insert_new(connection.dialect.name, table, None if on is None else tuple(on))
    connection.execute(statement, [dict(row) for row in rows])


@cache
def _insert_new(dialect: str, table: Table, on: tuple[str, ...] | None) -> postgresql.Insert | sqlite.Insert:
    """Made once: to make it costs as much as to execute it."""
    insert = postgresql.insert if dialect == "postgresql" else sqlite.insert
    return insert(table).on_conflict_do_nothing(index_elements=None if on is None else list(on))


def _quote_nothing(context: ExceptionContext) -> None:
    """Cut an error of PostgreSQL's down to what was wrong: behind that it quotes the row, with what apps said in it."""
    error, wrapped = context.original_exception, context.sqlalchemy_exception
    primary = getattr(getattr(error, "diag", None), "message_primary", None)
    if primary is not None:
        said, error.args = str(error), (_QUOTED.sub(": …", primary),)
        if wrapped is not None:
            wrapped.args = tuple(str(one).replace(said, str(error)) for one in wrapped.args)


def _prepare_sqlite(connection: Any, _record: Any) -> None:
    # sqlite3's own transaction handling would begin DEFERRED, and only at the first write: switch it off.
    connection.isolation_level = None
    cursor = connection.cursor()
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA synchronous=NORMAL")
    cursor.execute("PRAGMA foreign_keys=ON")
    cursor.execute(f"PRAGMA cache_size=-{_SQLITE_CACHE_KIB}")
    cursor.close()


def _prepare_writer(connection: Any, _record: Any) -> None:
    connection.execute(f"PRAGMA cache_size=-{_SQLITE_WRITER_CACHE_KIB}").close()
    connection.execute("PRAGMA temp_store=MEMORY").close()
    connection.execute(f"PRAGMA wal_autocheckpoint={_SQLITE_WRITER_LOG_PAGES}").close()


def _begin_immediate(connection: Connection) -> None:
    if connection.get_execution_options().get("isolation_level") == "AUTOCOMMIT":
        return
    try:
        _begin(connection.connection.dbapi_connection)
    except sqlite3.Error as error:
        raise _as_sqlalchemy_says(connection, _BEGIN, (), error) from error


def _begin(driver: Any) -> None:
    """Begin as soon as nobody else writes.

    Raises:
        sqlite3.Error: somebody does for too long, or anything else is wrong.
    """
    until_s = time.monotonic() + BUSY_TIMEOUT_MS / 1000
    try:
        # It is not to wait by itself.
        driver.execute("PRAGMA busy_timeout=0")
        while (busy := _try_to_begin(driver)) is not None:
            if time.monotonic() >= until_s:
                raise busy
            time.sleep(ASK_AGAIN_S)
    finally:
        driver.execute(f"PRAGMA busy_timeout={BUSY_TIMEOUT_MS}")


def _try_to_begin(driver: Any) -> sqlite3.Error | None:
    """Begin, where nobody else writes; else what SQLite says of it.

    Raises:
        sqlite3.Error: anything else is wrong.
    """
    try:
        driver.execute(_BEGIN)
    except sqlite3.OperationalError as error:
        # The lowest byte says what, those above it why.
        if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY:
            raise
        return error
    return None
