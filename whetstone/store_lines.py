"""A policy's line of versions: read whole, continued with adapters that no step made. SQL that the programs share."""

from datetime import datetime
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, select

from migrations import schema
from whetstone.ids import version_id

p, v, g = schema.policies.c, schema.policy_versions.c, schema.gate_results.c

DECISIONS = 200
"""So many are read at once, the newest."""


def versions(connection: Connection, project: str, policy: str) -> list[dict[str, Any]]:
    """The policy's versions, the newest first."""
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
    """What was decided on its versions, the newest first."""
    query = (
        select(g.version, g.against, g.test, g.decision, g.reason, g.figures, g.created_at)
        .where(g.project == project, g.policy == policy)
        .order_by(g.created_at.desc(), g.id.desc())
        .limit(DECISIONS)
    )
    return [dict(row._mapping) for row in connection.execute(query)]


def tested(connection: Connection, project: str) -> dict[str, str]:
    """Policy -> its candidate and the test that is in, as shown: `5 (canary)`."""
    query = select(v.policy, v.version, v.tested_by).where(v.project == project, v.state == "candidate")
    rows = connection.execute(query.order_by(v.version))
    return {row.policy: f"{row.version} ({row.tested_by or 'probe'})" for row in rows}


def set_state(connection: Connection, project: str, policy: str, state: str) -> bool:
    """Let a policy record, train or pause; whether there is one of that name that could train."""
    here = (p.project == project, p.id == policy, p.upstream.is_(None))
    return connection.execute(schema.policies.update().where(*here).values(state=state)).rowcount > 0


def take_number(connection: Connection, project: str, policy: str) -> int:
    """The number of a version to come, which nobody else gets; the policy is locked."""
    is_it = (p.project == project, p.id == policy)
    number = int(connection.execute(select(p.next_version).where(*is_it)).scalar_one())
    connection.execute(schema.policies.update().where(*is_it).values(next_version=number + 1))
    return number


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
    """A version that no step made. It descends from the base model, and waits until somebody promotes it."""
    row = {
        "project": project,
        "id": version_id(policy, version),
        "policy": policy,
        "version": version,
        "parent": 0,
        "state": "retired",
        "adapter_path": str(folder),
        "manifest_sha256": manifest_sha256,
        "served": False,
        "origin": origin,
        "created_at": now,
    }
    connection.execute(schema.policy_versions.insert().values(row))
