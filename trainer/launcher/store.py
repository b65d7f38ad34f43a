"""The SQL of launches: one row for each run of the launcher's command."""

from datetime import datetime

from sqlalchemy import Connection, Engine, func, select

from migrations import schema

own = schema.launches.c
LEFT = "the launcher was killed; whether what it started still ran is not known"
VAIN = "no step was taken while the command ran"


class LaunchTable:
    """The launches of one launcher, in its project's rows."""

    def __init__(self, engine: Engine, project: str) -> None:
        self._engine = engine
        self._project = project

    def begin(self, reason: str, now: datetime) -> int:
        """Record a launch, and return its number. A former one whose end nobody recorded ends now, without a cost."""
        with self._engine.begin() as connection:
            left = schema.launches.update().where(own.project == self._project, own.ended_at.is_(None))
            connection.execute(left.values(ended_at=now, error=LEFT))
            last = select(func.coalesce(func.max(own.number), 0)).where(own.project == self._project)
            number: int = connection.execute(last).scalar_one() + 1
            row = {"project": self._project, "number": number, "reason": reason, "created_at": now}
            connection.execute(schema.launches.insert().values(row))
        return number

    def end(
        self, number: int, now: datetime, *, exit_code: int | None, error: str | None, usd_per_hour: float | None
    ) -> int:
        """Record how a launch ended, and return the number of steps that were taken while it ran, in all projects.

        Without an error, one that took no step has VAIN as its error.
        """
        with self._engine.begin() as connection:
            here = (own.project == self._project, own.number == number)
            began: datetime = connection.execute(select(own.created_at).where(*here)).scalar_one()
            steps = _steps(connection, began, now)
            values = {
                "ended_at": now,
                "exit_code": exit_code,
                "error": error if error or steps else VAIN,
                "steps": steps,
                "cost_usd": None if usd_per_hour is None else usd_per_hour * (now - began).total_seconds() / 3600,
            }
            connection.execute(schema.launches.update().where(*here).values(values))
        return steps


def _steps(connection: Connection, began: datetime, ended: datetime) -> int:
    """Return the number of steps that made a version, or ended without one, in this time.

    Not those that went live: the gate may test a version for hours after its step's machine is gone.
    """
    s, v = schema.steps.c, schema.policy_versions.c
    made = select(func.count()).where(v.step.is_not(None), v.created_at.between(began, ended))
    without = select(func.count()).where(s.version_out.is_(None), s.ended_at.between(began, ended))
    return int(connection.execute(made).scalar_one() + connection.execute(without).scalar_one())
