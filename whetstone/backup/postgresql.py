"""Copy a PostgreSQL database by pg_dump while programs write to it, and restore the copy by pg_restore."""

import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg.conninfo
from sqlalchemy import URL, inspect, make_url, text
from sqlalchemy.exc import DBAPIError

from whetstone.backup import rows
from whetstone.backup.archive import BackupError
from whetstone.database.engine import connect, snapshot, without_password

_MOST_OF_A_MESSAGE = 2000


def copy(url: str, target: Path) -> rows.Facts:
    """Dump the database as of one moment, and return what it contained then. Writers go on meanwhile.

    Raises:
        BackupError: pg_dump is not installed, is older than the server, or failed.
        MigrationError: the database has no tables of ours.
    """
    with snapshot(url) as connection:
        facts = rows.read(connection)
        name = connection.execute(text("SELECT pg_export_snapshot()")).scalar_one()
        target.touch(0o600)
        _run("pg_dump", url, "--format=custom", f"--snapshot={name}", f"--file={target}")
    return facts


def check_empty(url: str) -> None:
    """Check that nothing would be mixed with what is there.

    Raises:
        BackupError: the database has tables or views.
    """
    engine = connect(url)
    try:
        with engine.connect() as connection:
            there = inspect(connection)
            names = [*there.get_table_names(), *there.get_view_names()]
    finally:
        engine.dispose()
    if names:
        raise BackupError(
            f"{without_password(url)} is not empty ({', '.join(sorted(names)[:3])}, …): create a database for the "
            "backup (createdb NAME) and name it in `database` or WHETSTONE_DATABASE"
        )


def restore(url: str, dump: Path) -> None:
    """Restore a dump into an empty database, completely or not at all.

    Raises:
        BackupError: pg_restore is not installed, is older than what made the dump, or failed.
    """
    _run("pg_restore", url, "--single-transaction", "--exit-on-error", "--no-owner", "--no-privileges", operand=dump)


@contextmanager
def throw_away_database(url: str) -> Iterator[str]:
    """Create a database on the same server, yield its URL, and drop it.

    Raises:
        BackupError: the role may not create databases.
    """
    name = f"whetstone_check_{secrets.token_hex(4)}"
    engine = connect(url).execution_options(isolation_level="AUTOCOMMIT")
    try:
        try:
            with engine.connect() as connection:
                connection.execute(text(f"CREATE DATABASE {name} TEMPLATE template0"))
        except DBAPIError as error:
            raise BackupError(
                f"--check restores into a database of its own, which could not be created: {str(error.orig).strip()}. "
                "Let the role create databases (ALTER ROLE … CREATEDB), or name another server in WHETSTONE_DATABASE"
            ) from error
        try:
            yield make_url(url).set(database=name).render_as_string(hide_password=False)
        finally:
            with engine.connect() as connection:
                connection.execute(text(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)"))
    finally:
        engine.dispose()


def _run(program: str, url: str, *options: str, operand: Path | None = None) -> None:
    path = shutil.which(program)
    if path is None:
        raise BackupError(
            f"{program} is not installed: install PostgreSQL's client programs (Debian: postgresql-client), of the "
            "server's version or a later one"
        )
    conninfo, password = _conninfo(make_url(url))
    # Other users can read a command line.
    environment = {**os.environ, **({"PGPASSWORD": password} if password else {})}
    command = [path, *options, f"--dbname={conninfo}", *([str(operand)] if operand else [])]
    done = subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if done.returncode:
        message = done.stderr.strip()[-_MOST_OF_A_MESSAGE:] or f"exit code {done.returncode}"
        is_old = "version mismatch" in message or "unsupported version" in message
        remedy = (
            "; install PostgreSQL's client programs of the server's version or a later one, and put their folder first "
            "in PATH"
        )
        raise BackupError(f"{program} failed: {message}{remedy if is_old else ''}")


def _conninfo(url: URL) -> tuple[str, str | None]:
    """Return libpq's connection string without the password, and the password."""
    _, arguments = url.get_dialect()().create_connect_args(url)
    password = arguments.pop("password", None)
    return psycopg.conninfo.make_conninfo(**arguments), password
