"""A machine's pulled adapters are complete and verified, whatever fails, and follow the store."""

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.unit.whetstone.registry.remote.stores import FaultyFiles, faulty_store, write_adapter
from whetstone.registry.adapters import CONFIG, MANIFEST, WEIGHTS, NotCopied, StoreUnreachable, verify
from whetstone.registry.remote.cache import SWEEP, UNUSED_S, AdapterCache
from whetstone.registry.remote.object_store import ObjectStore


class Shop:
    """A store with one adapter, and a machine's cache."""

    def __init__(self, folder: Path) -> None:
        self.store: ObjectStore
        self.files: FaultyFiles
        self.store, self.files = faulty_store(folder / "store")
        self.sha256 = write_adapter(folder / "p@v1")
        self.store.publish(folder / "p@v1")
        self.files.calls.clear()
        self.pulled = folder / "pulled"
        self.cache = AdapterCache(self.pulled, self.store)

    def downloads(self, name: str = WEIGHTS) -> int:
        return self.files.calls.count(("get_file", name))

    def unused(self, folder: Path, seconds: float) -> None:
        then = time.time() - seconds
        os.utime(folder, (then, then))


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    return Shop(tmp_path)


def test_an_adapter_is_pulled_once_and_then_needs_no_store(shop: Shop) -> None:
    folder = shop.cache.fetch(shop.sha256)
    assert folder == shop.pulled / shop.sha256 and verify(folder) == shop.sha256
    shop.files.fail()
    assert shop.cache.fetch(shop.sha256) == folder
    assert shop.downloads() == 1


@pytest.mark.parametrize("name", [WEIGHTS, CONFIG, MANIFEST])
def test_a_pull_that_fails_at_any_object_leaves_nothing(shop: Shop, name: str) -> None:
    shop.files.fail_at(name)
    with pytest.raises(StoreUnreachable):
        shop.cache.fetch(shop.sha256)
    assert list(shop.pulled.iterdir()) == []
    shop.files.work()
    assert verify(shop.cache.fetch(shop.sha256)) == shop.sha256


def test_a_damaged_folder_is_pulled_again(shop: Shop) -> None:
    folder = shop.cache.fetch(shop.sha256)
    (folder / WEIGHTS).write_bytes(b"half")
    assert verify(shop.cache.fetch(shop.sha256)) == shop.sha256
    assert [path.name for path in shop.pulled.iterdir()] == [shop.sha256]


def test_two_at_once_pull_it_once(shop: Shop) -> None:
    meeting = threading.Barrier(2)

    def fetch() -> Path:
        meeting.wait()
        return shop.cache.fetch(shop.sha256)

    with ThreadPoolExecutor() as threads:
        answers = [threads.submit(fetch) for _ in range(2)]
        assert len({answer.result() for answer in answers}) == 1
    assert shop.downloads() == 1


def test_two_processes_at_once_both_have_it(shop: Shop) -> None:
    """The second gives its folder the name while the first is still pulling."""
    second = AdapterCache(shop.pulled, shop.store)

    def pull_meanwhile(method: str, name: str) -> None:
        if (method, name) == ("get_file", CONFIG):
            shop.files.work()
            second.fetch(shop.sha256)

    shop.files.before = pull_meanwhile
    assert verify(shop.cache.fetch(shop.sha256)) == shop.sha256
    assert [path.name for path in shop.pulled.iterdir()] == [shop.sha256]


def test_a_disk_that_refuses_is_named(shop: Shop) -> None:
    shop.pulled.write_text("no folder")
    with pytest.raises(NotCopied, match="pulled"):
        shop.cache.fetch(shop.sha256)


def test_what_the_store_no_longer_has_goes_once_nothing_has_used_it_for_a_while(shop: Shop, tmp_path: Path) -> None:
    old = shop.cache.fetch(shop.sha256)
    write_adapter(tmp_path / "p@v2")
    new = shop.cache.fetch(shop.store.publish(tmp_path / "p@v2"))
    leftover = shop.pulled / ".tmp-0-killed"
    leftover.mkdir()
    for thread in threading.enumerate():
        if thread.name == SWEEP:  # begun by the first `fetch`: it must not remove what is counted here
            thread.join()
    shop.store.delete(shop.sha256, shop.store.objects()[shop.sha256])
    for folder in (old, new, leftover):
        shop.unused(folder, UNUSED_S - 60)
    assert shop.cache.sweep() == []
    for folder in (old, new, leftover):
        shop.unused(folder, UNUSED_S + 60)
    assert set(shop.cache.sweep()) == {old, leftover}
    assert list(shop.pulled.iterdir()) == [new]


def test_an_empty_store_empties_no_cache(shop: Shop) -> None:
    folder = shop.cache.fetch(shop.sha256)
    shop.store.delete(shop.sha256, shop.store.objects()[shop.sha256])
    shop.unused(folder, 2 * UNUSED_S)
    assert shop.cache.sweep() == []
    assert folder.exists()
