"""Which adapter folders may go, and how they go. Knows files and the rules; the SQL is `store_retention`'s.

First the database says that an adapter is removed: then nobody can ask for it any more. Then its folder is renamed,
then deleted. Whatever dies in between, nothing stands under a final name that is not whole, and the next sweep ends it.
"""

import logging
import shutil
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Protocol

from trainer import adapter
from whetstone.settings import Settings

SWEEP_EVERY_S = 60.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Kept:
    """An adapter on the disk, and what speaks for keeping it."""

    name: str
    version: int
    parent: int | None
    state: str
    folder: Path
    in_use: bool
    """Requests may name it, it is pinned, a server has it loaded, or a step that is not over started from it."""
    unserved_at: datetime
    created_at: datetime
    heldout_mean: float | None


Choose = Callable[[Sequence[Kept]], list[Kept]]


class Ledger(Protocol):
    """The database, as far as folders go."""

    def policies(self) -> list[str]:
        """The project's policies."""

    def mark(self, policy: str, choose: Choose, now: datetime) -> list[Path]:
        """Write down that adapters are removed, those that `choose` picks. Returns their folders."""

    def removed(self, folders: Collection[Path]) -> list[Path]:
        """Of these folders, those that no version needs any more."""


class Sweeper:
    """Sweeps adapters now and then."""

    def __init__(self, ledger: Ledger, settings: Settings) -> None:
        self._ledger = ledger
        self._settings = settings
        self._swept_at: datetime | None = None

    def go_on(self, now: datetime) -> None:
        """Sweep, unless that was done within SWEEP_EVERY_S."""
        if self._swept_at is None or now - self._swept_at > timedelta(seconds=SWEEP_EVERY_S):
            self._swept_at = now
            sweep_adapters(self._ledger, self._settings, now)


def sweep_adapters(ledger: Ledger, settings: Settings, now: datetime) -> list[Path]:
    """Remove what need not be kept, and what an earlier sweep did not end. Returns the folders that are gone."""
    adapters = settings.data.resolve() / "adapters"

    def choose(standing: Sequence[Kept]) -> list[Kept]:
        # What was imported from elsewhere and left there is not ours to delete.
        ours = [each for each in standing if each.folder.parent == adapters]
        return removable(ours, settings, now)

    for policy in ledger.policies():
        ledger.mark(policy, choose, now)
    standing = [folder for folder in adapters.glob("*") if not folder.name.startswith(adapter.TEMPORARY)]
    gone = [folder for folder in ledger.removed(standing) if _remove(folder)]
    adapter.sweep(adapters)
    return gone


def removable(standing: Sequence[Kept], settings: Settings, now: datetime) -> list[Kept]:
    """Of a policy's adapters, the newest first, those that need not be kept.

    Kept are those in use, the live one and its parent (what a rollback goes to), candidates, the best one, the newest
    `keep_adapters`, those younger than `keep_adapters_s`, and those that a server may still be unloading.
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


def _best(standing: Sequence[Kept]) -> Kept | None:
    """The highest mean on the held-out prompts, of equals the newest; rejected ones are not good, whatever they got."""
    good = [each for each in standing if each.heldout_mean is not None and each.state != "rejected"]
    return max(good, key=lambda each: (each.heldout_mean, each.version), default=None)


def _remove(folder: Path) -> bool:
    """Whether it is gone. Renamed first: half a folder must not stand under an adapter's name."""
    leaving = folder.with_name(f"{adapter.TEMPORARY}{folder.name}-removed")
    try:
        folder.rename(leaving)
        shutil.rmtree(leaving)
    except OSError as error:
        log.warning("%s cannot be removed, the next sweep tries again: %s", folder, error)
        return False
    log.info("removed %s", folder)
    return True
