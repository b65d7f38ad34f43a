"""Adapters, and stores on this machine whose file systems can be made to fail."""

import asyncio
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fsspec.asyn import AsyncFileSystem
from fsspec.implementations.local import LocalFileSystem

from whetstone.registry.adapters import BF16_WEIGHTS, CONFIG, FORMAT, MANIFEST, OPTIMIZER_STATE, WEIGHTS
from whetstone.registry.remote.object_store import ObjectStore

FILES = {
    WEIGHTS: b"weights in fp32",
    BF16_WEIGHTS: b"in bf16",
    CONFIG: b"{}",
    OPTIMIZER_STATE: b"moments",
    "rng.safetensors": b"state",
}
PUBLISHED = {WEIGHTS: b"in bf16", CONFIG: b"{}"}


def write_adapter(folder: Path, files: dict[str, bytes] | None = None) -> str:
    """Write an adapter as a trainer does; return its manifest's hash."""
    files = FILES if files is None else files
    folder.mkdir(parents=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    entries = {
        name: {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()} for name, content in files.items()
    }
    manifest = {"format": FORMAT, "files": entries, "base_model": {}, "name": folder.name}
    content = json.dumps(manifest).encode()
    (folder / MANIFEST).write_bytes(content)
    return hashlib.sha256(content).hexdigest()


class FaultyFiles:
    """A local file system. `before` is called with each method and path, and may raise."""

    def __init__(self) -> None:
        self._files: Any = LocalFileSystem(auto_mkdir=True)
        self.calls: list[tuple[str, str]] = []
        self.before: Callable[[str, str], None] = lambda _method, _path: None

    def __getattr__(self, method: str) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            path = arguments[1] if method == "put_file" else arguments[0]
            self.calls.append((method, Path(path).name))
            self.before(method, Path(path).name)
            return getattr(self._files, method)(*arguments, **named)

        return call

    def fail_at(self, name: str) -> None:
        """Fail when an object of this name is touched, until `work` is called."""

        def fail(_method: str, path: str) -> None:
            if path == name:
                raise OSError("connection reset by peer")

        self.before = fail

    def fail(self) -> None:
        """Fail at everything."""

        def fail(_method: str, _path: str) -> None:
            raise ConnectionError("connection refused")

        self.before = fail

    def work(self) -> None:
        """Work again."""
        self.before = lambda _method, _path: None


class SilentFiles(AsyncFileSystem):
    """A file system that never answers."""

    cachable = False

    async def _find(self, *_: Any, **__: Any) -> None:
        await asyncio.sleep(3600)


def faulty_store(folder: Path) -> tuple[ObjectStore, FaultyFiles]:
    """Return a store in a folder, and its file system."""
    files = FaultyFiles()
    return ObjectStore("file:///store", 60, files, str(folder)), files
