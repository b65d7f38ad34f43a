"""The proxy's SQL for vLLM's servers: what they are to have loaded, how they are, and the pauses of a shared device."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from sqlalchemy import Engine, or_, select

from migrations import schema
from migrations.database import insert_new
from proxy.store_changes import Changes

v, r, p = schema.policy_versions.c, schema.replicas.c, schema.proxies.c


@dataclass(frozen=True)
class Adapter:
    """A version's files."""

    folder: Path
    manifest_sha256: str | None
    """Hash of the folder's manifest; None where nobody noted it."""


@dataclass(frozen=True)
class Wanted:
    """What every server is to have."""

    adapters: dict[str, Adapter]
    """To be loaded, by name: live ones first."""
    kept: frozenset[str]
    """Not to be unloaded: those, and what is still to be decided on."""


@dataclass(frozen=True)
class Pause:
    """A step has the accelerator that vLLM shares."""

    id: str
    until: datetime


class ReplicaTables:
    """What `reconcile` and `pause` ask and tell."""

    def __init__(self, engine: Engine, home: str, projects: Sequence[str], changes: Changes | None = None) -> None:
        """`home`: the project that the servers' rows and the pauses are of; `projects`: those whose versions they
        serve."""
        self._engine = engine
        self._changes = changes or Changes(engine)
        self._reader = engine.execution_options(isolation_level="AUTOCOMMIT")
        self._project = home
        self._projects = projects

    def wanted(self) -> Wanted:
        """What is to be loaded, and what is not to be unloaded."""
        return self._changes.unless("wanted", self._wanted)

    def _wanted(self) -> Wanted:
        unsettled = v.state.in_(("building", "candidate"))
        query = (
            select(v.id, v.adapter_path, v.manifest_sha256, v.served)
            .where(v.project.in_(self._projects), or_(v.served, unsettled))
            .order_by(v.state != "live", v.version.desc())
        )
        with self._reader.connect() as connection:
            rows = connection.execute(query).all()
        adapters = {
            row.id: Adapter(Path(row.adapter_path), row.manifest_sha256)
            for row in rows
            if row.served and row.adapter_path is not None
        }
        return Wanted(adapters, frozenset(row.id for row in rows))

    def tell_replica(
        self, url: str, state: str, adapters: Sequence[str], reason: str | None, seen_at: datetime | None
    ) -> None:
        """Say how a server is; `seen_at` is None where it has not answered since this process looks for it."""
        told: dict[str, object] = {"state": state, "adapters": list(adapters), "reason": reason}
        now = datetime.now(UTC)
        with self._engine.begin() as connection:
            row = {"project": self._project, "id": url, **told, "seen_at": seen_at or now}
            if not insert_new(connection, schema.replicas, row):
                told |= {} if seen_at is None else {"seen_at": seen_at}
                this = (r.project == self._project, r.id == url)
                connection.execute(schema.replicas.update().where(*this).values(**told))

    def forget_replicas(self, but: Sequence[str]) -> None:
        """Drop the servers that the settings no longer name: nobody would look after them."""
        with self._engine.begin() as connection:
            gone = (r.project == self._project, r.id.not_in(but))
            connection.execute(schema.replicas.delete().where(*gone))

    def pause(self) -> Pause | None:
        """The step that has the accelerator, over or not; None while none has."""
        return self._changes.unless("pause", self._pause)

    def _pause(self) -> Pause | None:
        j = schema.projects.c
        query = select(j.pause_id, j.pause_until).where(j.id == self._project)
        with self._reader.connect() as connection:
            row = connection.execute(query).one_or_none()
        if row is None or row.pause_id is None or row.pause_until is None:
            return None
        return Pause(row.pause_id, row.pause_until)

    def tell_calls(self, proxy_id: str, in_flight: int, waiting: int, pause_seen: str | None) -> bool:
        """Say what this proxy has on its way, and which pause it keeps (`pause.Table`)."""
        told = {"in_flight": in_flight, "waiting": waiting, "pause_seen": pause_seen}
        this = (p.project == self._project, p.id == proxy_id)
        with self._engine.begin() as connection:
            return connection.execute(schema.proxies.update().where(*this).values(**told)).rowcount > 0
