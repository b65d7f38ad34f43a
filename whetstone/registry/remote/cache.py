"""Pull adapters from a store into folders of this machine: complete and verified, or not at all.

The cache names each folder by the SHA-256 of its adapter's manifest. It follows the store: what retention has deleted
there goes here too. vLLM may read the folder of a loaded adapter again at any time, so nothing else is removed.
"""

import contextlib
import logging
import os
import secrets
import shutil
import threading
import time
from collections import defaultdict
from pathlib import Path

from whetstone.registry.adapters import TEMPORARY, AdapterDamaged, NotCopied, StoreError, remove, verify
from whetstone.registry.remote.object_store import ObjectStore

SWEEP_EVERY_S = 600.0
UNUSED_S = 3600.0
"""An adapter that the store no longer has stays for this long after its last use."""
SWEEP = "sweep of pulled adapters"
"""Name of the thread that removes some."""

log = logging.getLogger(__name__)


class AdapterCache:
    """The adapters that were pulled to this machine. May be used by several threads and processes."""

    def __init__(self, folder: Path, store: ObjectStore) -> None:
        self._folder = folder
        self._store = store
        self._pulling: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
        self._swept_s: float | None = None

    def fetch(self, sha256: str) -> Path:
        """Return the adapter's folder, verified, after pulling it if it is missing or damaged.

        Raises:
            NotPublished: the store does not have the whole adapter.
            AdapterDamaged: what the store has differs from the manifest.
            StoreUnreachable: the store does not answer.
            NotCopied: the disk refuses.
        """
        folder = self._folder / sha256
        with self._pulling[sha256]:
            if not _is_whole(folder, sha256):
                pull(self._store, sha256, folder)
                log.info("pulled %s", folder)
                self._sweep_sometimes()
        with contextlib.suppress(OSError):
            os.utime(folder)
        return folder

    def _sweep_sometimes(self) -> None:
        if self._swept_s is not None and time.monotonic() - self._swept_s < SWEEP_EVERY_S:
            return
        self._swept_s = time.monotonic()
        # Nothing that is to be loaded waits for it.
        threading.Thread(target=self._try_to_sweep, name=SWEEP, daemon=True).start()

    def _try_to_sweep(self) -> None:
        try:
            self.sweep()
        except (StoreError, OSError) as error:
            log.warning("%s was not swept: %s", self._folder, error)

    def sweep(self) -> list[Path]:
        """Remove what the store no longer has and no server has used for a while. Return the removed folders.

        Raises:
            StoreUnreachable: the store does not answer; nothing was removed.
        """
        published = self._store.objects()
        if not published:  # more likely a mistake than a decision
            return []
        removed = []
        for folder in self._folder.iterdir():
            try:
                unused_s = time.time() - folder.stat().st_mtime
            except FileNotFoundError:
                continue  # another process removed it, or gave it its name
            if folder.name not in published and unused_s > UNUSED_S:
                remove(folder)
                removed.append(folder)
        return removed


def pull(store: ObjectStore, sha256: str, folder: Path) -> None:
    """Write the adapter's published files into a new folder, which gets its name only when it is verified.

    Raises:
        NotPublished, AdapterDamaged, StoreUnreachable: see `AdapterCache.fetch`.
        NotCopied: the disk refuses.
    """
    unfinished = folder.parent / f"{TEMPORARY}{folder.name}-{secrets.token_hex(4)}"
    try:
        unfinished.mkdir(parents=True)
        store.download(sha256, unfinished)
        if verify(unfinished) != sha256:
            raise AdapterDamaged(f"{unfinished}: its manifest is not {sha256}")
        unfinished.rename(folder)
    except OSError as error:
        if not _is_whole(folder, sha256):  # else another process was first
            raise NotCopied(f"{folder}: {error.strerror or error}; nothing was left there") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _is_whole(folder: Path, sha256: str) -> bool:
    """Return whether the adapter is there; a damaged folder is removed."""
    if not folder.exists():
        return False
    try:
        if verify(folder) == sha256:
            return True
    except AdapterDamaged as error:
        log.warning("%s is pulled again: %s", folder, error)
    remove(folder)
    return False
