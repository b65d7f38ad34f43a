"""The dashboard's SQL for steps: their duration, metrics and training data. Reads only."""

from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, and_, or_, select

from migrations import schema

s, t = schema.steps.c, schema.step_trajectories.c

FIGURES = (
    s.reward_mean, s.loss, s.kl, s.entropy, s.mismatch_k3, s.grad_norm, s.tokens_per_s, s.seconds,
)  # fmt: skip
"""The metrics that are charted over steps."""
_LISTED = (
    s.number, s.state, s.kind, s.version_in, s.version_out, s.groups, s.trajectories, s.error, s.created_at,
    s.ended_at, s.asked_at, s.sampled_tokens, *FIGURES,
)  # fmt: skip


@dataclass(frozen=True)
class Member:
    """A trajectory that a step trained on."""

    trajectory_id: str
    group_id: str
    reward: float
    baseline: float | None
    advantage: float | None
    staleness: int


def newest(
    connection: Connection, project: str, policy: str, before: int | None, limit: int, *, up_to: int | None = None
) -> list[dict[str, Any]]:
    """Return the policy's steps below `before` (or up to `up_to`), the newest first."""
    query = select(*_LISTED).where(s.project == project, s.policy == policy)
    if before is not None:
        query = query.where(s.number < before)
    if up_to is not None:
        query = query.where(s.number <= up_to)
    return [dict(row._mapping) for row in connection.execute(query.order_by(s.number.desc()).limit(limit))]


def by_number(connection: Connection, project: str, policy: str, number: int) -> dict[str, Any] | None:
    """Return all columns of a step; None if no step has that number."""
    query = select(schema.steps).where(s.project == project, s.policy == policy, s.number == number)
    row = connection.execute(query).one_or_none()
    return None if row is None else dict(row._mapping)


def neighbours(connection: Connection, project: str, policy: str, number: int) -> tuple[int | None, int | None]:
    """Return the numbers of the previous and the next step."""
    of_policy = (s.project == project, s.policy == policy)
    before = select(s.number).where(*of_policy, s.number < number).order_by(s.number.desc()).limit(1)
    after = select(s.number).where(*of_policy, s.number > number).order_by(s.number).limit(1)
    return connection.execute(before).scalar(), connection.execute(after).scalar()


def members(
    connection: Connection, project: str, step_id: str, after: tuple[str, str] | None, limit: int
) -> list[Member]:
    """Return what a step trained on, group by group, after that (group, trajectory)."""
    query = select(t.trajectory_id, t.group_id, t.reward, t.baseline, t.advantage, t.staleness)
    query = query.where(t.project == project, t.step_id == step_id)
    if after is not None:
        group_id, trajectory_id = after
        query = query.where(or_(t.group_id > group_id, and_(t.group_id == group_id, t.trajectory_id > trajectory_id)))
    rows = connection.execute(query.order_by(t.group_id, t.trajectory_id).limit(limit))
    return [Member(*row) for row in rows]
