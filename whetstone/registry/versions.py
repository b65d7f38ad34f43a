"""The ledger of versions: which one is live, which stay loaded, and every decision. SQL that the programs share.

Each function is one move of the ledger, in a transaction of its caller that has locked the policy (`lock`). A move that
raises has written nothing. Between moves: exactly one version of a policy is live, the one in `policies.live_version`;
the live and the pinned versions are served; rejected versions are not.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, Row, func, select

from migrations import schema
from whetstone.domain.ids import new_id, version_id
from whetstone.domain.lineage import lineage
from whetstone.errors import WhetstoneError

p, v = schema.policies.c, schema.policy_versions.c


class LedgerError(WhetstoneError):
    """The move is not possible with these versions; the message says why, and what is possible."""

    exit_code = 1


@dataclass(frozen=True)
class Move:
    """The live version before and after a move."""

    before: int
    live: int
    rejected: tuple[int, ...] = ()
    """Versions that the move rejected."""


def lock(connection: Connection, project: str, policy: str) -> Row[Any] | None:
    """Return the policy's row, locked until the transaction ends; None if there is none.

    The weak kind of lock, because the proxy's own new groups refer to this row.
    """
    return connection.execute(
        select(schema.policies).where(p.project == project, p.id == policy).with_for_update(key_share=True)
    ).one_or_none()


def version_row(connection: Connection, project: str, policy: str, version: int) -> Row[Any]:
    """Return the version's row.

    Raises:
        LedgerError: there is no such version, or its adapter was removed.
    """
    row = connection.execute(
        select(schema.policy_versions).where(v.project == project, v.id == version_id(policy, version))
    ).one_or_none()
    if row is None:
        raise LedgerError(f"{policy} has no version {version}; `whetstone versions {policy}` lists them")
    if row.removed_at is not None:
        raise LedgerError(
            f"the adapter of {policy}@v{version} was removed at {row.removed_at:%Y-%m-%d %H:%M} UTC; "
            "the setting trainer.keep_adapters limits how many stay"
        )
    return row


def want(connection: Connection, project: str, policy: str, version: int) -> Row[Any]:
    """Have vLLM load a version; a rejected one stays rejected until it is live. Return the previous row, for `unwant`.

    Raises:
        LedgerError: there is no such version, or its adapter was removed.
    """
    row = version_row(connection, project, policy, version)
    _set(connection, project, policy, version, served=True, unserved_at=None)
    return row


def unwant(connection: Connection, was: Row[Any], now: datetime) -> None:
    """Undo `want`, unless the version has gone live or was pinned meanwhile. `was`: the row that `want` returned."""
    row = connection.execute(select(schema.policy_versions).where(v.project == was.project, v.id == was.id)).one()
    if row.state == was.state and row.pinned_at is None and not was.served:
        _unserve(connection, row.project, row.policy, [row.version], now)


def make_live(
    connection: Connection, project: str, policy: str, version: int, keep_served: int, now: datetime, **values: Any
) -> Move:
    """Make this version live; the previous one is retired, and the newest retired versions stay loaded.

    A candidate of another parent is rejected, because the version that it was to improve on is no longer live.
    `values`: further columns of the version to write. If the version is live already, nothing changes.

    The rollback watch over the previous version ends. A watch over this version begins only if it follows its parent:
    otherwise there is no sound comparison, and the operator has decided.

    Raises:
        LedgerError: there is no such version, its adapter was removed, or it is a candidate whose parent was rolled
            back or replaced.
    """
    row = version_row(connection, project, policy, version)
    before = live_version(connection, project, policy)
    if before == version:
        return Move(before, version)
    if row.state == "candidate" and row.parent != before:
        raise LedgerError(f"version {version} of {policy} was made from version {row.parent}, but {before} is live now")
    over_for_good = func.coalesce(v.watched_at, now)
    connection.execute(
        schema.policy_versions.update()
        .where(v.project == project, v.policy == policy, v.state == "live")
        .values(state="retired", watched_at=over_for_good)
    )
    columns = {
        "state": "live",
        "promoted_at": now,
        "served": True,
        "unserved_at": None,
        "reason": None,
        "canary_share": None,
        "tested_by": None,
        **({} if row.parent == before else {"watched_at": over_for_good}),
    }
    _set(connection, project, policy, version, **{**columns, **values})
    connection.execute(
        schema.policies.update().where(p.project == project, p.id == policy).values(live_version=version)
    )
    over = [
        number
        for number, one in _versions(connection, project, policy).items()
        if one.state == "candidate" and one.parent != version
    ]
    for number in over:
        _reject(connection, project, policy, number, f"version {version} went live, which it was not made from", now)
    _keep_newest(connection, project, policy, keep_served, now)
    return Move(before, version, tuple(over))


def reject(
    connection: Connection, project: str, policy: str, version: int, reason: str, now: datetime, **values: Any
) -> None:
    """Reject a version: it is no longer served or loaded, and its trajectories continue with the live one.

    Raises:
        LedgerError: it is the live version, which only `roll_back` can end; or there is none.
    """
    versions = _versions(connection, project, policy)
    if version not in versions:
        raise LedgerError(f"{policy} has no version {version}; `whetstone versions {policy}` lists them")
    if versions[version].state == "live":
        raise LedgerError(f"version {version} of {policy} is live; roll it back instead")
    _reject(connection, project, policy, version, reason, now, **values)


def roll_back(
    connection: Connection, project: str, policy: str, to: int | None, reason: str, keep_served: int, now: datetime
) -> Move:
    """Go back along the lineage: to `to`, else to the result of `step_back`. All versions made since are rejected.

    What the rejected versions sampled is off the lineage from then on: no step trains on it.

    Raises:
        LedgerError: there is no version before the live one, or the live one does not descend from `to`.
    """
    target = step_back(connection, project, policy, to)
    version_row(connection, project, policy, target)
    live = live_version(connection, project, policy)
    versions = _versions(connection, project, policy)
    parents = {number: one.parent for number, one in versions.items()}
    way = lineage(live, parents)
    first = way[way.index(target) - 1]
    over = [
        number
        for number, one in versions.items()
        if one.state in ("live", "retired", "candidate") and first in lineage(number, parents)
    ]
    for number in over:
        _reject(connection, project, policy, number, f"rolled back to version {target}: {reason}", now)
    move = make_live(connection, project, policy, target, keep_served, now)
    return Move(live, target, (*over, *move.rejected))


def step_back(connection: Connection, project: str, policy: str, to: int | None = None) -> int:
    """Return the version that a rollback makes live: `to`, else the nearest ancestor of the live one that is neither
    rejected nor removed.

    Raises:
        LedgerError: there is none, or the live version does not descend from `to`.
    """
    live = live_version(connection, project, policy)
    versions = _versions(connection, project, policy)
    before = lineage(live, {number: one.parent for number, one in versions.items()})[1:]
    whole = [one for one in before if versions[one].removed_at is None]
    if to is None:
        good = next((one for one in whole if versions[one].state != "rejected"), None)
        if good is None:
            raise LedgerError(f"version {live} of {policy} has nothing before it to go back to")
        return good
    if to not in before:
        raise LedgerError(
            f"version {live} of {policy} does not descend from version {to}; it can go back to "
            f"{', '.join(map(str, whole)) or 'none'}. Any other version: promote it"
        )
    return to


def pin(connection: Connection, project: str, policy: str, version: int, now: datetime, most: int) -> None:
    """Keep a version loaded and on the disk regardless of newer versions. `most`: limit of the project's pinned
    adapters.

    Raises:
        LedgerError: there is no such version, its adapter was removed, it has never been live, or there is no room.
    """
    row = version_row(connection, project, policy, version)
    if row.state not in ("live", "retired"):
        raise LedgerError(f"version {version} of {policy} is {row.state}; promote it, then it can be pinned")
    pinned = connection.scalars(
        select(v.id).where(v.project == project, v.pinned_at.is_not(None), v.version > 0, v.id != row.id).order_by(v.id)
    ).all()
    if version > 0 and len(pinned) >= most:
        raise LedgerError(
            f"vLLM has room for {most} pinned versions beside live, recent and tested ones; pinned are: "
            f"{', '.join(pinned) or 'none'}; unpin one, or raise vllm.max_loras"
        )
    _set(connection, project, policy, version, pinned_at=row.pinned_at or now, served=True, unserved_at=None)


def unpin(connection: Connection, project: str, policy: str, version: int, keep_served: int, now: datetime) -> None:
    """Unpin a version, so that newer versions can take its place.

    Raises:
        LedgerError: there is no such version.
    """
    version_row(connection, project, policy, version)
    _set(connection, project, policy, version, pinned_at=None)
    _keep_newest(connection, project, policy, keep_served, now)


def decide(
    connection: Connection,
    project: str,
    policy: str,
    version: int,
    *,
    test: str,
    decision: str,
    now: datetime,
    against: int | None = None,
    reason: str | None = None,
    figures: Mapping[str, Any] | None = None,
) -> None:
    """Record a decision with its figures."""
    connection.execute(
        schema.gate_results.insert().values(
            project=project,
            id=new_id(),
            policy=policy,
            version=version,
            against=against,
            test=test,
            decision=decision,
            reason=reason,
            figures=figures,
            created_at=now,
        )
    )


def live_version(connection: Connection, project: str, policy: str) -> int:
    """Return the number of the live version."""
    return int(connection.execute(select(p.live_version).where(p.project == project, p.id == policy)).scalar_one())


def _versions(connection: Connection, project: str, policy: str) -> dict[int, Any]:
    """Return every version of the policy, the oldest first."""
    query = select(v.version, v.parent, v.state, v.removed_at).where(v.project == project, v.policy == policy)
    return {row.version: row for row in connection.execute(query.order_by(v.version))}


def _reject(
    connection: Connection, project: str, policy: str, version: int, reason: str, now: datetime, **values: Any
) -> None:
    columns = {"state": "rejected", "reason": reason, "canary_share": None, "tested_by": None, "pinned_at": None}
    _set(connection, project, policy, version, **{**columns, **values})
    _unserve(connection, project, policy, [version], now)


def _keep_newest(connection: Connection, project: str, policy: str, keep_served: int, now: datetime) -> None:
    """Unload all retired versions without a pin except the `keep_served` that were live last, and rejected versions
    that were loaded (`want`) but not promoted."""
    retired = (
        select(v.version)
        .where(v.project == project, v.policy == policy, v.state == "retired", v.served, v.version > 0)
        .where(v.pinned_at.is_(None))
        .order_by(v.promoted_at.desc().nulls_last(), v.version.desc())
        .offset(keep_served)
    )
    rejected = select(v.version).where(v.project == project, v.policy == policy, v.state == "rejected", v.served)
    _unserve(connection, project, policy, [*connection.scalars(retired), *connection.scalars(rejected)], now)


def _unserve(connection: Connection, project: str, policy: str, versions: list[int], now: datetime) -> None:
    """Stop serving versions to new requests; answers in progress continue. vLLM always has version 0."""
    connection.execute(
        schema.policy_versions.update()
        .where(v.project == project, v.policy == policy, v.version.in_(versions), v.version > 0, v.served)
        .values(served=False, unserved_at=now)
    )


def _set(connection: Connection, project: str, policy: str, version: int, **values: Any) -> None:
    connection.execute(
        schema.policy_versions.update()
        .where(v.project == project, v.id == version_id(policy, version))
        .values(**values)
    )
