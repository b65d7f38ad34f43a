"""The dashboard's SQL until the first step: whether there was one, the newest call, groups of several attempts. Each
query reads a bounded number of rows.
"""

from typing import Any

from sqlalchemy import Connection, func, select

from migrations import schema

LOOKED_AT = 200
"""Most groups of each state that are looked at, the newest."""
_STATES = ("open", "closed", "scored", "discarded")

g, s, t = schema.groups.c, schema.steps.c, schema.trajectories.c


def has_step(connection: Connection, project: str) -> bool:
    """Return whether any policy of the project has taken a step."""
    return connection.execute(select(s.id).where(s.project == project).limit(1)).first() is not None


def newest_call(connection: Connection, project: str) -> dict[str, Any] | None:
    """Return the newest trajectory: `id`, `policy`, `created_at`; None if there is none."""
    query = select(t.id, t.policy, t.created_at).where(t.project == project)
    row = connection.execute(query.order_by(t.created_at.desc()).limit(1)).first()
    return None if row is None else dict(row._mapping)


def groups_of_several(connection: Connection, project: str, policy: str) -> int:
    """Return how many of the policy's newest groups have two or more attempts."""
    several, still_open = 0, list[str]()
    for state in _STATES:
        query = select(g.id, g.size).where(g.project == project, g.policy == policy, g.state == state)
        rows = connection.execute(query.order_by(g.closed_at.desc()).limit(LOOKED_AT)).all()
        several += sum(row.size > 1 for row in rows)
        still_open += [row.id for row in rows if state == "open"]  # whose size is known once they close
    members = select(t.group_id).where(t.project == project, t.group_id.in_(still_open)).group_by(t.group_id)
    counted = select(func.count()).select_from(members.having(func.count() > 1).subquery())
    return several + int(connection.execute(counted).scalar_one())
