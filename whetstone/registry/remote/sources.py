"""Return the folder that a vLLM server loads an adapter from: complete and verified on that server's machine."""

import hashlib
from functools import cache
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from whetstone.config.adapters import AdapterSettings
from whetstone.registry.adapters import AdapterDamaged, read_manifest, verify
from whetstone.registry.remote.cache import AdapterCache
from whetstone.registry.remote.object_store import ObjectStore, store_of
from whetstone.registry.remote.puller import PullerClient


class AdapterSource(Protocol):
    """How adapters come to vLLM's machines."""

    def locate(self, url: str, folder: Path, manifest_sha256: str | None) -> Path:
        """Return the folder that the server at `url` can load, complete and verified.

        `folder` and `manifest_sha256` are the database's: the folder of the trainer that wrote it, and its hash (None:
        not recorded, then the folder's own counts).

        Raises:
            AdapterDamaged: its files differ from what was written.
            StoreError: it is not in the store, or the store or the puller cannot be reached.
            NotCopied: the disk of the server's machine refuses.
        """


class SharedFolder:
    """vLLM's machines see the trainer's folders."""

    def locate(self, url: str, folder: Path, manifest_sha256: str | None) -> Path:
        """Verify the folder, and return it."""
        if manifest_sha256 not in (None, verify(folder)):
            raise AdapterDamaged(f"{folder}: its manifest is not the one that the database has noted")
        return folder


class OwnCache:
    """This process shares a machine with vLLM, and pulls adapters itself."""

    def __init__(self, folder: Path, store: ObjectStore) -> None:
        self._cache = AdapterCache(folder, store)

    def locate(self, url: str, folder: Path, manifest_sha256: str | None) -> Path:
        """Pull the adapter, and return its folder."""
        return self._cache.fetch(manifest_sha256 or sha256_of(folder))


class Pullers:
    """A puller runs on the machine of each vLLM server."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._clients: dict[str, PullerClient] = {}

    def locate(self, url: str, folder: Path, manifest_sha256: str | None) -> Path:
        """Have the server's puller pull the adapter, and return its folder there."""
        puller = puller_url(url, self._port)
        if puller not in self._clients:
            self._clients[puller] = PullerClient(puller)
        return self._clients[puller].fetch(manifest_sha256 or sha256_of(folder))


@cache
def source_of(data: Path, settings: AdapterSettings) -> AdapterSource:
    """Return how adapters come to vLLM's machines.

    Raises:
        SettingsError: the package that reads the store's addresses is not installed.
    """
    store = store_of(settings)
    if store is None:
        return SharedFolder()
    if settings.puller_port is not None:
        return Pullers(settings.puller_port)
    return OwnCache(cache_folder(data), store)


def cache_folder(data: Path) -> Path:
    """Return the folder of pulled adapters."""
    return data.resolve() / "pulled"


def puller_url(vllm_url: str, port: int) -> str:
    """Return the address of the puller beside a vLLM server."""
    host = urlsplit(vllm_url).hostname or ""
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def sha256_of(folder: Path) -> str:
    """Return the SHA-256 of the folder's manifest, in hex.

    Raises:
        AdapterDamaged: it cannot be read.
    """
    return hashlib.sha256(read_manifest(folder)[1]).hexdigest()
