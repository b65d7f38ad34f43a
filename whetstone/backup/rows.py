"""Read from a database what a backup must match: its schema's revision, the rows of each table, its adapters."""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from sqlalchemy import Connection, func, inspect, select, table

from migrations import run, schema

v = schema.policy_versions.c


class Adapter(NamedTuple):
    """A version's adapter."""

    version: str
    folder: Path
    manifest_sha256: str | None
    is_live: bool


@dataclass(frozen=True)
class Facts:
    """What a database contains at one moment."""

    revision: str
    rows: dict[str, int]
    adapters: list[Adapter]


def read(connection: Connection) -> Facts:
    """Read the facts in the connection's transaction.

    Raises:
        MigrationError: the database has no tables of ours, or is of a version that this one does not read.
    """
    revision = run.revision(connection)
    names = sorted(set(inspect(connection).get_table_names()) - {"alembic_version"})
    rows = {name: connection.execute(select(func.count()).select_from(table(name))).scalar_one() for name in names}
    return Facts(revision, rows, adapters(connection))


def adapters(connection: Connection) -> list[Adapter]:
    """Return the adapters that retention has not removed."""
    query = (
        select(v.id, v.adapter_path, v.manifest_sha256, v.state)
        .where(v.adapter_path.is_not(None), v.removed_at.is_(None))
        .order_by(v.project, v.policy, v.version)
    )
    return [Adapter(row.id, Path(row.adapter_path), row.manifest_sha256, row.state == "live")
            for row in connection.execute(query)]  # fmt: skip


def move_adapters(connection: Connection, moved: dict[str, Path]) -> None:
    """Replace the adapters' paths: the path in the database -> the new folder."""
    for before, folder in moved.items():
        connection.execute(
            schema.policy_versions.update().where(v.adapter_path == before).values(adapter_path=str(folder))
        )


def differences(expected: dict[str, int], rows: dict[str, int]) -> list[str]:
    """Return the tables whose number of rows is not the expected one."""
    return [
        f"{name}: {rows.get(name, 0)} rows, the backup was made with {expected.get(name, 0)}"
        for name in sorted(expected.keys() | rows.keys())
        if expected.get(name) != rows.get(name)
    ]
