"""SQL of `whetstone trajectories` and `whetstone groups`: rows of the admin views, the newest first."""

from collections.abc import Iterable, Mapping
from datetime import datetime
from operator import ge, le
from typing import Any

from sqlalchemy import Boolean, Connection, Float, Integer, Text, column, select, table
from sqlalchemy.sql.expression import ColumnElement, TableClause

from migrations.views import BY_NAME, Kind
from whetstone.database.types import Json, Logprobs, TokenIds, Utc
from whetstone.errors import WhetstoneError

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
t, c, f = TRAJECTORIES.c, COMPLETIONS.c, FEEDBACK.c
ID = {GROUPS: "group_id", TRAJECTORIES: "trajectory_id"}


class NotFound(WhetstoneError):
    """There is no group or trajectory of that id; the message lists similar ids."""

    exit_code = 1


def newest(
    connection: Connection,
    of: TableClause,
    project: str,
    given: Mapping[str, Any],
    *,
    since: datetime | None,
    rewards: tuple[float | None, float | None] = (None, None),
    limit: int,
) -> list[dict[str, Any]]:
    """Return the newest groups or trajectories with these column values (None: any); `since`: earliest beginning;
    `rewards`: bounds of a trajectory's."""
    bounds = ((of.c.created_at, ge, since), (t.reward, ge, rewards[0]), (t.reward, le, rewards[1]))
    where = [
        of.c.project == project,
        *(of.c[name] == value for name, value in given.items() if value is not None),
        *(compare(column, bound) for column, compare, bound in bounds if bound is not None),
    ]
    return _rows(connection, of.c, where, of.c.created_at.desc(), of.c[ID[of]].desc(), limit=limit)


def group(connection: Connection, project: str, group_id: str) -> dict[str, Any]:
    """Return one group with its `members`.

    Raises:
        NotFound: there is none.
    """
    members = [t.project == project, t.group_id == group_id]
    return _one(connection, GROUPS, project, group_id) | {
        "members": _rows(connection, t, members, t.created_at, t.trajectory_id)
    }


def trajectory(connection: Connection, project: str, trajectory_id: str, *, ids: bool) -> dict[str, Any]:
    """Return one trajectory with its `turns` and `feedback`; `ids`: include token ids and logprobs.

    Raises:
        NotFound: there is none.
    """
    columns = [one for one in c if ids or one.name not in LONG]
    turns = [c.project == project, c.trajectory_id == trajectory_id]
    feedback = [f.project == project, f.trajectory_id == trajectory_id]
    return _one(connection, TRAJECTORIES, project, trajectory_id) | {
        "turns": _rows(connection, columns, turns, c.turn),
        "feedback": _rows(connection, f, feedback, f.created_at, f.feedback_id),
    }


def _one(connection: Connection, of: TableClause, project: str, its_id: str) -> dict[str, Any]:
    own_id = of.c[ID[of]]
    rows = _rows(connection, of.c, [of.c.project == project, own_id == its_id])
    if rows:
        return rows[0]
    # A range instead of LIKE, so that the database uses an index.
    alike = [of.c.project == project, own_id >= its_id, own_id < its_id + "\x7f"]
    names = [row[ID[of]] for row in _rows(connection, [own_id], alike, own_id, limit=5)]
    what = "group" if of is GROUPS else "trajectory"
    suggestion = f"; there are: {', '.join(names)}" if names else ""
    raise NotFound(f"there is no {what} {its_id!r} in project {project}{suggestion}")


def _rows(
    connection: Connection,
    columns: Iterable[ColumnElement[Any]],
    where: list[ColumnElement[bool]],
    *order: Any,
    limit: int | None = None,
) -> list[dict[str, Any]]:
    query = select(*columns).where(*where).order_by(*order).limit(limit)
    return [dict(row) for row in connection.execute(query).mappings()]
