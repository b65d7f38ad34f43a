"""SQL of `whetstone tail`: the newest calls, and those since a time. Each choice of a call is a row."""

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, Connection, and_, select

from migrations import schema
from whetstone.database.engine import chunks

MOST_WALKED = 10_000
"""Newest calls among which those that match are looked for."""

c, t = schema.completions.c, schema.trajectories.c
_WITH_TASK = schema.completions.join(schema.trajectories, and_(t.project == c.project, t.id == c.trajectory_id))
_COLUMNS = (
    c.id.label("completion_id"), c.created_at, c.trajectory_id, c.turn, t.task, t.split, c.policy, c.policy_version,
    c.status, c.error, c.finish_reason, c.prompt_tokens, c.completion_tokens, c.streamed, c.ttft_ms, c.total_ms,
    c.new_messages,
)  # fmt: skip


@dataclass(frozen=True)
class Filter:
    """Which calls are meant; None: any."""

    project: str
    policy: str | None = None
    status: str | None = None
    task: str | None = None

    @property
    def conditions(self) -> list[ColumnElement[bool]]:
        """The conditions on a call and its trajectory."""
        given = ((c.policy, self.policy), (c.status, self.status), (t.task, self.task))
        return [c.project == self.project, *(column == value for column, value in given if value is not None)]


def newest(connection: Connection, wanted: Filter, limit: int) -> list[dict[str, Any]]:
    """Return the newest calls that match, the oldest of them first. Only MOST_WALKED calls are looked at."""
    walked = select(c.id).where(c.project == wanted.project).order_by(c.created_at.desc()).limit(MOST_WALKED).subquery()
    query = select(*_COLUMNS).select_from(_WITH_TASK.join(walked, walked.c.id == c.id)).where(*wanted.conditions)
    rows = connection.execute(query.order_by(c.created_at.desc(), c.id.desc()).limit(limit))
    return [dict(row) for row in rows.mappings()][::-1]


def ids_since(connection: Connection, wanted: Filter, since: datetime, least_ms: float | None = None) -> set[str]:
    """Return the ids of the matching calls that arrived since; with `least_ms` only of those that took so long."""
    of = schema.completions if wanted.task is None else _WITH_TASK
    query = select(c.id).select_from(of).where(*wanted.conditions, c.created_at >= since)
    return set(connection.execute(query if least_ms is None else query.where(c.total_ms >= least_ms)).scalars())


def calls(connection: Connection, project: str, ids: Collection[str]) -> list[dict[str, Any]]:
    """Return the calls with these ids, in the order in which they arrived."""
    query = select(*_COLUMNS).select_from(_WITH_TASK).where(c.project == project)
    rows = [row for some in chunks(ids) for row in connection.execute(query.where(c.id.in_(some))).mappings()]
    return sorted(map(dict, rows), key=lambda row: (row["created_at"], row["completion_id"]))
