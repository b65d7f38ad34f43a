"""Copy a SQLite database while programs write to it, and check a copy."""

import sqlite3
from contextlib import closing
from pathlib import Path

from sqlalchemy import Engine, create_engine, make_url

from whetstone.backup import rows
from whetstone.backup.archive import BackupError, NotABackup
from whetstone.database.engine import BUSY_TIMEOUT_MS


def copy(url: str, target: Path) -> rows.Facts:
    """Copy the database into one file, as of one moment, and return what it contains. Writers go on meanwhile.

    Raises:
        BackupError: the database cannot be read, or the disk refuses.
        MigrationError: it has no tables of ours.
    """
    source = make_url(url).database or ""
    if not Path(source).is_file():
        raise BackupError(f"there is no database {source}; start the stack with `whetstone up` first")
    target.touch(0o600)
    try:
        # In write-ahead mode all pages in one go are a snapshot; page by page it would begin again with each write.
        with _open(source) as reading, _open(str(target)) as writing:
            reading.backup(writing, pages=-1)
            # One file, without a log beside it.
            writing.execute("PRAGMA journal_mode = DELETE")
    except sqlite3.Error as error:
        raise BackupError(f"{source} cannot be copied to {target.parent}: {error}") from error
    return read(target)


def read(path: Path) -> rows.Facts:
    """Return what a copy contains.

    Raises:
        MigrationError: it has no tables of ours, or is of a version that this one does not read.
    """
    engine = engine_of(path)
    try:
        with engine.connect() as connection:
            return rows.read(connection)
    finally:
        engine.dispose()


def check(path: Path) -> None:
    """Have SQLite check every page and index of a copy.

    Raises:
        NotABackup: it is damaged.
    """
    try:
        with _open(str(path)) as connection:
            (first, *_) = connection.execute("PRAGMA integrity_check(1)").fetchone()
    except sqlite3.Error as error:
        raise NotABackup(f"{path.name} is damaged: {error}") from error
    if first != "ok":
        raise NotABackup(f"{path.name} is damaged: {first}")


def engine_of(path: Path) -> Engine:
    """Return an engine that leaves the file's journal mode as it is; programs set theirs when they open it."""
    return create_engine(f"sqlite:///{path}")


def _open(path: str) -> closing[sqlite3.Connection]:
    return closing(sqlite3.connect(path, timeout=BUSY_TIMEOUT_MS / 1000, isolation_level=None))
