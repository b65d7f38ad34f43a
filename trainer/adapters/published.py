"""Keep the adapter store and the database equal: publish what is missing there, delete what no version needs.

A store has an object only if the trainer published it, so what no version refers to is either of a step that ended
before its version was recorded, or of a version that retention has removed.
"""

import logging
from collections.abc import Collection
from datetime import datetime
from pathlib import Path
from typing import Protocol

from whetstone.registry.adapters import CONFIG, MANIFEST, WEIGHTS, AdapterDamaged
from whetstone.registry.remote.cache import pull
from whetstone.registry.remote.object_store import ObjectStore

UNRECORDED_S = 3600.0
"""How long objects stay whose version the database does not have (yet)."""

ALL = frozenset({MANIFEST, WEIGHTS, CONFIG})
"""The objects of an adapter."""

log = logging.getLogger(__name__)


class Manifests(Protocol):
    """The part of the database that concerns published adapters."""

    def standing(self) -> list[tuple[str, Path]]:
        """Return the adapters that are not removed: the manifest's SHA-256, and the folder."""

    def recorded(self, hashes: Collection[str]) -> set[str]:
        """Return those of these hashes that the database has, also of removed versions."""


def sweep_published(manifests: Manifests, store: ObjectStore, now: datetime) -> list[str]:
    """Publish adapters of this machine that the store lacks, and delete what it should no longer have.

    Return the deleted hashes.

    Raises:
        StoreUnreachable: the store does not answer; the next sweep continues.
    """
    # Listed first: what is published meanwhile is not in the list, so it is not deleted.
    there = store.objects()
    standing = manifests.standing()
    for sha256, folder in standing:
        if folder.is_dir() and not there.get(sha256, {}).keys() >= ALL:
            _publish_again(store, folder)
    unneeded = there.keys() - {sha256 for sha256, _ in standing}
    recorded = manifests.recorded(unneeded)
    deleted = []
    for sha256 in sorted(unneeded):
        names = there[sha256]
        if sha256 in recorded or now.timestamp() - store.written_at_s(sha256, names) > UNRECORDED_S:
            store.delete(sha256, names)
            log.info("deleted %s from %s: no version needs it", sha256, store.address)
            deleted.append(sha256)
    return deleted


def bring(store: ObjectStore, folder: Path, manifest_sha256: str | None) -> None:
    """Have a version's folder on this machine: pull it if another machine's trainer wrote it.

    It then has the weights in bf16 and no optimizer state.

    Raises:
        AdapterDamaged: the database has no hash, or what the store has differs from the manifest.
        NotPublished, StoreUnreachable: it cannot be had now.
        NotCopied: the disk refuses.
    """
    if folder.is_dir():
        return
    if manifest_sha256 is None:
        raise AdapterDamaged(f"{folder} is not on this machine, and the database has no hash to pull it by")
    pull(store, manifest_sha256, folder)
    log.info("pulled %s from %s", folder.name, store.address)


def _publish_again(store: ObjectStore, folder: Path) -> None:
    try:
        store.publish(folder)
    except AdapterDamaged as error:
        log.warning("%s cannot be published: %s", folder, error)
