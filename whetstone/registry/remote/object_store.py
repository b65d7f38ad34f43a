"""Publish, read, list and delete adapters in an object store, through fsspec.

An adapter's objects lie under `<store>/<SHA-256 of its manifest>/`: weights, config, and last the manifest. So an
adapter with a manifest is complete, two adapters never share a name, and nothing is ever overwritten by other content.
The manifest is the trainer's own, whose hash the database has: who reads it by that hash can check every byte.
"""

import hashlib
import logging
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

from whetstone.config.adapters import EXTRAS, AdapterSettings
from whetstone.errors import SettingsError
from whetstone.registry.adapters import (
    MANIFEST,
    AdapterDamaged,
    NotPublished,
    StoreUnreachable,
    is_pulled,
    parse_manifest,
    published_files,
    read_manifest,
    verify,
)

WRITES = frozenset({"put_file", "pipe_file"})
"""For these a missing path is a missing bucket."""

log = logging.getLogger(__name__)


class ObjectStore:
    """The adapters in one store. May be used by several threads."""

    def __init__(self, address: str, timeout_s: float, filesystem: Any = None, root: str = "") -> None:
        """`filesystem` and `root`: fsspec's file system and the path in it; None: those of the address.

        Raises:
            SettingsError: the package that reads such addresses is not installed.
        """
        self.address = address
        self._timeout_s = timeout_s
        self._fs, self._root = _opened(address) if filesystem is None else (filesystem, root.rstrip("/"))

    def publish(self, folder: Path, renew: Callable[[], None] = lambda: None) -> str:
        """Put the adapter into the store, unless it is there. Return its manifest's SHA-256.

        `renew` is called before each object, which may take as long as the time limit; what it raises ends this.
        The manifest comes last. After an error or a kill nothing can be loaded, and another call puts what is missing.

        Raises:
            AdapterDamaged: the folder's files are not what was written.
            StoreUnreachable: the store does not answer, or refuses the write.
        """
        sha256 = verify(folder)
        manifest, content = read_manifest(folder)
        here = is_pulled(folder)
        there = self._sizes(sha256)
        for name, source in published_files(manifest).items():
            if there.get(name) != manifest["files"][source]["bytes"]:
                renew()
                self._call("put_file", str(folder / (name if here else source)), self._path(sha256, name))
        if there.get(MANIFEST) != len(content):
            renew()
            self._call("pipe_file", self._path(sha256, MANIFEST), content)
            log.info("published %s as %s in %s", folder.name, sha256, self.address)
        return sha256

    def check(self, sha256: str) -> None:
        """Check that the store has the adapter: the right manifest, and each object in the right size.

        Raises:
            NotPublished: it has no such adapter, or not all of its objects.
            AdapterDamaged: the manifest is another one.
            StoreUnreachable: the store does not answer.
        """
        there = self._sizes(sha256)
        if MANIFEST not in there:
            raise NotPublished(
                f"{self._named(sha256)}: the store has no such adapter; did its trainer publish it there?"
            )
        manifest = parse_manifest(self._read_manifest(sha256), self._named(sha256))
        for name, source in published_files(manifest).items():
            if there.get(name) != manifest["files"][source]["bytes"]:
                raise NotPublished(f"{self._named(sha256)}: {name} is missing or has another size")

    def download(self, sha256: str, folder: Path) -> None:
        """Write the adapter's objects into the folder. The caller verifies it.

        Raises:
            NotPublished: the store does not have the whole adapter.
            AdapterDamaged: the manifest is another one.
            StoreUnreachable: the store does not answer.
            OSError: the folder cannot be written.
        """
        content = self._read_manifest(sha256)
        manifest = parse_manifest(content, self._named(sha256))
        (folder / MANIFEST).write_bytes(content)
        for name in published_files(manifest):
            self._call("get_file", self._path(sha256, name), str(folder / name))

    def objects(self) -> dict[str, dict[str, int]]:
        """Return what the store has: SHA-256 -> name of each object -> its bytes. Also what is not whole.

        Raises:
            StoreUnreachable: the store does not answer.
        """
        found: dict[str, dict[str, int]] = {}
        for path, info in self._find(self._root).items():
            parts = PurePosixPath(path).parts[-2:]
            if len(parts) == 2 and is_sha256(parts[0]):
                found.setdefault(parts[0], {})[parts[1]] = int(info["size"])
        return found

    def written_at_s(self, sha256: str, names: Mapping[str, int]) -> float:
        """Return when the newest of these objects was written, in seconds since 1970; 0 if they are gone.

        Raises:
            StoreUnreachable: the store does not answer.
        """
        try:
            return max(float(self._call("modified", self._path(sha256, name)).timestamp()) for name in names)
        except NotPublished:
            return 0.0

    def delete(self, sha256: str, names: Mapping[str, int]) -> None:
        """Delete an adapter's objects, the manifest first: what is left of it afterwards cannot be loaded.

        Raises:
            StoreUnreachable: the store does not answer; the next call deletes the rest.
        """
        for name in sorted(names, key=lambda name: name != MANIFEST):
            try:
                self._call("rm_file", self._path(sha256, name))
            except NotPublished:
                continue  # another process sweeps as well

    def _read_manifest(self, sha256: str) -> bytes:
        content: bytes = self._call("cat_file", self._path(sha256, MANIFEST))
        if hashlib.sha256(content).hexdigest() != sha256:
            raise AdapterDamaged(f"{self._named(sha256)}/{MANIFEST}: its SHA-256 is not the one that the database has")
        return content

    def _sizes(self, sha256: str) -> dict[str, int]:
        """Return the adapter's objects: name -> bytes."""
        found = self._find(f"{self._root}/{sha256}")
        return {PurePosixPath(path).name: int(info["size"]) for path, info in found.items()}

    def _find(self, path: str) -> dict[str, dict[str, Any]]:
        try:
            found: dict[str, dict[str, Any]] = self._call("find", path, detail=True)
        except NotPublished:
            return {}
        return found

    def _path(self, sha256: str, name: str) -> str:
        return f"{self._root}/{sha256}/{name}"

    def _named(self, sha256: str) -> str:
        return f"{self.address}/{sha256}"

    def _call(self, method: str, *arguments: Any, **named: Any) -> Any:
        """Call a method of the file system, and translate its errors."""
        try:
            return self._timed(method)(*arguments, **named)
        except FileNotFoundError as error:
            kind = StoreUnreachable if method in WRITES else NotPublished
            raise kind(f"{self.address}: there is no {error.filename or error}") from error
        except Exception as error:  # each provider's package raises errors of its own
            what = str(error) or f"no answer within {self._timeout_s:g} s"
            raise StoreUnreachable(f"{self.address}: {type(error).__name__}: {what}") from error

    def _timed(self, method: str) -> Callable[..., Any]:
        """Return the method; where the file system works in an event loop, it ends after the time limit."""
        from fsspec.asyn import AsyncFileSystem, sync

        fs = self._fs
        if not isinstance(fs, AsyncFileSystem) or not hasattr(fs, f"_{method}"):
            return getattr(fs, method)  # type: ignore[no-any-return]
        return lambda *arguments, **named: sync(
            fs.loop, getattr(fs, f"_{method}"), *arguments, timeout=self._timeout_s, **named
        )


@cache
def store_of(settings: AdapterSettings) -> ObjectStore | None:
    """Return the store of the settings; None where all machines see the adapters' folder.

    Raises:
        SettingsError: the package that reads such addresses is not installed.
    """
    return ObjectStore(settings.store, settings.timeout_s) if settings.is_remote else None


def _opened(address: str) -> tuple[Any, str]:
    """Return fsspec's file system of an address, and the path in it."""
    scheme = address.partition("://")[0]
    try:
        from fsspec.core import url_to_fs

        # Listings must be fresh: other machines write and delete.
        options = {"use_listings_cache": False, **({"auto_mkdir": True} if scheme == "file" else {})}
        filesystem, root = url_to_fs(address, **options)
    except ImportError as error:
        extra = EXTRAS.get(scheme) or scheme
        raise SettingsError(
            f"adapters.store is {address}, and the package that reads it is not installed: "
            f"pip install 'whetstone-proxy[{extra}]' ({error})"
        ) from error
    return filesystem, root.rstrip("/")


def is_sha256(text: str) -> bool:
    """Return whether the text is a SHA-256 in hex."""
    return len(text) == 64 and set(text) <= set("0123456789abcdef")
