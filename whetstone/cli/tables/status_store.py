"""SQL of `whetstone status`: the state of policies, and what waits. It reads only the heads of indexes."""

from datetime import datetime
from typing import Any

from sqlalchemy import Connection, func, select

from migrations import schema

QUEUE = ("open", "closed", "scored", "claimed")
"""States of groups that no step has finished with."""

f, g, p, r = schema.feedback.c, schema.groups.c, schema.policies.c, schema.replicas.c
s, t, v = schema.steps.c, schema.trajectories.c, schema.policy_versions.c


def policies(connection: Connection, project: str) -> list[dict[str, Any]]:
    """Return the project's policies: live version, candidate, last step, groups by state."""
    query = select(p.id.label("policy"), p.state, p.live_version, p.upstream, p.created_at)
    rows = connection.execute(query.where(p.project == project).order_by(p.id)).all()
    candidates = select(v.policy, func.max(v.version)).where(v.project == project, v.state == "candidate")
    tested: dict[str, int] = {row[0]: row[1] for row in connection.execute(candidates.group_by(v.policy))}
    return [
        {"project": project, **row._mapping, "candidate": tested.get(row.policy)}
        | {"groups": _groups(connection, project, row.policy), "last_step": _last_step(connection, project, row.policy)}
        for row in rows
    ]


def replicas(connection: Connection, project: str) -> list[dict[str, Any]]:
    """Return the vLLM servers, as the proxy last saw them."""
    query = select(r.id.label("url"), r.state, r.reason, r.seen_at).where(r.project == project).order_by(r.id)
    return [dict(row._mapping) for row in connection.execute(query)]


def waiting_since(connection: Connection) -> dict[str, datetime | None]:
    """Return since when new items have waited for the judging worker; None if nothing waits."""
    oldest = {
        "feedback": select(func.min(f.created_at)).where(f.state == "waiting", f.due_at.is_(None)),
        "trajectories": select(func.min(t.created_at)).where(t.placed_at.is_(None)),
        "groups": select(func.min(g.due_at)).where(g.due_at.is_not(None)),
    }
    return {what: connection.execute(query).scalar() for what, query in oldest.items()}


def _groups(connection: Connection, project: str, policy: str) -> dict[str, int]:
    of_it = (g.project == project, g.policy == policy, g.state.in_(QUEUE))
    counted = connection.execute(select(g.state, func.count()).where(*of_it).group_by(g.state))
    return dict.fromkeys(QUEUE, 0) | {row[0]: row[1] for row in counted}


def _last_step(connection: Connection, project: str, policy: str) -> dict[str, Any] | None:
    columns = (s.number.label("step"), s.kind, s.state, s.version_out, s.reward_mean, s.error, s.created_at, s.ended_at)
    query = select(*columns).where(s.project == project, s.policy == policy).order_by(s.number.desc()).limit(1)
    row = connection.execute(query).first()
    return None if row is None else dict(row._mapping)
