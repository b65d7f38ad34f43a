"""The dashboard's SQL for one trajectory: the attempt, its turns, and the trajectories before and after it."""

from collections.abc import Collection
from typing import Any

from sqlalchemy import Connection, select

from migrations import schema
from proxy.recording.reason_store import TRAJECTORY

t, c, p = schema.trajectories.c, schema.completions.c, schema.policies.c

_TURN = (
    *(
        c.id,
        c.trajectory_id,
        c.upstream_id,
        c.choice,
        c.turn,
        c.policy,
        c.policy_version,
        c.endpoint,
        c.status,
        c.error,
    ),
    *(c.follows, c.key_id, c.end_user, c.new_messages, c.tools, c.response, c.response_text, c.token_ids),
    *(c.inference_logprobs, c.sampling, c.finish_reason, c.prompt_tokens, c.completion_tokens, c.ttft_ms, c.total_ms),
    *(c.retry_of, c.threaded_by, c.why_not_trained, c.redactions, c.created_at),
)


def trajectory(connection: Connection, project: str, trajectory_id: str) -> dict[str, Any] | None:
    """Return one trajectory; None if the project has none with that id."""
    row = connection.execute(TRAJECTORY.where(t.project == project, t.id == trajectory_id)).one_or_none()
    return None if row is None else dict(row._mapping)


def turns(connection: Connection, project: str, trajectory_id: str, start: int, end: int) -> list[dict[str, Any]]:
    """Return its completions from turn `start` to before `end`."""
    query = (
        select(*_TURN)
        .where(c.project == project, c.trajectory_id == trajectory_id, c.turn >= start, c.turn < end)
        .order_by(c.turn)
    )
    return [dict(row._mapping) for row in connection.execute(query)]


def turn_of(connection: Connection, project: str, completion_ids: Collection[str]) -> dict[str, tuple[str, int]]:
    """Return the trajectory and the turn of completions, by their id."""
    query = select(c.id, c.trajectory_id, c.turn).where(c.project == project, c.id.in_(completion_ids))
    return {row.id: (row.trajectory_id, row.turn) for row in connection.execute(query)} if completion_ids else {}


def continued_in(connection: Connection, project: str, completion_ids: Collection[str]) -> list[tuple[str, str]]:
    """Return completion and trajectory, for each trajectory that continues one of these completions."""
    query = select(t.continues, t.id).where(t.project == project, t.continues.in_(completion_ids)).limit(20)
    return [(row.continues, row.id) for row in connection.execute(query)] if completion_ids else []


def model_paths(connection: Connection, project: str, policies: Collection[str]) -> dict[str, str]:
    """Return the path of each policy's base model; policies that another server answers are left out."""
    query = select(p.id, p.model_path).where(p.project == project, p.id.in_(policies), p.upstream.is_(None))
    return {row.id: row.model_path for row in connection.execute(query)}


def policy_names(connection: Connection, project: str) -> list[str]:
    """Return all policies of the project."""
    return list(connection.execute(select(p.id).where(p.project == project).order_by(p.id)).scalars())
