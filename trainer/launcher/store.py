"""The SQL of launches: one row for each run of the launcher's command."""

from datetime import datetime

from sqlalchemy import Engine, func, select

from migrations import schema

l = schema.launches.c  # noqa: E741
_LEFT = "the launcher was killed; whether what it started still ran is not known"


class LaunchTable:
    """The launches of one project's launcher."""

    def __init__(self, engine: Engine, project: str) -> None:
        self._engine = engine
        self._project = project

    def begin(self, reason: str, now: datetime) -> int:
        """Record a launch, and return its number. A former one whose end nobody recorded ends now, without a cost."""
        with self._engine.begin() as connection:
            own = l.project == self._project
            left = schema.launches.update().where(own, l.ended_at.is_(None))
            connection.execute(left.values(ended_at=now, error=_LEFT))
            number: int = connection.execute(select(func.coalesce(func.max(l.number), 0)).where(own)).scalar_one() + 1
            row = {"project": self._project, "number": number, "reason": reason, "created_at": now}
            connection.execute(schema.launches.insert().values(row))
        return number

    def end(
        self, number: int, now: datetime, *, exit_code: int | None, error: str | None, usd_per_hour: float | None
    ) -> int:
        """Record how a launch ended, and return the number of steps that ended while it ran, in all projects."""
        s = schema.steps.c
        with self._engine.begin() as connection:
            own = (l.project == self._project, l.number == number)
            began: datetime = connection.execute(select(l.created_at).where(*own)).scalar_one()
            count = select(func.count()).where(s.ended_at >= began, s.ended_at <= now, s.state != "noop")
            steps: int = connection.execute(count).scalar_one()
            hours = (now - began).total_seconds() / 3600
            connection.execute(
                schema.launches.update()
                .where(*own)
                .values(
                    ended_at=now,
                    exit_code=exit_code,
                    error=error,
                    steps=steps,
                    cost_usd=None if usd_per_hour is None else usd_per_hour * hours,
                )
            )
        return steps
