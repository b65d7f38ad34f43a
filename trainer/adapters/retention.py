"""Choose the adapter folders that can be deleted, and delete them. The SQL is in `trainer.store.retention`.

The order is: the database marks an adapter as removed, so that no request can name it any more; then its folder is
renamed; then the folder is deleted. After a crash at any point, every folder under a final name is complete, and the
next sweep finishes the work.
"""

import logging
import shutil
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Protocol

from trainer.adapters import files
from whetstone.config.settings import Settings

SWEEP_EVERY_S = 60.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StoredAdapter:
    """An adapter on the disk, with the facts that decide whether it is retained."""

    name: str
    version: int
    parent: int | None
    state: str
    folder: Path
    in_use: bool
    """Requests may name it, it is pinned, a server has it loaded, or an unfinished step started from it."""
    unserved_at: datetime
    created_at: datetime
    heldout_mean: float | None


Choose = Callable[[Sequence[StoredAdapter]], list[StoredAdapter]]


class Ledger(Protocol):
    """The part of the database that concerns adapter folders."""

    def policies(self) -> list[str]:
        """Return the project's policies."""

    def mark(self, policy: str, choose: Choose, now: datetime) -> list[Path]:
        """Mark the adapters that `choose` picks as removed. Return their folders."""

    def removed(self, folders: Collection[Path]) -> list[Path]:
        """Return those of these folders that no version needs any more."""


class Sweeper:
    """Sweeps adapters from time to time."""

    def __init__(self, ledger: Ledger, settings: Settings) -> None:
        self._ledger = ledger
        self._settings = settings
        self._swept_at: datetime | None = None

    def go_on(self, now: datetime) -> None:
        """Sweep, unless the last sweep was less than SWEEP_EVERY_S ago."""
        if self._swept_at is None or now - self._swept_at > timedelta(seconds=SWEEP_EVERY_S):
            self._swept_at = now
            sweep_adapters(self._ledger, self._settings, now)


def sweep_adapters(ledger: Ledger, settings: Settings, now: datetime) -> list[Path]:
    """Delete the adapters that can go, and what an earlier sweep left unfinished. Return the deleted folders."""
    adapters = settings.data.resolve() / "adapters"

    def choose(standing: Sequence[StoredAdapter]) -> list[StoredAdapter]:
        # An adapter that was imported from outside and stays in its own folder is not ours to delete.
        ours = [each for each in standing if each.folder.parent == adapters]
        return removable(ours, settings, now)

    for policy in ledger.policies():
        ledger.mark(policy, choose, now)
    standing = [folder for folder in adapters.glob("*") if not folder.name.startswith(files.TEMPORARY)]
    gone = [folder for folder in ledger.removed(standing) if _remove(folder)]
    files.sweep(adapters)
    return gone


def removable(standing: Sequence[StoredAdapter], settings: Settings, now: datetime) -> list[StoredAdapter]:
    """Return those of a policy's adapters (newest first) that can be deleted.

    Retained are: adapters in use, the live one and its parent (the target of a rollback), candidates, the best one, the
    newest `keep_adapters`, those younger than `keep_adapters_s`, and those that a server may still be unloading.
    """
    live = [each for each in standing if each.state == "live"]
    spared = {each.version for each in live} | {each.parent for each in live}
    if (best := _best(standing)) is not None:
        spared.add(best.version)
    aged = now - timedelta(seconds=settings.trainer.keep_adapters_s)
    drained = now - timedelta(seconds=settings.proxy.drain_s)
    return [
        each
        for each in standing[settings.trainer.keep_adapters :]
        if not each.in_use
        and each.version not in spared
        and each.state in ("retired", "rejected")
        and each.created_at < aged
        and each.unserved_at < drained
    ]


def _best(standing: Sequence[StoredAdapter]) -> StoredAdapter | None:
    """Return the adapter with the highest mean on the held-out prompts, the newest of equals.

    Rejected versions do not count.
    """
    good = [each for each in standing if each.heldout_mean is not None and each.state != "rejected"]
    return max(good, key=lambda each: (each.heldout_mean, each.version), default=None)


def _remove(folder: Path) -> bool:
    """Delete the folder; return whether it is gone. Rename first: an adapter's name must never show half a folder."""
    leaving = folder.with_name(f"{files.TEMPORARY}{folder.name}-removed")
    try:
        folder.rename(leaving)
        shutil.rmtree(leaving)
    except OSError as error:
        log.warning("%s cannot be removed, the next sweep tries again: %s", folder, error)
        return False
    log.info("removed %s", folder)
    return True
