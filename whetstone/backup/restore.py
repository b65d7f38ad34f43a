"""Verify a backup, and put its parts into an empty data folder and an empty database."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from sqlalchemy import Connection, Engine, make_url

from whetstone.backup import postgresql, rows, sqlite
from whetstone.backup.archive import (
    ADAPTERS,
    CONFIG,
    FEEDBACK_SECRETS,
    JOURNAL,
    POSTGRESQL_DUMP,
    SQLITE_FILE,
    BackupError,
    Manifest,
    NotABackup,
    extract,
)
from whetstone.config.settings import Settings
from whetstone.database.engine import connect, without_password
from whetstone.registry.adapters import AdapterDamaged, verify
from whetstone.stack import data_lock

TEMPORARY = ".restore-"


@dataclass
class RestoreReport:
    """What a backup contained, and what is wrong with it."""

    manifest: Manifest
    faults: list[str] = field(default_factory=list)
    """Empty: everything matches."""


def check(path: Path, settings: Settings) -> RestoreReport:
    """Restore a backup into a temporary folder (PostgreSQL: also into a temporary database), and compare it.

    Raises:
        BackupError: it is no backup of ours, is incomplete or altered, or could not be tried.
        MigrationError: a later version made it.
    """
    with tempfile.TemporaryDirectory(prefix="whetstone-check-") as temporary:
        folder = Path(temporary)
        manifest = extract(path, folder)
        if manifest.database == "sqlite":
            return RestoreReport(manifest, _faults(manifest, folder, _sqlite_facts(folder)))
        _need_kind(settings, manifest)
        with postgresql.throw_away_database(settings.database_url) as url:
            postgresql.restore(url, folder / POSTGRESQL_DUMP)
            with _reading(url) as connection:
                return RestoreReport(manifest, _faults(manifest, folder, rows.read(connection)))


def restore(path: Path, settings: Settings) -> RestoreReport:
    """Restore a backup into the settings' data folder and database, which must both be empty.

    Raises:
        BackupError: nothing was restored; the message says what to do.
        MigrationError: a later version made the backup.
    """
    data = settings.data.resolve()
    _check_empty(data)
    data.mkdir(parents=True, exist_ok=True)
    # On the same file system, so that all that is left to do at the end is to rename.
    folder = Path(tempfile.mkdtemp(prefix=TEMPORARY, dir=data))
    try:
        manifest = extract(path, folder)
        _need_kind(settings, manifest)
        moved = {before: data / ADAPTERS / name for name, before in manifest.adapters.items()}
        if manifest.database == "sqlite":
            target = Path(make_url(settings.database_url).database or "")
            if target.exists():
                raise BackupError(f"{target} is there already: name another file in `database`, or move it away")
            result = RestoreReport(manifest, _faults(manifest, folder, _sqlite_facts(folder)))
            _refuse_damaged(path, result.faults)
            _move_adapters(sqlite.engine_of(folder / SQLITE_FILE), moved)
            _place(folder, data, manifest)
            shutil.move(folder / SQLITE_FILE, target)
            return result
        postgresql.check_empty(settings.database_url)
        _refuse_damaged(path, _adapter_faults(manifest, folder, None))
        postgresql.restore(settings.database_url, folder / POSTGRESQL_DUMP)
        with _reading(settings.database_url) as connection:
            result = RestoreReport(manifest, _faults(manifest, folder, rows.read(connection)))
        _move_adapters(connect(settings.database_url), moved)
        _place(folder, data, manifest)
        return result
    except OSError as error:
        raise BackupError(f"{error.filename or data}: {error.strerror or error}; empty {data} and try again") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _check_empty(data: Path) -> None:
    """Check that nothing would be overwritten or mixed: empty folders may be there, as in a container.

    Raises:
        BackupError: a file is there, or a stack runs there.
    """
    if data_lock.is_locked(data):
        raise BackupError(f"a stack runs on {data}: stop it, or name another folder with --data")
    there = [path for path in sorted(data.rglob("*")) if not path.is_dir() and path != data / data_lock.LOCK]
    if there:
        names = ", ".join(str(path.relative_to(data)) for path in there[:3])
        raise BackupError(
            f"{data} is not empty ({names}{', …' if there[3:] else ''}): name a new folder with --data, or move these "
            "files away"
        )


def _need_kind(settings: Settings, manifest: Manifest) -> None:
    """Check that the settings name a database of the backup's kind."""
    kind = "sqlite" if make_url(settings.database_url).get_backend_name() == "sqlite" else "postgresql"
    if kind == manifest.database:
        return
    if manifest.database == "postgresql":
        raise BackupError(
            "the backup is of PostgreSQL: name an empty database, "
            "WHETSTONE_DATABASE=postgresql+psycopg://user@host/name (for --check any database of the server)"
        )
    raise BackupError(
        f"the backup is of SQLite, and the settings name {without_password(settings.database_url)}: take `database` "
        "out of the settings for this"
    )


def _sqlite_facts(folder: Path) -> rows.Facts:
    if not (folder / SQLITE_FILE).exists():
        raise NotABackup(f"it has no {SQLITE_FILE}")
    sqlite.check(folder / SQLITE_FILE)
    return sqlite.read(folder / SQLITE_FILE)


@contextmanager
def _reading(url: str) -> Iterator[Connection]:
    engine = connect(url)
    try:
        with engine.connect() as connection:
            yield connection
    finally:
        engine.dispose()


def _faults(manifest: Manifest, folder: Path, facts: rows.Facts) -> list[str]:
    faults = rows.differences(manifest.rows, facts.rows)
    if facts.revision != manifest.revision:
        faults.append(f"the schema is at revision {facts.revision}, the backup was made at {manifest.revision}")
    return [*faults, *_adapter_faults(manifest, folder, facts.adapters)]


def _adapter_faults(manifest: Manifest, folder: Path, adapters: list[rows.Adapter] | None) -> list[str]:
    """Return which adapters are missing or damaged; of versions, if they are known, also which have none."""
    hashes: dict[str, str] = {}
    faults = []
    for name in manifest.adapters:
        try:
            hashes[name] = verify(folder / ADAPTERS / name)
        except AdapterDamaged as error:
            faults.append(f"adapter {error}".replace(f"{folder}{os.sep}", ""))
    by_path = {path: name for name, path in manifest.adapters.items()}
    for adapter in adapters or ():
        name = by_path.get(str(adapter.folder), "")
        live = ", which is live" if adapter.is_live else ""
        if not name and adapter.version in manifest.missing:
            faults.append(f"{adapter.version}{live}, had no adapter at {adapter.folder} when the backup was made")
        elif name in hashes and adapter.manifest_sha256 not in (None, hashes[name]):
            faults.append(f"{adapter.version}{live}: its adapter is not the one that the database names")
    return faults


def _refuse_damaged(path: Path, faults: list[str]) -> None:
    """Refuse what is damaged; that an adapter was missing already when the backup was made is no reason."""
    if damaged := [fault for fault in faults if "when the backup was made" not in fault]:
        raise NotABackup(f"{path} is damaged, nothing was restored: {'; '.join(damaged)}")


def _move_adapters(engine: Engine, moved: dict[str, Path]) -> None:
    try:
        with engine.begin() as connection:
            rows.move_adapters(connection, moved)
    finally:
        engine.dispose()


def _place(folder: Path, data: Path, manifest: Manifest) -> None:
    """Move everything but the database into the data folder."""
    for name in manifest.adapters:
        (data / ADAPTERS).mkdir(exist_ok=True)
        (folder / ADAPTERS / name).rename(data / ADAPTERS / name)
    for path in sorted((folder / JOURNAL).glob("*")):
        (data / JOURNAL).mkdir(mode=0o700, exist_ok=True)
        path.rename(data / JOURNAL / path.name)
    for name in (CONFIG, FEEDBACK_SECRETS):
        if (folder / name).exists():
            (folder / name).rename(data / name)
