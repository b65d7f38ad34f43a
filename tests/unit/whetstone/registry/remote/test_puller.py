"""A program elsewhere gets the folder on the server's machine, or the very error that happened there."""

import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.unit.whetstone.registry.remote.stores import FaultyFiles, faulty_store, write_adapter
from whetstone.config.adapters import AdapterSettings
from whetstone.registry.adapters import (
    CONFIG,
    WEIGHTS,
    AdapterDamaged,
    NotCopied,
    NotPublished,
    StoreError,
    StoreUnreachable,
    verify,
)
from whetstone.registry.remote.cache import AdapterCache
from whetstone.registry.remote.object_store import ObjectStore
from whetstone.registry.remote.puller import PullerClient, PullerServer, running
from whetstone.registry.remote.sources import OwnCache, Pullers, SharedFolder, cache_folder, puller_url, source_of


class Host:
    """A vLLM server's machine with a puller, and a trainer's folder elsewhere."""

    def __init__(self, folder: Path, store: ObjectStore, files: FaultyFiles, server: PullerServer) -> None:
        self.store, self.files, self.pulled = store, files, folder / "pulled"
        self.folder = folder / "p@v1"
        self.sha256 = write_adapter(self.folder)
        store.publish(self.folder)
        self.port = server.port
        self.source = Pullers(server.port)

    def locate(self, sha256: str | None = None) -> Path:
        return self.source.locate("http://127.0.0.1:8001", self.folder, sha256 or self.sha256)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    store, files = faulty_store(tmp_path / "store")
    with running(AdapterCache(tmp_path / "pulled", store)) as server:
        yield Host(tmp_path, store, files, server)


def test_the_folder_is_complete_before_it_is_named(host: Host) -> None:
    folder = host.locate()
    assert folder == host.pulled / host.sha256 and verify(folder) == host.sha256
    assert host.source.locate("http://127.0.0.1:8001", host.folder, None) == folder, "by the manifest of the folder"
    assert httpx.get(f"http://127.0.0.1:{host.port}/health", trust_env=False).status_code == 200


def test_what_fails_there_fails_here_with_the_reason(host: Host) -> None:
    with pytest.raises(NotPublished, match="puller at http://127.0.0.1"):
        host.locate("0" * 64)
    host.files.fail_at(CONFIG)
    with pytest.raises(StoreUnreachable, match="connection reset by peer"):
        host.locate()
    host.files.work()
    (Path(host.store._root) / host.sha256 / WEIGHTS).write_bytes(b"IN BF16")
    with pytest.raises(AdapterDamaged, match="SHA-256"):
        host.locate()
    host.pulled.rmdir()
    host.pulled.write_text("no folder")
    with pytest.raises(NotCopied):
        host.locate()


def test_a_machine_without_a_puller_is_named_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(StoreUnreachable, match=r"the puller at http://127.0.0.1:1 .*whetstone puller"):
        Pullers(1).locate("http://127.0.0.1:8001", tmp_path, "0" * 64)


def test_a_caller_waits_for_a_slow_pull_only_so_long_and_the_puller_goes_on(host: Host) -> None:
    ended = threading.Event()

    def wait(method: str, name: str) -> None:
        if (method, name) == ("get_file", CONFIG):
            ended.wait(20)

    host.files.before = wait
    client = PullerClient(f"http://127.0.0.1:{host.port}", wait_s=0.2)
    with pytest.raises(StoreUnreachable, match=r"still pulling after 0.2 s"):
        client.fetch(host.sha256)
    ended.set()
    assert verify(host.locate()) == host.sha256
    assert host.files.calls.count(("get_file", WEIGHTS)) == 1


def test_a_server_that_is_no_puller_is_named(tmp_path: Path) -> None:
    from tests.unit.proxy.conftest import FakeVllm

    with FakeVllm() as other, pytest.raises(StoreError, match="puller"):
        Pullers(other.server_port).locate(other.url, tmp_path, "0" * 64)


@pytest.mark.parametrize("path", ["/adapters/../../etc/passwd", "/adapters/p@v1", "/v1/load_lora_adapter", "/"])
def test_a_puller_takes_nothing_but_hashes(host: Host, path: str) -> None:
    response = httpx.post(f"http://127.0.0.1:{host.port}{path}", trust_env=False)
    assert response.status_code == 400
    assert list(host.files.calls) and not host.pulled.exists()


@pytest.mark.parametrize(
    ("vllm", "puller"),
    [
        ("http://gpu-1:8001", "http://gpu-1:8003"),
        ("http://10.0.0.7", "http://10.0.0.7:8003"),
        ("http://[fd00::7]:8001", "http://[fd00::7]:8003"),
    ],
)
def test_a_puller_is_at_the_servers_address(vllm: str, puller: str) -> None:
    assert puller_url(vllm, 8003) == puller


def test_without_a_puller_the_process_pulls_itself_and_without_a_store_it_pulls_nothing(tmp_path: Path) -> None:
    sha256 = write_adapter(tmp_path / "p@v1")
    shared = source_of(tmp_path, AdapterSettings())
    assert isinstance(shared, SharedFolder)
    assert shared.locate("http://x", tmp_path / "p@v1", sha256) == tmp_path / "p@v1"
    with pytest.raises(AdapterDamaged, match="database"):
        shared.locate("http://x", tmp_path / "p@v1", "0" * 64)
    settings = AdapterSettings(store=f"file://{tmp_path}/store")
    own = source_of(tmp_path, settings)
    assert isinstance(own, OwnCache)
    ObjectStore(settings.store, 60).publish(tmp_path / "p@v1")
    assert own.locate("http://x", tmp_path / "p@v1", None) == cache_folder(tmp_path) / sha256
    assert isinstance(source_of(tmp_path, AdapterSettings(store=settings.store, puller_port=8003)), Pullers)
