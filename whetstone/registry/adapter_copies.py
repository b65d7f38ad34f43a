"""Copy adapter folders: whole under a new name, or in the form that peft reads.

The source was verified against its manifest before (`whetstone.registry.adapters.verify`).
"""

import contextlib
import json
import os
import secrets
import shutil
from pathlib import Path

from whetstone.errors import WhetstoneError

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
TEMPORARY = ".tmp-"
"""Prefix of unfinished folders; the training worker removes those that are left behind."""


class NotCopied(WhetstoneError):
    """An adapter's folder was not copied; the message says why."""


def copy(source: Path, folder: Path) -> None:
    """Copy the adapter with its optimizer's state under a new name, completely or not at all.

    Raises:
        NotCopied: the folder exists already, or the disk refuses.
    """
    if os.path.lexists(folder):
        raise NotCopied(f"{folder}: there already; adapters are never overwritten")
    unfinished = folder.parent / f"{TEMPORARY}{folder.name}-{secrets.token_hex(4)}"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(source, unfinished)
        for path in (*unfinished.iterdir(), unfinished):
            _sync(path)
        unfinished.rename(folder)
        _sync(folder.parent)
    except OSError as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise NotCopied(f"{folder}: {error.strerror or error}; nothing was left there") from error


def remove(folder: Path) -> None:
    """Remove a folder that no version uses; a half-removed folder never has an adapter's name."""
    leaving = folder.with_name(f"{TEMPORARY}{folder.name}-{secrets.token_hex(4)}")
    with contextlib.suppress(OSError):
        folder.rename(leaving)
    shutil.rmtree(leaving, ignore_errors=True)


def export(source: Path, folder: Path, base_model: str) -> None:
    """Copy what peft reads, and nothing else: the weights, and the config with the base model's name.

    Raises:
        NotCopied: the folder is not empty, or the disk refuses.
    """
    check_new(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        config = json.loads((source / CONFIG).read_bytes()) | {"base_model_name_or_path": base_model}
        shutil.copyfile(source / WEIGHTS, folder / WEIGHTS)
        (folder / CONFIG).write_text(json.dumps(config, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    except OSError as error:
        raise NotCopied(f"{folder}: {error.strerror or error}") from error


def check_new(folder: Path) -> None:
    """Check that the folder is new or empty, so that nothing is overwritten.

    Raises:
        NotCopied: it contains something.
    """
    if folder.is_dir() and not any(folder.iterdir()):
        return
    if os.path.lexists(folder):
        raise NotCopied(f"{folder} is there already; name a folder that is new or empty")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
