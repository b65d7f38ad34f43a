"""The dashboard's SQL for policies: their states, the rewards of each version, the gate decisions. Reads only.

Rewards come from the roll-ups, never from trajectories: whatever their number, a page reads some thousand rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Connection, select, text

from migrations import schema

p, v, g = schema.policies.c, schema.policy_versions.c, schema.gate_results.c

DECISIONS = 20
"""Most decisions shown for a policy, the newest."""

_POLICY = (p.id, p.base_model, p.live_version, p.state, p.upstream, p.aliases, p.created_at, p.step_asked_at)
_REWARDS = text("""
    SELECT version, SUM(rewarded) AS rewarded, SUM(reward_sum) AS reward_sum, SUM(reward_squares) AS reward_squares
    FROM admin_trajectory_hours
    WHERE project = :project AND policy = :policy AND split = 'train' AND version >= :since
    GROUP BY version HAVING SUM(rewarded) > 0 ORDER BY version
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
class PolicyRow:
    """A policy in its current state."""

    name: str
    base_model: str
    live_version: int
    state: str
    upstream: str | None
    aliases: Sequence[str]
    created_at: datetime
    step_asked_at: datetime | None


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
class RecentTraffic:
    """Recent traffic."""

    trajectories: int
    rewarded: int


def policies(connection: Connection, project: str) -> list[PolicyRow]:
    """Return the policies, sorted by name."""
    query = select(*_POLICY).where(p.project == project).order_by(p.id)
    return [_policy(row) for row in connection.execute(query)]


def policy(connection: Connection, project: str, name: str) -> PolicyRow | None:
    """Return one policy; None if it does not exist."""
    query = select(*_POLICY).where(p.project == project, p.id == name)
    row = connection.execute(query).one_or_none()
    return None if row is None else _policy(row)


def versions(connection: Connection, project: str, name: str, before: int | None, limit: int) -> list[dict[str, Any]]:
    """Return the policy's versions below `before`, the newest first."""
    query = select(
        v.version, v.parent, v.state, v.reason, v.step, v.origin, v.probe_k3, v.heldout_mean, v.heldout_count,
        v.tested_by, v.tested_since, v.canary_share, v.served, v.pinned_at, v.created_at, v.promoted_at, v.removed_at,
    ).where(v.project == project, v.policy == name)  # fmt: skip
    if before is not None:
        query = query.where(v.version < before)
    return [dict(row._mapping) for row in connection.execute(query.order_by(v.version.desc()).limit(limit))]


def states(connection: Connection, project: str, name: str, limit: int) -> list[VersionState]:
    """Return the states of the newest versions, in order."""
    query = select(v.version, v.state, v.promoted_at).where(v.project == project, v.policy == name)
    rows = connection.execute(query.order_by(v.version.desc()).limit(limit))
    return [VersionState(row.version, row.state, row.promoted_at is not None) for row in rows][::-1]


def rewards(connection: Connection, project: str, name: str, since_version: int) -> list[VersionRewards]:
    """Return the rewards of each version from `since_version` on, in order; versions without a reward are left out."""
    parameters = {"project": project, "policy": name, "since": since_version}
    return [
        VersionRewards(row.version, int(row.rewarded), float(row.reward_sum), float(row.reward_squares))
        for row in connection.execute(_REWARDS, parameters)
    ]


def recent(connection: Connection, project: str, name: str, now: datetime, hours: int) -> RecentTraffic:
    """Return the number of trajectories that began in the last full hours, and how many of them have a reward."""
    parameters = {"project": project, "policy": name, "since": f"{now - timedelta(hours=hours):%Y-%m-%d %H}:00"}
    row = connection.execute(_RECENT, parameters).one()
    return RecentTraffic(int(row.trajectories or 0), int(row.rewarded or 0))


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


def _policy(row: Any) -> PolicyRow:
    name, base_model, live_version, state, upstream, aliases, created_at, step_asked_at = row
    return PolicyRow(name, base_model, live_version, state, upstream, tuple(aliases or ()), created_at, step_asked_at)
