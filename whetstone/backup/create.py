"""Back up a stack into one file while it runs.

The order makes the backup consistent. Programs move records from the journal to the database, so the journal is copied
first: a record is in the copy of one of them, or in both, and the proxy adds no record twice. Adapters are never
overwritten, so they are copied last, those that the database's copy names.
"""

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from sqlalchemy import make_url

from whetstone import __version__
from whetstone.backup import postgresql, rows, sqlite
from whetstone.backup.archive import (
    ADAPTERS,
    CONFIG,
    FEEDBACK_SECRETS,
    FORMAT,
    JOURNAL,
    POSTGRESQL_DUMP,
    SQLITE_FILE,
    BackupError,
    Kind,
    Manifest,
    Writer,
    finish,
    written,
)
from whetstone.config.settings import Settings
from whetstone.database.engine import connect, without_password

SUFFIX = ".tar"
JOURNAL_FILES = ("*.journal", "*.refused")


@dataclass(frozen=True)
class Backup:
    """A backup that was made."""

    file: Path
    bytes: int
    manifest: Manifest


def create(settings: Settings, target: Path, config: Path | None, *, secrets: bool) -> Backup:
    """Back up database, journal, adapters and settings into `target`, a new file, or a new file in this folder.

    `config`: the settings file, if there is one. `secrets`: with passwords in it, and the secret of feedback tokens.

    Raises:
        BackupError: the message says what to do. No part of the file remains.
        MigrationError: the database is not one of this version.
    """
    now = datetime.now(UTC)
    path = target / f"whetstone-{now:%Y%m%dT%H%M%SZ}{SUFFIX}" if target.is_dir() else target
    if path.suffix != SUFFIX:
        raise BackupError(f"{target}: name a folder that exists, or a new file that ends in {SUFFIX}")
    kind: Kind = "sqlite" if make_url(settings.database_url).get_backend_name() == "sqlite" else "postgresql"
    with written(path) as (writer, staged, tar):
        _add_journal(writer, settings.data / JOURNAL)
        facts = (sqlite if kind == "sqlite" else postgresql).copy(settings.database_url, staged)
        writer.add(SQLITE_FILE if kind == "sqlite" else POSTGRESQL_DUMP, staged)
        staged.unlink()
        adapters, missing = _add_adapters(writer, settings, facts.adapters)
        _add_settings(writer, settings.data, config, secrets=secrets)
        manifest = Manifest(
            FORMAT, __version__, now.isoformat(timespec="seconds"), kind, facts.revision, facts.rows, adapters, missing,
            secrets, dict(writer.files),
        )  # fmt: skip
        finish(tar, manifest)
    return Backup(path, path.stat().st_size, manifest)


def _add_journal(writer: Writer, journal: Path) -> None:
    for path in sorted(path for pattern in JOURNAL_FILES for path in journal.glob(pattern)):
        try:
            writer.add(f"{JOURNAL}/{path.name}", path)
        except FileNotFoundError:
            continue  # the database has all of its records


def _add_adapters(
    writer: Writer, settings: Settings, adapters: list[rows.Adapter]
) -> tuple[dict[str, str], dict[str, str]]:
    """Add the adapters. Return the folders' names with their paths, and the versions that have no adapter."""
    added: dict[str, str] = {}
    missing: dict[str, str] = {}
    for adapter in adapters:
        name, path = adapter.folder.name, str(adapter.folder)
        if added.get(name, path) != path:
            raise BackupError(f"two adapters are named {name}: {added[name]} and {path}")
        try:
            if name not in added:
                _add_folder(writer, f"{ADAPTERS}/{name}", adapter.folder)
            added[name] = path
        except FileNotFoundError:
            missing[adapter.version] = path
    if missing:
        # Retention may have removed some since the copy was made.
        engine = connect(settings.database_url)
        try:
            with engine.connect() as connection:
                still = {adapter.version for adapter in rows.adapters(connection)}
        finally:
            engine.dispose()
        missing = {version: path for version, path in missing.items() if version in still}
    return added, missing


def _add_folder(writer: Writer, name: str, folder: Path) -> None:
    for path in sorted(folder.iterdir()):
        writer.add(f"{name}/{path.name}", path)


def _add_settings(writer: Writer, data: Path, config: Path | None, *, secrets: bool) -> None:
    if config is not None and config.is_file():
        text = config.read_text(encoding="utf-8")
        writer.add_text(CONFIG, (text if secrets else without_password(text)).encode())
    if secrets and (data / FEEDBACK_SECRETS).is_file():
        writer.add(FEEDBACK_SECRETS, data / FEEDBACK_SECRETS)
