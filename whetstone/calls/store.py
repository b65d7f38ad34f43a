"""SQL of calls as they come: the newest, those since a time, those that ended since a time. Each choice is a row.

Every query begins with the newest calls by arrival, of which it reads a bounded number by an index.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import ColumnElement, Connection, FromClause, RowMapping, Select, and_, case, func, select
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import FunctionElement

from migrations import schema
from whetstone.calls.words import beginning, first_line
from whetstone.database.engine import chunks

MOST_WALKED = 10_000
"""Newest calls among which those that match are looked for."""
MOST_IN_FLIGHT = 3_000
"""Newest calls among which those that ended since a time are looked for: all that were in flight then or came since."""
LONGEST = timedelta(minutes=15)
"""Longest call that is looked for when it ends."""

c, t = schema.completions.c, schema.trajectories.c
_WITH_TASK = schema.completions.join(schema.trajectories, and_(t.project == c.project, t.id == c.trajectory_id))
_COLUMNS = (
    c.id.label("completion_id"), c.created_at, c.trajectory_id, c.turn, t.task, t.split, c.policy, c.policy_version,
    c.key_id, c.status, c.error, c.finish_reason, c.prompt_tokens, c.completion_tokens, c.streamed, c.ttft_ms,
    c.total_ms, beginning(c.new_messages).label("prompt"),
)  # fmt: skip


@dataclass(frozen=True)
class Filter:
    """Which calls are meant; None: any."""

    project: str
    policy: str | None = None
    status: str | None = None
    task: str | None = None
    version: int | None = None
    key_id: str | None = None
    least_ms: float | None = None
    """Calls that took at least so long, from request to last byte."""

    def conditions(self, calls: FromClause) -> list[ColumnElement[bool]]:
        """Return the conditions on a call and its trajectory, but that of the project."""
        of = calls.c
        given: dict[str, tuple[ColumnElement[Any], Any]] = {
            "policy": (of.policy, self.policy),
            "status": (of.status, self.status),
            "version": (of.policy_version, self.version),
            "key_id": (of.key_id, self.key_id),
            "task": (t.task, self.task),
        }
        equal = [column == value for column, value in given.values() if value is not None]
        return equal if self.least_ms is None else [*equal, of.total_ms >= self.least_ms]


@dataclass(frozen=True)
class NewCalls:
    """Calls that ended since a time."""

    rows: list[dict[str, Any]]
    """Those that ended last, in the order in which they arrived."""
    ended: int
    """How many ended in the period that was requested; there may be fewer rows."""


def newest(connection: Connection, wanted: Filter, limit: int) -> list[dict[str, Any]]:
    """Return the newest calls that match, the oldest of them first. Only MOST_WALKED calls are looked at."""
    is_filtered = wanted != Filter(wanted.project)
    walked = _newest_calls(wanted, MOST_WALKED if is_filtered else limit)
    picked = (
        select(walked.c.id)
        .select_from(_of(walked, wanted))
        .where(*wanted.conditions(walked))
        .order_by(walked.c.created_at.desc(), walked.c.id.desc())
        .limit(limit)
    )
    return _rows(connection, wanted.project, picked)


def ended_since(connection: Connection, wanted: Filter, since: datetime, until: datetime, limit: int) -> NewCalls:
    """Return the calls that match and ended since then, and how many ended before `until`.

    If `until` is a time before which all finished calls are in the tables, and the next look begins there, each call is
    counted once. Calls that ended later are listed already, and counted by the next look. Only MOST_IN_FLIGHT calls of
    the last LONGEST are looked at.
    """
    walked = _newest_calls(wanted, MOST_IN_FLIGHT, c.created_at >= since - LONGEST)
    ended_ms = _EpochMs(walked.c.created_at) + func.coalesce(walked.c.total_ms, 0.0)
    since_ms, until_ms = since.timestamp() * 1000, until.timestamp() * 1000
    is_counted = case(((ended_ms >= since_ms) & (ended_ms < until_ms), 1), else_=0)
    picked = (
        select(walked.c.id, func.sum(is_counted).over().label("ended"))
        .select_from(_of(walked, wanted))
        .where(ended_ms >= since_ms, *wanted.conditions(walked))
        .order_by(ended_ms.desc(), walked.c.id.desc())
        .limit(limit)
    )
    rows = _rows(connection, wanted.project, picked)
    ended = [row.pop("ended") for row in rows]
    return NewCalls(rows, max(map(int, ended), default=0))


def ids_since(connection: Connection, wanted: Filter, since: datetime, least_ms: float | None = None) -> set[str]:
    """Return the ids of the matching calls that arrived since; with `least_ms` only of those that took so long."""
    of = schema.completions if wanted.task is None else _WITH_TASK
    conditions = [c.project == wanted.project, *wanted.conditions(schema.completions), c.created_at >= since]
    query = select(c.id).select_from(of).where(*conditions)
    return set(connection.execute(query if least_ms is None else query.where(c.total_ms >= least_ms)).scalars())


def calls(connection: Connection, project: str, ids: Collection[str]) -> list[dict[str, Any]]:
    """Return the calls with these ids, in the order in which they arrived."""
    query = select(*_COLUMNS).select_from(_WITH_TASK).where(c.project == project)
    return _ordered(row for some in chunks(ids) for row in connection.execute(query.where(c.id.in_(some))).mappings())


def _newest_calls(wanted: Filter, most: int, *conditions: ColumnElement[bool]) -> FromClause:
    """Return the newest calls, with the columns that are needed to choose among them: others may be large."""
    columns = (c.project, c.id, c.trajectory_id, c.created_at, c.policy, c.policy_version, c.status, c.key_id)
    timed = (c.total_ms,) if conditions or wanted.least_ms is not None else ()
    return (
        select(*columns, *timed)
        .where(c.project == wanted.project, *conditions)
        .order_by(c.created_at.desc())
        .limit(most)
        .subquery("walked")
    )


def _of(walked: FromClause, wanted: Filter) -> FromClause:
    if wanted.task is None:
        return walked
    return walked.join(schema.trajectories, and_(t.project == walked.c.project, t.id == walked.c.trajectory_id))


def _rows(connection: Connection, project: str, picked: Select[Any]) -> list[dict[str, Any]]:
    """Return the calls that were picked, with the picked columns other than the id."""
    of = picked.subquery("picked")
    query = select(*_COLUMNS, *(column for column in of.c if column.name != "id"))
    query = query.select_from(_WITH_TASK.join(of, of.c.id == c.id)).where(c.project == project)
    return _ordered(connection.execute(query).mappings())


def _ordered(rows: Iterable[RowMapping]) -> list[dict[str, Any]]:
    read = [{**row, "prompt": first_line(row["prompt"])} for row in rows]
    return sorted(read, key=lambda row: (row["created_at"], row["completion_id"]))


class _EpochMs(FunctionElement[float]):
    """An instant in milliseconds since 1970."""

    inherit_cache = True


@compiles(_EpochMs, "sqlite")
def _of_sqlite(element: _EpochMs, compiler: SQLCompiler, **how: Any) -> str:
    return f"((julianday({compiler.process(element.clauses, **how)}) - 2440587.5) * 86400000.0)"


@compiles(_EpochMs, "postgresql")
def _of_postgresql(element: _EpochMs, compiler: SQLCompiler, **how: Any) -> str:
    return f"(extract(epoch FROM {compiler.process(element.clauses, **how)}) * 1000)"
