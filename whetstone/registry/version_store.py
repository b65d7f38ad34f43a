"""SQL of a policy's versions that the programs share: read them all, and add versions that no step made."""

from datetime import datetime
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, select

from migrations import schema
from whetstone.domain.ids import version_id

p, v, g = schema.policies.c, schema.policy_versions.c, schema.gate_results.c

DECISIONS = 200
"""Most decisions that are read, the newest first."""


def versions(connection: Connection, project: str, policy: str) -> list[dict[str, Any]]:
    """Return the policy's versions, the newest first."""
    query = (
        select(
            v.version, v.parent, v.state, v.reason, v.step, v.origin, v.probe_k3, v.heldout_mean, v.heldout_count,
            v.tested_by, v.tested_since, v.canary_share, v.served, v.pinned_at, v.created_at, v.promoted_at,
        )
        .add_columns(v.unserved_at, v.removed_at)
        .where(v.project == project, v.policy == policy)
        .order_by(v.version.desc())
    )  # fmt: skip
    return [dict(row._mapping) for row in connection.execute(query)]


def decisions(connection: Connection, project: str, policy: str) -> list[dict[str, Any]]:
    """Return the decisions on its versions, the newest first."""
    query = (
        select(g.version, g.against, g.test, g.decision, g.reason, g.figures, g.created_at)
        .where(g.project == project, g.policy == policy)
        .order_by(g.created_at.desc(), g.id.desc())
        .limit(DECISIONS)
    )
    return [dict(row._mapping) for row in connection.execute(query)]


def set_state(connection: Connection, project: str, policy: str, state: str) -> bool:
    """Set a policy's state: recording, training or paused. Return whether a trainable policy of that name exists."""
    changed = connection.execute(
        schema.policies.update().where(p.project == project, p.id == policy, p.upstream.is_(None)).values(state=state)
    )
    return changed.rowcount > 0


def take_number(connection: Connection, project: str, policy: str) -> int:
    """Reserve the next version number; the policy is locked."""
    following = connection.execute(
        schema.policies.update()
        .where(p.project == project, p.id == policy)
        .values(next_version=p.next_version + 1)
        .returning(p.next_version)
    ).scalar_one()
    return int(following) - 1


def add(
    connection: Connection,
    project: str,
    policy: str,
    version: int,
    *,
    folder: Path,
    manifest_sha256: str,
    origin: str,
    now: datetime,
) -> None:
    """Add a version that no step made. It descends from the base model, and stays retired until it is promoted."""
    connection.execute(
        schema.policy_versions.insert().values(
            project=project,
            id=version_id(policy, version),
            policy=policy,
            version=version,
            parent=0,
            state="retired",
            adapter_path=str(folder),
            manifest_sha256=manifest_sha256,
            served=False,
            origin=origin,
            created_at=now,
        )
    )
