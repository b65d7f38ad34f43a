"""Read the state of adapters that still have a folder from SQL, and mark adapters as removed."""

from collections.abc import Collection
from datetime import datetime
from pathlib import Path

from sqlalchemy import Connection, Engine, select

from migrations import schema
from trainer.adapters.retention import Choose, StoredAdapter
from trainer.store.eligible_groups import policy_names
from whetstone.database.engine import chunks
from whetstone.registry.versions import lock

v = schema.policy_versions.c


class RetentionStore:
    """The tables, through one engine."""

    def __init__(self, engine: Engine, project: str, home: str | None = None) -> None:
        """`home`: the project that the servers' rows belong to; default: this project."""
        self._engine = engine
        self._reader = engine.execution_options(isolation_level="AUTOCOMMIT")
        self._project = project
        self._home = home or project

    def policies(self) -> list[str]:
        """Return the project's policies."""
        with self._reader.connect() as connection:
            return sorted(policy_names(connection, self._project))

    def mark(self, policy: str, choose: Choose, now: datetime) -> list[Path]:
        """Mark the adapters that `choose` picks as removed. Return their folders.

        After that no process can promote, pin or load them. Meanwhile none does either, because that takes the policy's
        lock.
        """
        with self._engine.begin() as connection:
            if lock(connection, self._project, policy) is None:
                return []
            chosen = choose(_stored_adapters(connection, self._project, policy, self._home))
            ids = [adapter.name for adapter in chosen]
            for some in chunks(ids):
                is_it = (v.project == self._project, v.id.in_(some))
                connection.execute(schema.policy_versions.update().where(*is_it).values(removed_at=now))
        return [adapter.folder for adapter in chosen]

    def removed(self, folders: Collection[Path]) -> list[Path]:
        """Return the folders of removed versions that still exist and that no other version needs."""
        unneeded: list[str] = []
        needed: list[str] = []
        with self._reader.connect() as connection:
            for some in chunks([str(folder) for folder in folders]):
                query = select(v.adapter_path, v.removed_at).where(v.adapter_path.in_(some))
                for path, removed_at in connection.execute(query):
                    (needed if removed_at is None else unneeded).append(path)
        return [Path(path) for path in sorted(set(unneeded) - set(needed))]


class ManifestStore:
    """The hashes of all adapters' manifests, of all projects: an adapter store is one for a database."""

    def __init__(self, engine: Engine) -> None:
        self._reader = engine.execution_options(isolation_level="AUTOCOMMIT")

    def standing(self) -> list[tuple[str, Path]]:
        """Return the adapters that are not removed: the manifest's SHA-256, and the folder."""
        query = select(v.manifest_sha256, v.adapter_path).where(
            v.manifest_sha256.is_not(None), v.adapter_path.is_not(None), v.removed_at.is_(None)
        )
        with self._reader.connect() as connection:
            return [(row.manifest_sha256, Path(row.adapter_path)) for row in connection.execute(query)]

    def recorded(self, hashes: Collection[str]) -> set[str]:
        """Return those of these hashes that the database has, also of removed versions."""
        recorded: set[str] = set()
        with self._reader.connect() as connection:
            for some in chunks(sorted(hashes)):
                query = select(v.manifest_sha256).where(v.manifest_sha256.in_(some))
                recorded.update(connection.execute(query).scalars())
        return recorded


def _stored_adapters(connection: Connection, project: str, policy: str, home: str) -> list[StoredAdapter]:
    """Return the policy's adapters that are not removed, the newest first, with the facts for retention."""
    r, s = schema.replicas.c, schema.steps.c
    lists = connection.execute(select(r.adapters).where(r.project == home)).scalars()
    loaded = {name for names in lists for name in names or ()}
    unfinished = select(s.version_in).where(s.project == project, s.policy == policy, s.ended_at.is_(None))
    begun = set(connection.execute(unfinished).scalars())
    query = (
        select(schema.policy_versions)
        .where(v.project == project, v.policy == policy, v.adapter_path.is_not(None), v.removed_at.is_(None))
        .order_by(v.version.desc())
    )
    return [
        StoredAdapter(
            name=row.id,
            version=row.version,
            parent=row.parent,
            state=row.state,
            folder=Path(row.adapter_path),
            in_use=row.served or row.pinned_at is not None or row.id in loaded or row.version in begun,
            begun=row.version in begun,
            unserved_at=row.unserved_at or row.created_at,
            created_at=row.created_at,
            heldout_mean=row.heldout_mean,
        )
        for row in connection.execute(query)
    ]
