"""SQL of what other companies' servers have cost in a day (UTC), as the spending cap counts it. Reads only.

Judges: the costs that the judging worker has stored. Upstreams: the tokens of recorded calls, from the roll-ups, at the
prices of the settings.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from sqlalchemy import Connection, column, func, select, table

from migrations import schema
from whetstone.config.settings import Settings

d = schema.judge_days.c
h = table("admin_completion_hours", *map(column, ("project", "hour", "policy", "prompt_tokens", "sampled_tokens"))).c


@dataclass(frozen=True)
class Spending:
    """What was spent on a day, in US dollars."""

    day: str
    """YYYY-MM-DD, in UTC."""
    judges: Mapping[str, float]
    """By project."""
    upstreams: Mapping[tuple[str, str], float]
    """By project and policy."""

    @property
    def judges_usd(self) -> float:
        """Return what judges cost."""
        return sum(self.judges.values())

    @property
    def upstreams_usd(self) -> float:
        """Return what answers of other servers cost, those of teachers included."""
        return sum(self.upstreams.values())

    @property
    def usd(self) -> float:
        """Return what everything cost."""
        return self.judges_usd + self.upstreams_usd

    def of_project(self, project: str) -> float:
        """Return what one project spent."""
        upstreams = sum(usd for (owner, _), usd in self.upstreams.items() if owner == project)
        return self.judges.get(project, 0.0) + upstreams


def read_spending(connection: Connection, settings: Settings, now: datetime) -> Spending:
    """Return what all projects of the settings have spent on the day of `now`."""
    day, projects, prices = day_of(now), settings.all_projects, settings.upstream_prices
    cost = select(d.project, func.sum(d.cost_usd)).where(d.project.in_(projects), d.day == day).group_by(d.project)
    judges = {project: float(usd or 0.0) for project, usd in connection.execute(cost)}
    upstreams: dict[tuple[str, str], float] = {}
    if prices:
        sums = (func.coalesce(func.sum(h[name]), 0) for name in ("prompt_tokens", "sampled_tokens"))
        query = (
            select(h.project, h.policy, *sums)
            .where(h.project.in_(projects), h.policy.in_({policy for _, policy in prices}))
            .where(h.hour >= f"{day} 00:00", h.hour <= f"{day} 23:00")
            .group_by(h.project, h.policy)
        )
        for project, policy, read, answered in connection.execute(query):
            if price := prices.get((project, policy)):
                upstreams[project, policy] = price.usd(int(read), int(answered))
    return Spending(day, judges, upstreams)


def day_of(now: datetime) -> str:
    """Return the day, in UTC."""
    return now.astimezone(UTC).date().isoformat()


def next_day(now: datetime) -> datetime:
    """Return when the next day begins, in UTC."""
    return datetime.combine(now.astimezone(UTC).date() + timedelta(days=1), datetime.min.time(), UTC)
