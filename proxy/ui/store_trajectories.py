"""The SQL of one trajectory as the dashboard shows it: the attempt, its turns, where it came from and went on."""

from collections.abc import Collection
from typing import Any

from sqlalchemy import Connection, select

from migrations import schema
from proxy.store_reasons import TRAJECTORY

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
    """Return one trajectory; None where the project has none of that id."""
    row = connection.execute(TRAJECTORY.where(t.project == project, t.id == trajectory_id)).one_or_none()
    return None if row is None else dict(row._mapping)


def turns(connection: Connection, project: str, trajectory_id: str, start: int, end: int) -> list[dict[str, Any]]:
    """Its completions from turn `start` to before `end`."""
    query = (
        select(*_TURN)
        .where(c.project == project, c.trajectory_id == trajectory_id, c.turn >= start, c.turn < end)
        .order_by(c.turn)
    )
    return [dict(row._mapping) for row in connection.execute(query)]


def turn_of(connection: Connection, project: str, completion_ids: Collection[str]) -> dict[str, tuple[str, int]]:
    """The trajectory and the turn of completions, by their id."""
    query = select(c.id, c.trajectory_id, c.turn).where(c.project == project, c.id.in_(completion_ids))
    return {row.id: (row.trajectory_id, row.turn) for row in connection.execute(query)} if completion_ids else {}


def went_on_in(connection: Connection, project: str, completion_ids: Collection[str]) -> list[tuple[str, str]]:
    """Completion and trajectory, where another trajectory goes on from one of these."""
    query = select(t.continues, t.id).where(t.project == project, t.continues.in_(completion_ids)).limit(20)
    return [(row.continues, row.id) for row in connection.execute(query)] if completion_ids else []


def model_paths(connection: Connection, project: str, policies: Collection[str]) -> dict[str, str]:
    """Where each policy's base model lies; of those that another server answers nothing."""
    query = select(p.id, p.model_path).where(p.project == project, p.id.in_(policies), p.upstream.is_(None))
    return {row.id: row.model_path for row in connection.execute(query)}


def policy_names(connection: Connection, project: str) -> list[str]:
    """All policies of the project."""
    return list(connection.execute(select(p.id).where(p.project == project).order_by(p.id)).scalars())
