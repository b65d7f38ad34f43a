"""The proxy's SQL for vLLM servers: what they should have loaded, their state, and the pauses of a shared
accelerator."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from sqlalchemy import Engine, or_, select

from migrations import schema
from whetstone.database.change_detector import Changes
from whetstone.database.engine import insert_new
from whetstone.domain.states import VersionState

v, r, p, j = schema.policy_versions.c, schema.replicas.c, schema.proxies.c, schema.projects.c


@dataclass(frozen=True)
class Adapter:
    """The files of a version."""

    folder: Path
    manifest_sha256: str | None
    """Hash of the folder's manifest; None if it was not recorded."""


@dataclass(frozen=True)
class DesiredAdapters:
    """What every server should have loaded."""

    adapters: dict[str, Adapter]
    """Adapters to load, by name; live versions first."""
    retained: frozenset[str]
    """Adapters not to unload: those in `adapters`, and versions that are still undecided."""


@dataclass(frozen=True)
class Pause:
    """A step has the accelerator that vLLM shares."""

    id: str
    until: datetime


class ReplicaTables:
    """The queries and reports of `reconciler` and `device_pause`."""

    def __init__(self, engine: Engine, home: str, projects: Sequence[str], changes: Changes | None = None) -> None:
        """Create the store. `home`: the project of the servers' rows and the pauses. `projects`: the projects whose
        versions the servers serve."""
        self._engine = engine
        self._changes = changes or Changes(engine)
        self._reader = engine.execution_options(isolation_level="AUTOCOMMIT")
        self._project = home
        self._projects = projects

    def wanted(self) -> DesiredAdapters:
        """Return what to load, and what not to unload."""
        return self._changes.unless("wanted", self._wanted)

    def _wanted(self) -> DesiredAdapters:
        unsettled = v.state.in_((VersionState.BUILDING, VersionState.CANDIDATE))
        query = (
            select(v.id, v.adapter_path, v.manifest_sha256, v.served)
            .where(v.project.in_(self._projects), or_(v.served, unsettled))
            .order_by(v.state != VersionState.LIVE, v.version.desc())
        )
        with self._reader.connect() as connection:
            rows = connection.execute(query).all()
        adapters = {
            row.id: Adapter(Path(row.adapter_path), row.manifest_sha256)
            for row in rows
            if row.served and row.adapter_path is not None
        }
        return DesiredAdapters(adapters, frozenset(row.id for row in rows))

    def report_replica(
        self, url: str, state: str, adapters: Sequence[str], reason: str | None, seen_at: datetime | None
    ) -> None:
        """Report the state of a server. `seen_at` is None if it has not answered since this process started to check
        it."""
        report: dict[str, object] = {"state": state, "adapters": list(adapters), "reason": reason}
        with self._engine.begin() as connection:
            row = {"project": self._project, "id": url, **report, "seen_at": seen_at or datetime.now(UTC)}
            if not insert_new(connection, schema.replicas, row):
                report |= {} if seen_at is None else {"seen_at": seen_at}
                this = schema.replicas.update().where(r.project == self._project, r.id == url)
                connection.execute(this.values(**report))

    def forget_replicas(self, but: Sequence[str]) -> None:
        """Delete the rows of servers that are no longer in the settings: no process updates them."""
        with self._engine.begin() as connection:
            connection.execute(schema.replicas.delete().where(r.project == self._project, r.id.not_in(but)))

    def pause(self) -> Pause | None:
        """Return the pause of the step that has the accelerator, over or not; None if there is none."""
        return self._changes.unless("pause", self._pause)

    def _pause(self) -> Pause | None:
        query = select(j.pause_id, j.pause_until).where(
            j.id == self._project, j.pause_id.is_not(None), j.pause_until.is_not(None)
        )
        with self._reader.connect() as connection:
            row = connection.execute(query).one_or_none()
        return None if row is None else Pause(*row)

    def report_calls(self, proxy_id: str, in_flight: int, waiting: int, pause_seen: str | None) -> bool:
        """Report the calls that this proxy has in flight, and which pause it observes.

        Returns whether the proxy has its row yet.
        """
        this = schema.proxies.update().where(p.project == self._project, p.id == proxy_id)
        with self._engine.begin() as connection:
            reported = connection.execute(this.values(in_flight=in_flight, waiting=waiting, pause_seen=pause_seen))
            return reported.rowcount > 0
