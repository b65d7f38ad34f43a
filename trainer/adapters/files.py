"""Write adapter folders: complete or not at all, never overwritten.

`whetstone.registry.adapters` checks and loads them.

A folder gets its final name by one rename, after every byte is on the disk (fsync). So a folder with a final name is
always complete, even after a crash. Unfinished folders begin with `.tmp-`; `sweep` removes them. The learner decides
what the files contain.
"""

import hashlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Protocol

from trainer.domain.base import BaseModel
from trainer.errors import AdapterExists, AdapterNotWritten
from whetstone.registry.adapters import BF16_WEIGHTS, FORMAT, MANIFEST, WEIGHTS

TEMPORARY = ".tmp-"
"""Prefix of the name of an unfinished folder."""


class AdapterSource(Protocol):
    """What can be written: the part of a learner that this module needs."""

    @property
    def base(self) -> BaseModel:
        """The base model that the adapter belongs to."""

    def files(self) -> Mapping[str, bytes]:
        """Return the files: file name -> contents."""


def write(
    folder: Path, learner: AdapterSource, *, parent: int, step: int, in_bf16: Callable[[bytes], bytes] | None = None
) -> str:
    """Write the adapter with everything the next step needs. Return the manifest's SHA-256, in hex.

    `parent` is the version that the step started from, `step` the step's number; the manifest records both. `in_bf16`
    returns the weights' file in bf16, which is written as well: it is what an adapter store gets.

    Raises:
        AdapterExists: the folder exists already; it is left unchanged.
        AdapterNotWritten: the disk is full or refuses the write; nothing exists under the final name.
    """
    if os.path.lexists(folder):
        raise AdapterExists(f"{folder}: there already; adapters are never overwritten")
    files = dict(learner.files())
    if in_bf16 is not None:
        files[BF16_WEIGHTS] = in_bf16(files[WEIGHTS])
    manifest = _manifest(files, learner.base, parent=parent, step=step)
    standing = folder.parent / f"{TEMPORARY}{folder.name}-{secrets.token_hex(4)}"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        standing.mkdir()
        for name, content in {**files, MANIFEST: manifest}.items():
            _write_synced(standing / name, content)
        _sync_folder(standing)
        standing = standing.rename(folder)
        _sync_folder(folder.parent)
    except OSError as error:
        taken = standing != folder and os.path.lexists(folder)
        shutil.rmtree(standing, ignore_errors=True)
        if taken:
            raise AdapterExists(f"{folder}: another process wrote it meanwhile; it is never overwritten") from error
        raise AdapterNotWritten(f"{folder}: {error.strerror or error}; nothing was left there") from error
    return hashlib.sha256(manifest).hexdigest()


def sweep(parent: Path, *, older_than_s: float = 3600) -> list[Path]:
    """Remove what crashed writers left in `parent`. Return the removed folders.

    Folders younger than `older_than_s` stay: a writer may still be using them.
    """
    removed = []
    for leftover in parent.glob(f"{TEMPORARY}*"):
        try:
            age_s = time.time() - leftover.stat().st_mtime
        except FileNotFoundError:
            continue  # its writer has just finished or cleaned up
        if age_s > older_than_s:
            shutil.rmtree(leftover, ignore_errors=True)
            removed.append(leftover)
    return removed


def _manifest(files: Mapping[str, bytes], base: BaseModel, *, parent: int, step: int) -> bytes:
    content = {
        "format": FORMAT,
        "parent": parent,
        "step": step,
        "base_model": asdict(base),
        "files": {
            name: {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
            for name, content in sorted(files.items())
        },
    }
    return json.dumps(content, indent=1).encode() + b"\n"


def _write_synced(path: Path, content: bytes) -> None:
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
