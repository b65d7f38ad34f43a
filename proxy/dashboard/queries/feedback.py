"""The dashboard's SQL for feedback, for the state of its trajectories, and for the attempts that wait for a review."""

from collections.abc import Collection
from typing import Any

from sqlalchemy import Connection, select

from migrations import schema
from proxy.dashboard.queries.newest import Place, RowPage, equal, newest
from proxy.recording.reason_store import WHY_NOT_TRAINED
from proxy.recording.store import REVIEWS

f, t, j = schema.feedback.c, schema.trajectories.c, schema.judgements.c

_LISTED = (
    *(f.id, f.target_kind, f.target_id, f.trajectory_id, f.completion_id, f.choice, f.reward, f.rewards, f.parts),
    *(f.source, f.final, f.comment, f.metadata, f.demonstration, f.state, f.reason, f.step, f.key_id, f.created_at),
    *(f.applied_at, f.due_at, f.withdrawn_at, f.credit),
)


def feedback(
    connection: Connection, project: str, state: str | None, source: str | None, before: Place | None
) -> RowPage:
    """Return the newest feedback."""
    filters = equal((f.state, state), (f.source, source))
    return newest(connection, schema.feedback, _LISTED, [f.project == project], filters, before)


def by_id(connection: Connection, project: str, feedback_id: str) -> dict[str, Any] | None:
    """Return one feedback; None if the project has none with that id."""
    row = connection.execute(select(*_LISTED).where(f.project == project, f.id == feedback_id)).one_or_none()
    return None if row is None else dict(row._mapping)


def standing(connection: Connection, project: str, trajectory_ids: Collection[str]) -> dict[str, dict[str, Any]]:
    """Return the state of the trajectories that feedback refers to, by id."""
    query = select(t.id, t.policy, t.state, t.reward, WHY_NOT_TRAINED, t.trained_in_step).where(
        t.project == project, t.id.in_(trajectory_ids)
    )
    return {row.id: dict(row._mapping) for row in connection.execute(query)} if trajectory_ids else {}


def waiting_for_review(connection: Connection, project: str) -> list[dict[str, Any]]:
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
    query = (
        select(j.judge, j.scores)
        .where(j.project == project, j.group_id.in_(group_ids), j.state == "accepted")
        .order_by(j.accepted_at.desc())
        .limit(200)
    )
    by_trajectory: dict[str, list[tuple[str, float | None, str]]] = {}
    for judge, scores in connection.execute(query) if group_ids else ():
        for name, entry in (scores or {}).items():
            by_trajectory.setdefault(name, []).append((judge, entry.get("score"), str(entry.get("explanation") or "")))
    return by_trajectory
