"""Read and write pauses in SQL: a step has the accelerator that it shares with vLLM, and the proxies stop for it."""

from datetime import datetime, timedelta

from sqlalchemy import Engine, func, or_, select

from migrations import schema
from trainer.domain.claims import Claim
from trainer.store.step_ends import update_step

GONE_AFTER_S = 15.0
"""A proxy that has not reported for this long is no longer waited for; the proxies use the same limit for one another.
"""

p, x = schema.projects.c, schema.proxies.c


class PauseStore:
    """The tables, through one engine."""

    def __init__(self, engine: Engine, project: str) -> None:
        self._engine = engine
        self._reader = engine.execution_options(isolation_level="AUTOCOMMIT")
        self._project = project

    def ask(self, pause_id: str, now: datetime, lease_s: float) -> bool:
        """Request that the proxies stop; return False while another pause lasts."""
        free = or_(p.pause_id.is_(None), p.pause_until.is_(None), p.pause_until <= now)
        values = {"pause_id": pause_id, "pause_until": now + timedelta(seconds=lease_s)}
        with self._engine.begin() as connection:
            query = schema.projects.update().where(p.id == self._project, free).values(values)
            return connection.execute(query).rowcount > 0

    def renew(self, pause_id: str, now: datetime, lease_s: float) -> bool:
        """Extend the pause to `lease_s` seconds from now; return False where it is over already."""
        ours = (p.id == self._project, p.pause_id == pause_id, p.pause_until > now)
        until = now + timedelta(seconds=lease_s)
        with self._engine.begin() as connection:
            query = schema.projects.update().where(*ours).values(pause_until=until)
            return connection.execute(query).rowcount > 0

    def clear(self, pause_id: str) -> None:
        """End the pause."""
        with self._engine.begin() as connection:
            ours = (p.id == self._project, p.pause_id == pause_id)
            connection.execute(schema.projects.update().where(*ours).values(pause_id=None, pause_until=None))

    def moving(self, pause_id: str, now: datetime) -> dict[str, str]:
        """Return the proxies that have not stopped yet, with the reason that each of them reports."""
        live = (x.project == self._project, x.seen_at > now - timedelta(seconds=GONE_AFTER_S))
        in_flight = func.coalesce(x.in_flight, 0)
        query = select(x.id, x.pause_seen, in_flight.label("in_flight")).where(*live)
        unaware = or_(x.pause_seen.is_(None), x.pause_seen != pause_id)
        with self._reader.connect() as connection:
            rows = connection.execute(query.where(or_(unaware, in_flight > 0))).all()
        return {
            row.id: f"{row.in_flight} calls on their way" if row.pause_seen == pause_id else "has not noticed yet"
            for row in rows
        }

    def hand_back(self, claim: Claim, now: datetime, retry_s: float) -> None:
        """Release a step that cannot go on now.

        After `retry_s` any worker may take it again, and this attempt does not count.

        Raises:
            LeaseLost: another worker has the step.
        """
        with self._engine.begin() as connection:
            lease_until = now + timedelta(seconds=retry_s)
            update_step(connection, claim, attempt=claim.attempt - 1, lease_until=lease_until)
