"""Verify adapter folders against their manifests, load missing adapters into vLLM, and copy folders.

The trainer defines the files' content and writes them. A folder is verified before it is copied, whole under a new name
(`copy`) or in the form that peft reads (`export`).
"""

import contextlib
import hashlib
import json
import logging
import os
import secrets
import shutil
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

from whetstone.errors import WhetstoneError
from whetstone.vllm.client import Vllm, VllmRefused

MANIFEST = "manifest.json"
FORMAT = 1
"""Version of the folder's layout; readers refuse others."""
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
OPTIMIZER_STATE = "optimizer.safetensors"
"""Two thirds of an adapter's bytes, which only the next step needs. Retention removes it from older versions, so it is
the one file that may be missing.
"""
BF16_WEIGHTS = "adapter_model.bf16.safetensors"
"""The weights in bf16, where versions travel by a store: that is what is published, under the name WEIGHTS."""
TEMPORARY = ".tmp-"
"""Prefix of unfinished folders; the training worker removes those that are left behind."""

log = logging.getLogger(__name__)


class AdapterDamaged(WhetstoneError):
    """A file is missing or differs from the manifest. The message names it."""


class NotCopied(WhetstoneError):
    """An adapter's folder was not copied; the message says why."""

    exit_code = 1


class StoreError(WhetstoneError):
    """An adapter cannot be had from its store, or not be put there.

    StoreError
    ├── StoreUnreachable  the store, or the puller beside vLLM, cannot be reached
    └── NotPublished      the store does not have the whole adapter
    """

    exit_code = 1


class StoreUnreachable(StoreError):
    """The store, or the puller beside vLLM, does not answer, answers with an error, or not in time."""


class NotPublished(StoreError):
    """The store does not have the adapter, or not the whole adapter."""


def load_missing(vllm: Vllm, wanted: Mapping[str, Path], loaded: Set[str]) -> None:
    """Load the adapters in `wanted` (name -> folder) that are not in `loaded`. Failures are logged and skipped.

    Two callers may do this at once: the second finds the name taken, which is fine.

    Raises:
        VllmDown: vLLM cannot be reached.
        VllmRefused: vLLM does not list its models.
    """
    missing = {name: folder for name, folder in wanted.items() if name not in loaded}
    for name, folder in missing.items():
        try:
            verify(folder)
            vllm.load(name, folder)
            log.info("loaded %s", name)
        except (AdapterDamaged, VllmRefused) as error:
            if name not in vllm.models():
                log.error("%s cannot be loaded: %s", name, error)


def verify(folder: Path) -> str:
    """Check every file against the manifest. Return the manifest's SHA-256, for comparison with the database.

    Only the optimizer's state may be missing. A folder that was pulled from a store has only what was published.

    Raises:
        AdapterDamaged: the manifest or one of its files is missing, unreadable or altered; the message names the file.
    """
    manifest, content = read_manifest(folder)
    for name, expected in _expected(folder, manifest).items():
        path = folder / name
        if name == OPTIMIZER_STATE and not path.exists():
            continue
        try:
            size = path.stat().st_size
            if size != expected["bytes"]:
                raise AdapterDamaged(f"{path}: {size} bytes, the manifest says {expected['bytes']}")
            with path.open("rb") as file:
                sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise AdapterDamaged(f"{path}: {error.strerror or error}") from error
        if sha256 != expected["sha256"]:
            raise AdapterDamaged(f"{path}: its SHA-256 is not the one in the manifest")
    return hashlib.sha256(content).hexdigest()


def read_manifest(folder: Path) -> tuple[dict[str, Any], bytes]:
    """Return the manifest, parsed and as bytes. Checks its form, not the files.

    Raises:
        AdapterDamaged: it is missing, unreadable or of another format.
    """
    path = folder / MANIFEST
    try:
        content = path.read_bytes()
    except OSError as error:
        raise AdapterDamaged(f"{path}: {error.strerror or error}") from error
    return parse_manifest(content, str(path)), content


def parse_manifest(content: bytes, path: str) -> dict[str, Any]:
    """Return the manifest. Checks its form. `path` is for messages.

    Raises:
        AdapterDamaged: it is unreadable or of another format.
    """
    try:
        manifest: dict[str, Any] = json.loads(content)
        if manifest["format"] != FORMAT:
            raise AdapterDamaged(f"{path}: format {manifest['format']}, this version reads {FORMAT}")
        for name, file in manifest["files"].items():
            if Path(name).name != name or not isinstance(file["bytes"], int) or not isinstance(file["sha256"], str):
                raise AdapterDamaged(f"{path}: no entry of ours: {name!r}")
        if not isinstance(manifest["base_model"], dict):
            raise AdapterDamaged(f"{path}: base_model is no object")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise AdapterDamaged(f"{path}: not a manifest of ours ({error!r})") from error
    return manifest


def published_files(manifest: Mapping[str, Any]) -> dict[str, str]:
    """Return what is published of an adapter: name in the store -> name in the folder of the trainer that wrote it.

    Raises:
        AdapterDamaged: the manifest lists no weights, or no config.
    """
    weights = BF16_WEIGHTS if BF16_WEIGHTS in manifest["files"] else WEIGHTS
    files = {WEIGHTS: weights, CONFIG: CONFIG}
    if missing := set(files.values()) - manifest["files"].keys():
        raise AdapterDamaged(f"the manifest lists no {', '.join(sorted(missing))}")
    return files


def is_pulled(folder: Path) -> bool:
    """Return whether the folder has only what is published of its adapter.

    Raises:
        AdapterDamaged: its manifest cannot be read.
    """
    manifest, _ = read_manifest(folder)
    further = manifest["files"].keys() - {WEIGHTS, CONFIG, OPTIMIZER_STATE}
    return bool(further) and not any((folder / name).exists() for name in further)


def _expected(folder: Path, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the files that the folder must have: name -> entry of the manifest."""
    files: dict[str, Any] = manifest["files"]
    if not is_pulled(folder):
        return files
    return {name: files[source] for name, source in published_files(manifest).items()}


def copy(source: Path, folder: Path) -> None:
    """Copy the adapter, with its optimizer's state if it has one, under a new name, completely or not at all.

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
    is_empty = folder.is_dir() and not any(folder.iterdir())
    if os.path.lexists(folder) and not is_empty:
        raise NotCopied(f"{folder} is there already; name a folder that is new or empty")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
