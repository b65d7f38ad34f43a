"""Adapter folders copied: whole under a new name, or as peft reads them. Knows files; no table.

What is copied was checked against its manifest before (`whetstone.adapters.verify`).
"""

import contextlib
import json
import os
import secrets
import shutil
from pathlib import Path

from whetstone.admin import NotDone

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
TEMPORARY = ".tmp-"
"""How the name of an unfinished folder begins; the training worker removes those that are left behind."""


def copy(source: Path, folder: Path) -> None:
    """The adapter with its optimizer's state under a new name, whole or not at all.

    Raises:
        NotDone: the folder is there already, or the disk refuses.
    """
    if os.path.lexists(folder):
        raise NotDone(f"{folder}: there already; adapters are never overwritten")
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
        raise NotDone(f"{folder}: {error.strerror or error}; nothing was left there") from error


def remove(folder: Path) -> None:
    """Take a folder away that no version has become; half of it never stands under an adapter's name."""
    leaving = folder.with_name(f"{TEMPORARY}{folder.name}-{secrets.token_hex(4)}")
    with contextlib.suppress(OSError):
        folder.rename(leaving)
    shutil.rmtree(leaving, ignore_errors=True)


def export(source: Path, folder: Path, base_model: str) -> None:
    """What peft reads, and nothing else: weights, and the config with the base model's name.

    Raises:
        NotDone: the folder has something in it, or the disk refuses.
    """
    check_new(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        config = json.loads((source / CONFIG).read_bytes()) | {"base_model_name_or_path": base_model}
        shutil.copyfile(source / WEIGHTS, folder / WEIGHTS)
        (folder / CONFIG).write_text(json.dumps(config, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    except OSError as error:
        raise NotDone(f"{folder}: {error.strerror or error}") from error


def check_new(folder: Path) -> None:
    """See that nothing is in the folder that would be written over.

    Raises:
        NotDone: something is.
    """
    if folder.is_dir() and not any(folder.iterdir()):
        return
    if os.path.lexists(folder):
        raise NotDone(f"{folder} is there already; name a folder that is new or empty")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
