"""Upgrade a database to this version's tables, by Alembic; needs no alembic.ini.

Errors::

    MigrationError                 the message says what was wrong and what to do
    ├── DatabaseUnreachable        no database answers at this URL
    ├── DatabaseTooOld             it was made by a version before the first release
    └── DatabaseNewer              it was migrated by a later Whetstone

Alembic is imported where it is used: it takes as long to load as all that a command needs to refuse its settings.
"""

import random
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from psycopg.errors import DependentObjectsStillExist, QueryCanceled
from sqlalchemy import Connection, inspect, text
from sqlalchemy.exc import ArgumentError, DBAPIError, OperationalError

from migrations import readers, views
from whetstone.database.engine import connect, without_password

if TYPE_CHECKING:
    from alembic.config import Config

BEFORE_THE_FIRST_RELEASE = frozenset(f"{number:04}" for number in range(1, 11))
"""Revisions that no version upgrades any more. The initial revision is 0011: a database of that one goes on."""

LOCK_WAITS_MS = 500
"""Longest wait for all tables: well below PostgreSQL's `deadlock_timeout` of a second."""
LOCK_TRIES = 120

_LOCK = 0x5748_4554
"""PostgreSQL's advisory lock for a migration ("WHET"): two programs that start at once take turns."""


class MigrationError(Exception):
    """The database could not be migrated; nothing changed."""


class DatabaseUnreachable(MigrationError):
    """No database answers at this URL."""


class DatabaseTooOld(MigrationError):
    """The database was made by a version before the first release."""


class DatabaseNewer(MigrationError):
    """The database was migrated by a later Whetstone."""


def upgrade(url: str) -> None:
    """Bring the database at `url` to the last revision, all or nothing; one that is there already is left alone.

    Raises:
        DatabaseUnreachable: nothing answers at `url`, or it is no database URL.
        DatabaseTooOld: it was made by a version before the first release.
        DatabaseNewer: its revision is not among ours.
        MigrationError: its tables are in use all the time, or views that are not ours read ours.
    """
    from alembic import command

    with _transaction(url) as connection:
        if connection.dialect.name == "postgresql":
            connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK})
        config = configuration(connection)
        theirs, heads = _revisions(connection, config)
        if theirs == heads:
            return
        if connection.dialect.name == "postgresql" and theirs:
            _lock_all(connection)
        before = readers.granted(connection)
        try:
            command.upgrade(config, "head")
        except DBAPIError as error:
            if not isinstance(error.orig, DependentObjectsStillExist):
                raise
            detail = (error.orig.diag.message_detail or str(error.orig)).splitlines()[0]
            raise MigrationError(
                f"your own views read ours, which are replaced: drop yours, migrate, create them again ({detail})"
            ) from error
        if connection.dialect.name == "postgresql":
            # A view that was replaced has lost both.
            readers.restore(connection, before)
            views.comment(connection)


def check(connection: Connection) -> None:
    """See to it that the database is of this version, and leave it as it is.

    Raises:
        DatabaseTooOld: it was made by a version before the first release.
        DatabaseNewer: a later Whetstone migrated it.
        MigrationError: it is older than this version, which can upgrade it.
    """
    theirs, heads = _revisions(connection, configuration(connection))
    if theirs != heads:
        raise MigrationError("the database is of an earlier version: `whetstone migrate` brings it to this one")


def revision(connection: Connection) -> str:
    """Return the revision that the database is at.

    Raises:
        DatabaseTooOld: it was made by a version before the first release.
        DatabaseNewer: a later Whetstone migrated it.
        MigrationError: it has no tables of ours.
    """
    theirs, _ = _revisions(connection, configuration(connection))
    if not theirs:
        raise MigrationError("the database has no tables of Whetstone: check the URL, or start the stack first")
    return ", ".join(sorted(theirs))


def configuration(connection: Connection) -> "Config":
    """Alembic's configuration for a connection whose transaction the caller commits."""
    from alembic.config import Config

    config = Config(attributes={"connection": connection})
    config.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    return config


def _lock_all(connection: Connection) -> None:
    """Lock everything before the first table is changed, or nothing: programs of the version before may be writing.

    Locks that are taken one by one, in another order than a program takes them, are a deadlock, of which PostgreSQL
    may end either side. So the move asks for all at once, and gives way before anybody looks for deadlocks.

    Raises:
        MigrationError: other connections used the tables all the time.
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


def _revisions(connection: Connection, config: "Config") -> tuple[set[str], set[str]]:
    """Return the revision that the database is at and the last one, each as a set.

    Raises:
        DatabaseTooOld: it was made by a version before the first release.
        DatabaseNewer: its revision is not among ours.
    """
    from alembic.migration import MigrationContext
    from alembic.script import ScriptDirectory

    script = ScriptDirectory.from_config(config)
    theirs = set(MigrationContext.configure(connection).get_current_heads())
    if theirs & BEFORE_THE_FIRST_RELEASE:
        raise DatabaseTooOld(
            f"the database is at revision {', '.join(sorted(theirs))}, of a version before the first release, and "
            "cannot be upgraded: export what you need with the version that made it (`whetstone export`), then start "
            "with a new database."
        )
    if unknown := theirs - {revision.revision for revision in script.walk_revisions()}:
        raise DatabaseNewer(
            f"the database is at revision {', '.join(sorted(unknown))}, which this version of Whetstone does "
            "not know: a later one migrated it. Run that one, or restore a backup."
        )
    return theirs, set(script.get_heads())


@contextmanager
def _transaction(url: str) -> Iterator[Connection]:
    with ExitStack() as stack:
        try:
            engine = connect(url)
            stack.callback(engine.dispose)
            connection = stack.enter_context(engine.begin())
        except ArgumentError as error:
            raise DatabaseUnreachable(
                f"{without_password(url)!r} is no database URL; write sqlite:////path/to/whetstone.db or "
                "postgresql+psycopg://user@host/name"
            ) from error
        except DBAPIError as error:
            raise DatabaseUnreachable(
                f"no database answers at {without_password(url)}: {str(error.orig).strip()}. "
                "Check that it runs, that the URL is right and that this user may write there."
            ) from error
        yield connection
