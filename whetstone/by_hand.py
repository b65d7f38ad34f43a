"""Moves of the ledger by hand, each written down. The proxy commits them where one runs, else the command line.

Each is inside a transaction of its caller's that has locked the policy, and raises `LedgerError` as the ledger does.
"""

from datetime import datetime
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Row

from whetstone import store_versions
from whetstone.adapters import AdapterDamaged, verify
from whetstone.settings import Settings
from whetstone.store_versions import LedgerError, Move


def promote(
    connection: Connection, settings: Settings, policy: str, version: int, reason: str | None, now: datetime
) -> Move:
    """From now on this version answers: a candidate before its tests are over, a retired or even a rejected one."""
    move = store_versions.make_live(connection, settings.project, policy, version, settings.trainer.keep_served, now)
    if move.before != move.live:
        _write(connection, settings, policy, version, "promote", now, against=move.before, reason=reason)
    return move


def roll_back(
    connection: Connection, settings: Settings, policy: str, to: int | None, reason: str | None, now: datetime
) -> Move:
    """Go back to `to`, or to what the live version was trained from; all that came of that since is rejected."""
    keep = settings.trainer.keep_served
    move = store_versions.roll_back(connection, settings.project, policy, to, reason or "by hand", keep, now)
    _write(connection, settings, policy, move.before, "rollback", now, against=move.live, reason=reason)
    return move


def pin(connection: Connection, settings: Settings, policy: str, version: int, *, pinned: bool, now: datetime) -> None:
    """Keep a version loaded and on the disk whatever is newer, or no longer."""
    if pinned:
        store_versions.pin(connection, settings.project, policy, version, now, most_pinned(settings))
    else:
        store_versions.unpin(connection, settings.project, policy, version, settings.trainer.keep_served, now)
    _write(connection, settings, policy, version, "pin" if pinned else "unpin", now)


def most_pinned(settings: Settings) -> int:
    """Adapters that vLLM has room for beside each policy's live version, candidate and newest retired ones."""
    return settings.vllm.max_loras - len(settings.all_trained) * (settings.trainer.keep_served + 2)


def check_files(row: Row[Any]) -> None:
    """See that a version's files are those that were written; the base model has none.

    Raises:
        LedgerError: they are not.
    """
    if row.adapter_path is None:
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
    told = (connection, settings.project, policy, version)
    store_versions.decide(*told, test="hand", decision=decision, now=now, against=against, reason=reason)
