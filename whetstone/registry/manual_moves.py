"""Manual changes of versions, each recorded. The proxy commits them if one runs, else the command line does.

Each function runs in a transaction of its caller that has locked the policy, and raises `LedgerError` like `versions`.
"""

from datetime import datetime
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Row

from whetstone.config.settings import Settings
from whetstone.registry import versions
from whetstone.registry.adapters import AdapterDamaged, StoreError, verify
from whetstone.registry.remote.object_store import store_of
from whetstone.registry.versions import LedgerError, Move


def promote(
    connection: Connection, settings: Settings, policy: str, version: int, reason: str | None, now: datetime
) -> Move:
    """Make this version live: a candidate before its tests are over, a retired or even a rejected version."""
    move = versions.make_live(connection, settings.project, policy, version, settings.trainer.keep_served, now)
    if move.before != move.live:
        _write(connection, settings, policy, version, "promote", now, against=move.before, reason=reason)
    return move


def roll_back(
    connection: Connection, settings: Settings, policy: str, to: int | None, reason: str | None, now: datetime
) -> Move:
    """Go back to `to`, or to the version that the live one was trained from; everything made from the versions after it
    is rejected."""
    move = versions.roll_back(
        connection, settings.project, policy, to, reason or "by hand", settings.trainer.keep_served, now
    )
    _write(connection, settings, policy, move.before, "rollback", now, against=move.live, reason=reason)
    return move


def pin(connection: Connection, settings: Settings, policy: str, version: int, *, pinned: bool, now: datetime) -> None:
    """Keep a version loaded and on the disk regardless of newer versions, or stop doing so."""
    if pinned:
        # What vLLM has room for besides each policy's live, candidate and newest retired versions.
        most = settings.vllm.max_loras - len(settings.all_trained) * (settings.trainer.keep_served + 2)
        versions.pin(connection, settings.project, policy, version, now, most)
    else:
        versions.unpin(connection, settings.project, policy, version, settings.trainer.keep_served, now)
    _write(connection, settings, policy, version, "pin" if pinned else "unpin", now)


def check_files(row: Row[Any], settings: Settings) -> None:
    """Check that a version's files are those that were written; the base model has none.

    With an adapter store, those in the store: servers verify every byte of them when they pull them.

    Raises:
        LedgerError: they are missing or differ.
    """
    if row.adapter_path is None:
        return
    store = store_of(settings.adapters)
    if store is not None and row.manifest_sha256 is not None:
        try:
            store.check(row.manifest_sha256)
        except (AdapterDamaged, StoreError) as error:
            raise LedgerError(f"the adapter of {row.id} cannot be pulled by servers: {error}") from error
        return
    try:
        manifest_sha256 = verify(Path(row.adapter_path))
    except AdapterDamaged as error:
        raise LedgerError(f"the adapter of {row.id} is damaged: {error}") from error
    if manifest_sha256 != row.manifest_sha256:
        raise LedgerError(f"the adapter of {row.id} in {row.adapter_path} is another one than the database has noted")


def _write(
    connection: Connection,
    settings: Settings,
    policy: str,
    version: int,
    decision: str,
    now: datetime,
    *,
    against: int | None = None,
    reason: str | None = None,
) -> None:
    versions.decide(
        connection,
        settings.project,
        policy,
        version,
        test="hand",
        decision=decision,
        now=now,
        against=against,
        reason=reason,
    )
