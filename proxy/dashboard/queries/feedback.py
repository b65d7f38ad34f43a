"""The dashboard's SQL for feedback, and for the state of its trajectories."""

from collections.abc import Collection
from typing import Any

from sqlalchemy import Connection, select

from migrations import schema
from proxy.dashboard.queries.newest import Place, RowPage, equal, newest
from proxy.recording.reason_store import WHY_NOT_TRAINED

f, t = schema.feedback.c, schema.trajectories.c

_LISTED = (
    *(f.id, f.target_kind, f.target_id, f.trajectory_id, f.completion_id, f.choice, f.reward, f.rewards, f.parts),
    *(f.source, f.final, f.comment, f.metadata, f.demonstration, f.state, f.reason, f.step, f.key_id, f.created_at),
    *(f.applied_at, f.due_at, f.withdrawn_at),
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
