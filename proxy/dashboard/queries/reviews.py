"""The dashboard's SQL for the review queue: attempts with their conversations and judges' scores."""

from collections.abc import Collection
from typing import Any

from sqlalchemy import Connection, select

from migrations import schema
from proxy.recording.store import REVIEWS, REVIEWS_AT_ONCE

AT_ONCE = REVIEWS_AT_ONCE

f, j = schema.feedback.c, schema.judgements.c


def waiting(connection: Connection, project: str) -> list[dict[str, Any]]:
    """Return the attempts that wait longest, without those reviewed just now, whose feedback is not applied yet."""
    rows = [dict(row._mapping) for row in connection.execute(REVIEWS, {"project": project})]
    if not rows:
        return []
    fresh = (f.project == project, f.trajectory_id.is_(None), f.state == "waiting", f.target_kind == "trajectory")
    query = select(f.target_id).where(*fresh, f.target_id.in_([row["trajectory_id"] for row in rows]))
    reviewed = set(connection.execute(query).scalars())
    return [row for row in rows if row["trajectory_id"] not in reviewed]


def explanations(
    connection: Connection, project: str, group_ids: Collection[str]
) -> dict[str, list[tuple[str, float | None, str]]]:
    """Return judge, score and explanation by trajectory, for all attempts of these groups."""
    if not group_ids:
        return {}
    query = (
        select(j.judge, j.scores)
        .where(j.project == project, j.group_id.in_(group_ids), j.state == "accepted")
        .order_by(j.accepted_at.desc())
        .limit(200)
    )
    by_trajectory: dict[str, list[tuple[str, float | None, str]]] = {}
    for judge, scores in connection.execute(query):
        for name, entry in (scores or {}).items():
            by_trajectory.setdefault(name, []).append((judge, entry.get("score"), str(entry.get("explanation") or "")))
    return by_trajectory
