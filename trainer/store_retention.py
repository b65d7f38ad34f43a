"""The trainer's SQL of retention: what is known of adapters whose folders stand, and that one is removed."""

from collections.abc import Collection
from datetime import datetime
from pathlib import Path

from sqlalchemy import Connection, Engine, select

from migrations import schema
from migrations.database import chunks
from trainer.retention import Choose, Kept
from trainer.store_candidates import policy_names
from whetstone.store_versions import lock

v = schema.policy_versions.c


class RetentionStore:
    """The tables, through one engine."""

    def __init__(self, engine: Engine, project: str, home: str | None = None) -> None:
        """`home`: the project that the servers' rows are of; without it this one."""
        self._engine = engine
        self._reader = engine.execution_options(isolation_level="AUTOCOMMIT")
        self._project = project
        self._home = home or project

    def policies(self) -> list[str]:
        """The project's policies."""
        with self._reader.connect() as connection:
            return sorted(policy_names(connection, self._project))

    def mark(self, policy: str, choose: Choose, now: datetime) -> list[Path]:
        """Write down that adapters are removed, those that `choose` picks. Returns their folders.

        From then on nobody can promote, pin or load them; nobody does meanwhile, for that takes the policy's lock.
        """
        with self._engine.begin() as connection:
            if lock(connection, self._project, policy) is None:
                return []
            chosen = choose(_kept(connection, self._project, policy, self._home))
            ids = [adapter.name for adapter in chosen]
            for some in chunks(ids):
                is_it = (v.project == self._project, v.id.in_(some))
                connection.execute(schema.policy_versions.update().where(*is_it).values(removed_at=now))
        return [adapter.folder for adapter in chosen]

    def removed(self, folders: Collection[Path]) -> list[Path]:
        """Of these folders, those that no version needs any more: what was removed, but for the folder."""
        found: list[str] = []
        needed: list[str] = []
        with self._reader.connect() as connection:
            for some in chunks([str(folder) for folder in folders]):
                query = select(v.adapter_path, v.removed_at).where(v.adapter_path.in_(some))
                for path, removed_at in connection.execute(query):
                    (needed if removed_at is None else found).append(path)
        return [Path(path) for path in sorted(set(found) - set(needed))]


def _kept(connection: Connection, project: str, policy: str, home: str) -> list[Kept]:
    """The policy's adapters that are not removed, and what speaks for each, the newest first."""
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
        Kept(
            name=row.id,
            version=row.version,
            parent=row.parent,
            state=row.state,
            folder=Path(row.adapter_path),
            in_use=row.served or row.pinned_at is not None or row.id in loaded or row.version in begun,
            unserved_at=row.unserved_at or row.created_at,
            created_at=row.created_at,
            heldout_mean=row.heldout_mean,
        )
        for row in connection.execute(query)
    ]
