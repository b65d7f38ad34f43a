"""Migrate a database along its history, by Alembic; needs no alembic.ini.

Errors::

    MigrationError                 the message says what was wrong and what to do
    ├── DatabaseUnreachable        no database answers at this URL
    └── DatabaseNewer              it was migrated by a later Whetstone

Alembic is imported where it is used: its import takes as long as everything else that a command needs to reject its
settings.
"""

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from psycopg.errors import DependentObjectsStillExist, QueryCanceled
from sqlalchemy import Connection, inspect, text
from sqlalchemy.exc import ArgumentError, DBAPIError, OperationalError

from migrations import readers, views
from whetstone.database.engine import connect, without_password

if TYPE_CHECKING:
    from alembic.config import Config
    from alembic.script import ScriptDirectory

BASE = "base"
"""Before the first revision: an empty database."""

LOCK_WAITS_MS = 500
"""Longest wait for all tables: well below PostgreSQL's `deadlock_timeout` of a second."""
LOCK_TRIES = 120

_LOCK = 0x5748_4554
"""PostgreSQL's advisory lock of a migration ("WHET"): two programs that start at once take turns."""


class MigrationError(Exception):
    """The database could not be migrated; nothing in it changed."""


class DatabaseUnreachable(MigrationError):
    """No database answers at this URL."""


class DatabaseNewer(MigrationError):
    """The database was migrated by a later Whetstone."""


def upgrade(url: str, revision: str = "head") -> None:
    """Bring the database at `url` to `revision`, all or nothing; do nothing if it is there already.

    Raises:
        DatabaseUnreachable: nothing answers at `url`, or it is not a database URL.
        DatabaseNewer: its revision is unknown to this version.
        MigrationError: `revision` is unknown.
    """
    _move(url, revision, "upgrade")


def downgrade(url: str, revision: str) -> None:
    """Take the database at `url` back to `revision` (`base`: no table is left); the data of later tables is lost.

    Raises:
        DatabaseUnreachable, DatabaseNewer, MigrationError: as `upgrade`.
    """
    _move(url, revision, "downgrade")


def check(connection: Connection) -> None:
    """Check that the database has this version's revision; change nothing.

    Raises:
        DatabaseNewer: a later Whetstone migrated it.
        MigrationError: it is older.
    """
    from alembic.migration import MigrationContext
    from alembic.script import ScriptDirectory

    script = ScriptDirectory.from_config(configuration(connection))
    theirs = set(MigrationContext.configure(connection).get_current_heads())
    _refuse_newer(theirs, script)
    if theirs != set(script.get_heads()):
        raise MigrationError("the database is of an earlier version: `whetstone migrate` brings it to this one")


def configuration(connection: Connection) -> "Config":
    """Return Alembic's configuration for a connection whose transaction the caller commits."""
    from alembic.config import Config

    config = Config(attributes={"connection": connection})
    config.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    return config


def _move(url: str, revision: str, direction: Literal["upgrade", "downgrade"]) -> None:
    from alembic import command
    from alembic.migration import MigrationContext
    from alembic.script import ScriptDirectory
    from alembic.util.exc import CommandError

    mover = command.upgrade if direction == "upgrade" else command.downgrade
    with _transaction(url) as connection:
        if connection.dialect.name == "postgresql":
            connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK})
        config = configuration(connection)
        theirs = set(MigrationContext.configure(connection).get_current_heads())
        script = ScriptDirectory.from_config(config)
        _refuse_newer(theirs, script)
        if connection.dialect.name == "postgresql" and theirs and theirs != set(script.get_heads()):
            _lock_all(connection)
        before = readers.granted(connection)
        try:
            mover(config, revision)
        except CommandError as error:
            raise MigrationError(f"cannot go to revision {revision!r}: {error}") from error
        except DBAPIError as error:
            if not isinstance(error.orig, DependentObjectsStillExist):
                raise
            told = (error.orig.diag.message_detail or str(error.orig)).splitlines()[0]
            raise MigrationError(
                f"views of your own read ours, which are made anew: drop them, migrate, make them again ({told})"
            ) from error
        now = set(MigrationContext.configure(connection).get_current_heads())
        if connection.dialect.name == "postgresql" and now != theirs:
            # A recreated view has lost its grants and comments.
            readers.restore(connection, before)
            if now == set(script.get_heads()):
                views.comment(connection)


def _lock_all(connection: Connection) -> None:
    """Lock all tables and views before the first is changed, or none: programs of the previous version may be writing.

    Locks taken one by one, in another order than a program takes them, can deadlock, and PostgreSQL may abort either
    side. So the migration requests all locks at once, and gives up before PostgreSQL checks for deadlocks.

    Raises:
        MigrationError: the tables were in use all the time.
    """
    there = inspect(connection)
    names = ", ".join(f'"{name}"' for name in (*there.get_view_names(), *there.get_table_names()))
    for _ in range(LOCK_TRIES):
        try:
            with connection.begin_nested():
                connection.execute(text(f"SET LOCAL statement_timeout = {LOCK_WAITS_MS}"))
                connection.execute(text(f"LOCK TABLE {names} IN ACCESS EXCLUSIVE MODE"))
                connection.execute(text("SET LOCAL statement_timeout TO DEFAULT"))
            return
        except OperationalError as error:
            if not isinstance(error.orig, QueryCanceled):
                raise
            time.sleep(random.uniform(0, LOCK_WAITS_MS / 1000))
    raise MigrationError(
        "the tables were in use all the time, so nothing was changed: end what holds them (a long query, a backup) "
        "and try again"
    )


def _refuse_newer(theirs: set[str], script: "ScriptDirectory") -> None:
    ours = {revision.revision for revision in script.walk_revisions()}
    if theirs - ours:
        raise DatabaseNewer(
            f"the database is at revision {', '.join(sorted(theirs - ours))}, which this version of Whetstone does "
            "not know: a later one migrated it. Run that one, or restore a backup."
        )


@contextmanager
def _transaction(url: str) -> Iterator[Connection]:
    try:
        engine = connect(url)
    except ArgumentError as error:
        raise DatabaseUnreachable(
            f"{without_password(url)!r} is no database URL; write sqlite:////path/to/whetstone.db or "
            "postgresql+psycopg://user@host/name"
        ) from error
    try:
        try:
            connection = engine.connect()
            connection.begin()
        except DBAPIError as error:
            raise DatabaseUnreachable(
                f"no database answers at {without_password(url)}: {str(error.orig).strip()}. "
                "Check that it runs, that the URL is right and that this user may write there."
            ) from error
        with connection:
            yield connection
            connection.commit()
    finally:
        engine.dispose()
