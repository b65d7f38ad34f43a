"""Verify adapter folders against their manifests, and load missing adapters into vLLM.

The trainer defines the files' content and writes them.
"""

import hashlib
import json
import logging
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

from whetstone.errors import WhetstoneError
from whetstone.vllm.client import Vllm, VllmRefused

MANIFEST = "manifest.json"
FORMAT = 1
"""Version of the folder's layout; readers refuse others."""

log = logging.getLogger(__name__)


class AdapterDamaged(WhetstoneError):
    """A file is missing or differs from the manifest. The message names it."""


def load_missing(vllm: Vllm, wanted: Mapping[str, Path], loaded: Set[str]) -> None:
    """Load the adapters in `wanted` (name -> folder) that are not in `loaded`. Failures are logged and skipped.

    Two callers may do this at once: the second finds the name taken, which is fine.

    Raises:
        VllmDown: vLLM cannot be reached.
        VllmRefused: vLLM does not list its models.
    """
    for name, folder in wanted.items():
        if name in loaded:
            continue
        try:
            verify(folder)
            vllm.load(name, folder)
            log.info("loaded %s", name)
        except (AdapterDamaged, VllmRefused) as error:
            if name not in vllm.models():
                log.error("%s cannot be loaded: %s", name, error)


def verify(folder: Path) -> str:
    """Check every file against the manifest. Return the manifest's SHA-256, for comparison with the database.

    Raises:
        AdapterDamaged: the manifest or one of its files is missing, unreadable or altered; the message names the file.
    """
    manifest, content = read_manifest(folder)
    for name, expected in manifest["files"].items():
        path = folder / name
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
        manifest = json.loads(content)
        if manifest["format"] != FORMAT:
            raise AdapterDamaged(f"{path}: format {manifest['format']}, this version reads {FORMAT}")
        for name, file in manifest["files"].items():
            if Path(name).name != name or not isinstance(file["bytes"], int) or not isinstance(file["sha256"], str):
                raise AdapterDamaged(f"{path}: no entry of ours: {name!r}")
        if not isinstance(manifest["base_model"], dict):
            raise AdapterDamaged(f"{path}: base_model is no object")
    except OSError as error:
        raise AdapterDamaged(f"{path}: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise AdapterDamaged(f"{path}: not a manifest of ours ({error!r})") from error
    return manifest, content
