"""The dashboard's SQL for policies: their states, the rewards of each version, the gate decisions, their steps. Reads
only.

Rewards come from the roll-ups: whatever their number, a page reads some thousand rows. Held-out rewards by prompt come
from `whetstone.registry.reward_store`.
"""

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import ColumnElement, Connection, and_, or_, select, text

from migrations import schema
from proxy.dashboard.queries.newest import equal

p, v, g = schema.policies.c, schema.policy_versions.c, schema.gate_results.c
s, t = schema.steps.c, schema.step_trajectories.c

DECISIONS = 20
"""Most decisions shown for a policy, the newest."""

FIGURES = (
    s.reward_mean, s.loss, s.kl, s.entropy, s.mismatch_k3, s.grad_norm, s.tokens_per_s, s.seconds,
)  # fmt: skip
"""The metrics that are charted over steps."""
_STEP = (
    s.number, s.state, s.kind, s.version_in, s.version_out, s.groups, s.trajectories, s.error, s.created_at,
    s.ended_at, s.asked_at, s.sampled_tokens, *FIGURES,
)  # fmt: skip
_VERSION = (v.state.label("version_state"), v.reason.label("version_reason"))
_WITH_VERSION = schema.steps.outerjoin(
    schema.policy_versions, and_(v.project == s.project, v.policy == s.policy, v.version == s.version_out)
)
_REWARDS = text("""
    SELECT split, version, SUM(rewarded) AS rewarded, SUM(reward_sum) AS reward_sum,
        SUM(reward_squares) AS reward_squares
    FROM admin_trajectory_hours
    WHERE project = :project AND policy = :policy AND split IN ('train', 'eval') AND version >= 0
    GROUP BY split, version HAVING SUM(rewarded) > 0 ORDER BY split, version
""")
_RECENT = text("""
    SELECT SUM(trajectories) AS trajectories, SUM(rewarded) AS rewarded
    FROM admin_trajectory_hours
    WHERE project = :project AND policy = :policy AND hour >= :since
""")
_EVER = text("""
    SELECT 1 FROM admin_trajectory_hours WHERE project = :project AND policy = :policy LIMIT 1
""")


@dataclass(frozen=True)
class VersionState:
    """The state of a version."""

    version: int
    state: str
    was_live: bool


@dataclass(frozen=True)
class VersionRewards:
    """Rewards of the trajectories that began with a version."""

    version: int
    rewarded: int
    reward_sum: float
    reward_squares: float


@dataclass(frozen=True)
class PolicyRewards:
    """Rewards of each version, in order; versions without a reward are left out."""

    training: list[VersionRewards] = field(default_factory=list)
    held_out: list[VersionRewards] = field(default_factory=list)
    """Of the split `eval`."""

    def __bool__(self) -> bool:
        """Return whether there is any reward."""
        return bool(self.training or self.held_out)


def policies(connection: Connection, project: str, name: str | None = None) -> list[dict[str, Any]]:
    """Return the policies, sorted by name; only the one with this name, if one is given."""
    query = select(
        p.id.label("name"), p.base_model, p.live_version, p.state, p.upstream, p.aliases, p.created_at, p.step_asked_at
    ).where(p.project == project, *equal((p.id, name)))
    return [dict(row._mapping) for row in connection.execute(query.order_by(p.id))]


def versions(connection: Connection, project: str, name: str, before: int | None, limit: int) -> list[dict[str, Any]]:
    """Return the policy's versions below `before`, the newest first."""
    query = select(
        v.version, v.parent, v.state, v.reason, v.step, v.origin, v.probe_k3, v.heldout_mean, v.heldout_count,
        v.tested_by, v.tested_since, v.canary_share, v.served, v.pinned_at, v.created_at, v.promoted_at, v.removed_at,
    ).where(v.project == project, v.policy == name, *_below(v.version, before))  # fmt: skip
    return [dict(row._mapping) for row in connection.execute(query.order_by(v.version.desc()).limit(limit))]


def states(connection: Connection, project: str, name: str, limit: int) -> list[VersionState]:
    """Return the states of the newest versions, in order."""
    query = select(v.version, v.state, v.promoted_at).where(v.project == project, v.policy == name)
    rows = connection.execute(query.order_by(v.version.desc()).limit(limit))
    return [VersionState(row.version, row.state, row.promoted_at is not None) for row in rows][::-1]


def rewards(connection: Connection, project: str, name: str) -> PolicyRewards:
    """Return the rewards of each version."""
    by_split = PolicyRewards()
    for row in connection.execute(_REWARDS, {"project": project, "policy": name}):
        rewards_of = by_split.held_out if row.split == "eval" else by_split.training
        sums = float(row.reward_sum), float(row.reward_squares)
        rewards_of.append(VersionRewards(row.version, int(row.rewarded), *sums))
    return by_split


def recent(connection: Connection, project: str, name: str, now: datetime, hours: int) -> dict[str, int]:
    """Return the number of `trajectories` that began in the last full hours, and how many of them are `rewarded`."""
    parameters = {"project": project, "policy": name, "since": f"{now - timedelta(hours=hours):%Y-%m-%d %H}:00"}
    return {column: int(count or 0) for column, count in connection.execute(_RECENT, parameters).one()._mapping.items()}


def has_traffic(connection: Connection, project: str, name: str) -> bool:
    """Return whether any call of this policy was ever recorded."""
    return connection.execute(_EVER, {"project": project, "policy": name}).first() is not None


def decisions(connection: Connection, project: str, name: str) -> list[dict[str, Any]]:
    """Return the gate decisions on its versions, the newest first."""
    query = (
        select(g.version, g.against, g.test, g.decision, g.reason, g.figures, g.created_at)
        .where(g.project == project, g.policy == name)
        .order_by(g.created_at.desc(), g.id.desc())
        .limit(DECISIONS)
    )
    return [dict(row._mapping) for row in connection.execute(query)]


def steps(connection: Connection, project: str, name: str, before: int | None, limit: int) -> list[dict[str, Any]]:
    """Return the policy's steps below `before`, the newest first, each with the present state of its version."""
    query = select(*_STEP, *_VERSION).select_from(_WITH_VERSION)
    query = query.where(s.project == project, s.policy == name, *_below(s.number, before))
    return [dict(row._mapping) for row in connection.execute(query.order_by(s.number.desc()).limit(limit))]


def step(connection: Connection, project: str, name: str, number: int) -> dict[str, Any] | None:
    """Return all columns of a step, and the present state of its version; None if no step has that number."""
    query = select(schema.steps, *_VERSION).select_from(_WITH_VERSION)
    row = connection.execute(query.where(s.project == project, s.policy == name, s.number == number)).one_or_none()
    return None if row is None else dict(row._mapping)


def neighbours(connection: Connection, project: str, policy: str, number: int) -> tuple[int | None, int | None]:
    """Return the numbers of the previous and the next step."""
    of_policy = (s.project == project, s.policy == policy)
    before = select(s.number).where(*of_policy, s.number < number).order_by(s.number.desc()).limit(1)
    after = select(s.number).where(*of_policy, s.number > number).order_by(s.number).limit(1)
    return connection.execute(before).scalar(), connection.execute(after).scalar()


def trained_on(
    connection: Connection, project: str, step_id: str, after: tuple[str, str] | None, limit: int
) -> list[dict[str, Any]]:
    """Return the trajectories that a step trained on, group by group, after that (group, trajectory)."""
    query = select(t.trajectory_id, t.group_id, t.reward, t.baseline, t.advantage, t.staleness)
    query = query.where(t.project == project, t.step_id == step_id)
    if after is not None:
        group_id, trajectory_id = after
        query = query.where(or_(t.group_id > group_id, and_(t.group_id == group_id, t.trajectory_id > trajectory_id)))
    rows = connection.execute(query.order_by(t.group_id, t.trajectory_id).limit(limit))
    return [dict(row._mapping) for row in rows]


def _below(column: ColumnElement[int], before: int | None) -> list[ColumnElement[bool]]:
    return [] if before is None else [column < before]
