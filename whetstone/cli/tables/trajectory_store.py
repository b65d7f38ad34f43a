"""SQL of `whetstone trajectories` and `whetstone groups`: rows of the admin views, the newest first."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from sqlalchemy import Boolean, Connection, Float, Integer, Text, and_, column, select, table
from sqlalchemy.sql.expression import ColumnElement, TableClause

from migrations.views import BY_NAME, Kind
from whetstone.database.types import Json, Logprobs, TokenIds, Utc

_TYPES: Mapping[Kind, Any] = {
    Kind.TEXT: Text, Kind.INTEGER: Integer, Kind.LARGE_INTEGER: Integer, Kind.REAL: Float, Kind.BOOLEAN: Boolean,
    Kind.TIME: Utc, Kind.JSON: Json, Kind.TOKEN_IDS: TokenIds, Kind.LOGPROBS: Logprobs,
}  # fmt: skip
LONG = frozenset({"prompt_token_ids", "token_ids", "inference_logprobs"})
"""Columns that are read only on request."""


def _view(name: str) -> TableClause:
    return table(name, *(column(one.name, _TYPES[one.kind]) for one in BY_NAME[name].columns))


GROUPS, TRAJECTORIES = _view("admin_groups"), _view("admin_trajectories")
COMPLETIONS, FEEDBACK = _view("admin_completions"), _view("admin_feedback")
g, t, c, f = GROUPS.c, TRAJECTORIES.c, COMPLETIONS.c, FEEDBACK.c


def trajectories(
    connection: Connection,
    project: str,
    given: Mapping[str, Any],
    *,
    since: datetime | None = None,
    rewards: tuple[float | None, float | None] = (None, None),
    limit: int,
) -> list[dict[str, Any]]:
    """Return the newest trajectories with these column values; `since`: earliest beginning; `rewards`: bounds."""
    where = [t.project == project, *(t[name] == value for name, value in given.items())]
    if since is not None:
        where.append(t.created_at >= since)
    if rewards[0] is not None:
        where.append(t.reward >= rewards[0])
    if rewards[1] is not None:
        where.append(t.reward <= rewards[1])
    return _rows(connection, TRAJECTORIES, where, limit, t.created_at.desc(), t.trajectory_id.desc())


def groups(
    connection: Connection, project: str, given: Mapping[str, Any], *, since: datetime | None = None, limit: int
) -> list[dict[str, Any]]:
    """Return the newest groups with these column values."""
    where = [g.project == project, *(g[name] == value for name, value in given.items())]
    if since is not None:
        where.append(g.created_at >= since)
    return _rows(connection, GROUPS, where, limit, g.created_at.desc(), g.group_id.desc())


def group(connection: Connection, project: str, group_id: str) -> dict[str, Any] | None:
    """Return one group with its `members`; None if there is none."""
    rows = _rows(connection, GROUPS, [g.project == project, g.group_id == group_id], 1)
    if not rows:
        return None
    of_it = [t.project == project, t.group_id == group_id]
    return rows[0] | {"members": _rows(connection, TRAJECTORIES, of_it, None, t.created_at, t.trajectory_id)}


def trajectory(connection: Connection, project: str, trajectory_id: str, *, ids: bool) -> dict[str, Any] | None:
    """Return one trajectory with its `turns` and `feedback`, or None; `ids`: include token ids and logprobs."""
    rows = _rows(connection, TRAJECTORIES, [t.project == project, t.trajectory_id == trajectory_id], 1)
    if not rows:
        return None
    columns = [one for one in c if ids or one.name not in LONG]
    turns = select(*columns).where(c.project == project, c.trajectory_id == trajectory_id).order_by(c.turn)
    of_trajectory = and_(f.project == project, f.trajectory_id == trajectory_id)
    feedback = select(*f).where(of_trajectory).order_by(f.created_at, f.feedback_id)
    return rows[0] | {
        "turns": [dict(row._mapping) for row in connection.execute(turns)],
        "feedback": [dict(row._mapping) for row in connection.execute(feedback)],
    }


def named_like(connection: Connection, project: str, begins: str, of: TableClause, limit: int) -> list[str]:
    """Return ids that begin with this text."""
    its_id = of.c.trajectory_id if of is TRAJECTORIES else of.c.group_id
    # A range instead of LIKE, so that the database uses an index.
    alike = (of.c.project == project, its_id >= begins, its_id < begins + "\x7f")
    return [
        str(one) for one in connection.execute(select(its_id).where(*alike).order_by(its_id).limit(limit)).scalars()
    ]


def _rows(
    connection: Connection, of: TableClause, where: list[ColumnElement[bool]], limit: int | None, *order: Any
) -> list[dict[str, Any]]:
    query = select(*of.c).where(*where).order_by(*order).limit(limit)
    return [dict(row._mapping) for row in connection.execute(query)]
