"""Choose the adapter folders that can be deleted, and delete them. The SQL is in `trainer.store.retention`.

Of older versions only the optimizer's state is deleted first: without it they answer as before.

The order is: the database marks an adapter as removed, so that no request can name it any more; then its folder is
renamed; then the folder is deleted. After a crash at any point, every folder under a final name is complete, and the
next sweep finishes the work.
"""

import logging
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Protocol

from trainer.adapters import files
from trainer.adapters.published import Manifests, sweep_published
from whetstone.config.settings import Settings
from whetstone.registry.adapters import OPTIMIZER_STATE, StoreError
from whetstone.registry.remote.object_store import store_of

SWEEP_EVERY_S = 60.0
KEEP_OPTIMIZER = 2
"""Newest versions that keep their optimizer's state, besides those that a step can start from."""

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
    begun: bool
    """An unfinished step started from it."""
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

    def __init__(self, ledger: Ledger, settings: Settings, manifests: Manifests | None = None) -> None:
        """`manifests`: where the adapter store is to be swept too."""
        self._ledger = ledger
        self._settings = settings
        self._manifests = manifests
        self._swept_at: datetime | None = None

    def go_on(self, now: datetime) -> None:
        """Sweep, unless the last sweep was less than SWEEP_EVERY_S ago and no version was written since."""
        if self._swept_at is None or now - self._swept_at > timedelta(seconds=SWEEP_EVERY_S):
            self._swept_at = now
            sweep_adapters(self._ledger, self._settings, now)
            self._sweep_published(now)

    def _sweep_published(self, now: datetime) -> None:
        store = store_of(self._settings.adapters)
        if store is None or self._manifests is None:
            return
        try:
            sweep_published(self._manifests, store, now)
        except StoreError as error:
            log.warning("the adapter store was not swept, the next sweep tries again: %s", error)

    def written(self) -> None:
        """Note that a version was written: the next one needs room."""
        self._swept_at = None


def sweep_adapters(ledger: Ledger, settings: Settings, now: datetime) -> list[Path]:
    """Delete the adapters that can go, and what an earlier sweep left unfinished. Return the deleted folders."""
    adapters = settings.data.resolve() / "adapters"
    inert: list[Path] = []

    def choose(standing: Sequence[StoredAdapter]) -> list[StoredAdapter]:
        # An adapter that was imported from outside and stays in its own folder is not ours to delete.
        ours = [each for each in standing if each.folder.parent == adapters]
        older = startable_no_more(ours)
        inert.extend(older)
        sizes = {each.folder: _bytes(each.folder, without_state=each.folder in older) for each in ours}
        return removable(ours, sizes, settings, now)

    for policy in ledger.policies():
        ledger.mark(policy, choose, now)
    for folder in inert:
        _remove_state(folder)
    standing = [folder for folder in adapters.glob("*") if not folder.name.startswith(files.TEMPORARY)]
    gone = [folder for folder in ledger.removed(standing) if _remove(folder)]
    files.sweep(adapters)
    return gone


def removable(
    standing: Sequence[StoredAdapter], sizes: Mapping[Path, int], settings: Settings, now: datetime
) -> list[StoredAdapter]:
    """Return those of a policy's adapters (newest first) that can be deleted. `sizes`: folder -> bytes.

    Never deleted are: adapters in use, the live one and its parent (the target of a rollback), candidates, the best
    one, and those that a server may still be unloading. Of the others the newest `keep_adapters` and those younger than
    `keep_adapters_s` are retained, as far as `max_adapter_bytes` has room for them and for one more version; the oldest
    go first.
    """
    rules = settings.trainer
    spared = {each.version for each in standing if each.state == "live"} | _parents_of_live(standing)
    if (best := _best(standing)) is not None:
        spared.add(best.version)
    drained = now - timedelta(seconds=settings.proxy.drain_s)
    free = [
        each
        for each in standing
        if not each.in_use
        and each.version not in spared
        and each.state in ("retired", "rejected")
        and each.unserved_at < drained
    ]
    newest = {each.version for each in standing[: rules.keep_adapters]}
    aged = now - timedelta(seconds=rules.keep_adapters_s)
    chosen = [each for each in free if each.version not in newest and each.created_at < aged]
    young = [each for each in free if each not in chosen]
    over = sum(sizes.values()) + max(sizes.values(), default=0) - rules.max_adapter_bytes
    over -= sum(sizes[each.folder] for each in chosen)
    while over > 0 and young:
        chosen.append(young.pop())
        over -= sizes[chosen[-1].folder]
    if over > 0 and not chosen:
        log.warning(
            "%s: the adapters that must stay leave no room for another version within trainer.max_adapter_bytes (%d): "
            "raise it, or unpin versions",
            standing[0].name, rules.max_adapter_bytes,
        )  # fmt: skip
    return chosen


def startable_no_more(standing: Sequence[StoredAdapter]) -> set[Path]:
    """Return the folders of those of a policy's adapters (newest first) whose optimizer's state can be deleted.

    It stays with the newest KEEP_OPTIMIZER, and with what a step starts from or may start from again: the live version,
    its parent, candidates, and the start of an unfinished step.
    """
    parents = _parents_of_live(standing)
    older = [
        each
        for each in standing[KEEP_OPTIMIZER:]
        if not each.begun and each.state not in ("live", "candidate") and each.version not in parents
    ]
    return {each.folder for each in older} - {each.folder for each in standing if each not in older}


def _parents_of_live(standing: Sequence[StoredAdapter]) -> set[int | None]:
    return {each.parent for each in standing if each.state == "live"}


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


def _bytes(folder: Path, *, without_state: bool) -> int:
    """Return the size of the folder's files; 0 where it is gone already."""
    try:
        paths = [path for path in folder.iterdir() if not (without_state and path.name == OPTIMIZER_STATE)]
        return sum(path.stat().st_size for path in paths)
    except OSError:
        return 0


def _remove_state(folder: Path) -> None:
    try:
        (folder / OPTIMIZER_STATE).unlink(missing_ok=True)
    except OSError as error:
        log.warning("%s: its optimizer's state cannot be removed, the next sweep tries again: %s", folder, error)
