"""SQL of `whetstone status`: the servers, and what waits for the judging worker. It reads heads of indexes only."""

from datetime import datetime
from typing import Any

from sqlalchemy import Connection, func, select

from migrations import schema

f, g, r, t = schema.feedback.c, schema.groups.c, schema.replicas.c, schema.trajectories.c


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
