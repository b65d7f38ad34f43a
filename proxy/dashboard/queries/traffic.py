"""The dashboard's SQL for traffic: sums by hour, policy or key from the roll-ups; times of single calls by an index.

Roll-ups have no percentiles. These are taken over the newest calls of each hour, a bounded number.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Literal

from sqlalchemy import (
    ColumnElement,
    Connection,
    Subquery,
    bindparam,
    case,
    column,
    func,
    literal_column,
    select,
    table,
    union_all,
)

from migrations import schema
from proxy.dashboard.queries.newest import equal
from whetstone.calls.store import Filter
from whetstone.database.types import Utc
from whetstone.domain.ids import IMPORTED_LOG

DAY_H = 24
EACH_HOUR = 200
"""Most calls of an hour that its percentiles are taken over."""
HOUR = timedelta(hours=1)
_MEASURES = ("prompt_tokens", "sampled_tokens", "ttft_count", "ttft_ms", "total_count", "total_ms")

ch = table(
    "admin_completion_hours",
    *(column(name) for name in ("project", "hour", "policy", "version", "key_id", "status", "completions", *_MEASURES)),
).c
th = table("admin_trajectory_hours", *map(column, ("project", "hour", "trajectories", "rewarded"))).c
fh = table("admin_feedback_hours", *map(column, ("project", "hour", "source", "feedback"))).c
c, p = schema.completions.c, schema.policies.c


@dataclass(frozen=True, slots=True)
class CallTimes:
    """The times of one call."""

    hour: int
    """Place of its hour."""
    ttft_ms: float | None
    total_ms: float | None


def hours_until(now: datetime) -> list[datetime]:
    """Return the beginnings of the last 24 full hours and of the present one, in order."""
    last = now.replace(minute=0, second=0, microsecond=0)
    return [last - hours * HOUR for hours in range(DAY_H, -1, -1)]


def sums(
    connection: Connection, wanted: Filter, by: Literal["hour", "policy", "key_id"], since: datetime
) -> list[dict[str, Any]]:
    """Return the sums of the calls since an hour, by a column and in its order: `calls`, the `errors` and
    `aborted` among them, their tokens and their times. Of the filter, policy, version and key hold. An imported log is
    no traffic.
    """
    logs = select(p.id).where(p.project == wanted.project, p.upstream == IMPORTED_LOG)
    counts: dict[str, ColumnElement[Any]] = {"calls": func.sum(ch.completions)}
    counts |= {name: func.sum(case((ch.status == of, ch.completions), else_=0)) for name, of in _ENDED.items()}
    counts |= {name: func.sum(ch[name]) for name in _MEASURES}
    query = (
        select(ch[by].label("by"), *(total.label(name) for name, total in counts.items()))
        .where(ch.project == wanted.project, ch.policy.not_in(logs), ch.hour >= f"{since:%Y-%m-%d %H:00}")
        .where(*equal((ch.policy, wanted.policy), (ch.version, wanted.version), (ch.key_id, wanted.key_id)))
        .group_by(ch[by])
        .having(counts["calls"] > 0)
        .order_by(ch[by])
    )
    numbers = {name: float if name.endswith("_ms") else int for name in counts}
    return [
        {"by": row.by, **{name: number(row._mapping[name]) for name, number in numbers.items()}}
        for row in connection.execute(query)
    ]


_ENDED = {"errors": "error", "aborted": "aborted"}


def sample(connection: Connection, wanted: Filter, hours: Sequence[datetime]) -> list[CallTimes]:
    """Return the times of the newest calls of each of the last 25 hours. Of the filter, policy, version and key hold;
    it chooses among the newest EACH_HOUR of all calls."""
    moments: dict[str, Any] = {f"since_{place}": hour for place, hour in enumerate(hours)}
    conditions = equal(
        (_sampled.policy, wanted.policy), (_sampled.policy_version, wanted.version), (_sampled.key_id, wanted.key_id)
    )
    query = select(_sampled.hour, _sampled.ttft_ms, _sampled.total_ms).where(*conditions)
    rows = connection.execute(query, moments | {"its_project": wanted.project, "until": hours[-1] + HOUR})
    return [CallTimes(*row) for row in rows]


def newest_times(connection: Connection, project: str, since: datetime, limit: int) -> list[CallTimes]:
    """Return the times of the newest calls since a time."""
    query = (
        select(c.ttft_ms, c.total_ms)
        .where(c.project == project, c.created_at >= since)
        .order_by(c.created_at.desc())
        .limit(limit)
    )
    return [CallTimes(0, *row) for row in connection.execute(query)]


def rewarded(connection: Connection, project: str, since: datetime) -> dict[str, int]:
    """Return the `trajectories` that began since an hour, how many of them are `rewarded`, and the `feedback` that came
    from apps and people."""
    hour = f"{since:%Y-%m-%d %H:00}"
    trajectories = select(func.sum(th.trajectories), func.sum(th.rewarded)).where(
        th.project == project, th.hour >= hour
    )
    feedback = select(func.sum(fh.feedback)).where(
        fh.project == project, fh.hour >= hour, fh.source.in_(("reward", "thumbs", "parts", "demonstration", "comment"))
    )
    began, with_reward = connection.execute(trajectories).one()
    came = connection.execute(feedback).scalar()
    return {"trajectories": int(began or 0), "rewarded": int(with_reward or 0), "feedback": int(came or 0)}


def _newest_of_hour(place: int) -> Subquery:
    """Return the newest calls of one hour, as its own subquery: a limit holds for the whole of a union otherwise."""
    until = "until" if place == DAY_H else f"since_{place + 1}"
    return (
        select(
            literal_column(str(place)).label("hour"),
            *(c.policy, c.policy_version, c.key_id, c.ttft_ms, c.total_ms),
        )
        .where(c.project == bindparam("its_project"))
        .where(c.created_at >= bindparam(f"since_{place}", type_=Utc))
        .where(c.created_at < bindparam(until, type_=Utc))
        .order_by(c.created_at.desc())
        .limit(EACH_HOUR)
        .subquery()
    )


# Built once: to build it costs more than to execute it.
_sampled = union_all(*(select(_newest_of_hour(place)) for place in range(DAY_H + 1))).subquery("sampled").c
