"""An adapter in a store is whole or has no manifest, wherever its publishing or its deletion stops."""

import json
from pathlib import Path

import pytest

from tests.unit.whetstone.registry.remote.stores import FILES, PUBLISHED, SilentFiles, faulty_store, write_adapter
from whetstone.config.adapters import AdapterSettings
from whetstone.errors import SettingsError
from whetstone.registry.adapters import (
    BF16_WEIGHTS,
    CONFIG,
    MANIFEST,
    WEIGHTS,
    AdapterDamaged,
    NotPublished,
    StoreUnreachable,
    verify,
)
from whetstone.registry.remote.cache import pull
from whetstone.registry.remote.object_store import ObjectStore, store_of


def test_what_is_published_is_weights_in_bf16_config_and_manifest_and_no_more(tmp_path: Path) -> None:
    sha256 = write_adapter(tmp_path / "p@v1")
    store = ObjectStore(f"file://{tmp_path}/bucket/prefix", 60)
    assert store.publish(tmp_path / "p@v1") == sha256
    there = {path.name: path.read_bytes() for path in (tmp_path / "bucket/prefix" / sha256).iterdir()}
    manifest = (tmp_path / "p@v1" / MANIFEST).read_bytes()
    assert there == {**PUBLISHED, MANIFEST: manifest}
    assert store.objects() == {sha256: {name: len(content) for name, content in there.items()}}
    store.check(sha256)
    pull(store, sha256, tmp_path / "pulled")
    assert verify(tmp_path / "pulled") == sha256
    assert {path.name for path in (tmp_path / "pulled").iterdir()} == there.keys()


def test_an_adapter_without_bf16_is_published_as_it_is(tmp_path: Path) -> None:
    """Those that were written before there was a store."""
    files = {name: content for name, content in FILES.items() if name != BF16_WEIGHTS}
    sha256 = write_adapter(tmp_path / "p@v1", files)
    store, _ = faulty_store(tmp_path / "store")
    store.publish(tmp_path / "p@v1")
    pull(store, sha256, tmp_path / "pulled")
    assert (tmp_path / "pulled" / WEIGHTS).read_bytes() == FILES[WEIGHTS]


@pytest.mark.parametrize("last", [WEIGHTS, CONFIG, MANIFEST])
def test_publishing_that_stops_at_any_object_shows_nothing_and_goes_on_later(tmp_path: Path, last: str) -> None:
    sha256 = write_adapter(tmp_path / "p@v1")
    store, files = faulty_store(tmp_path / "store")
    files.fail_at(last)
    with pytest.raises(StoreUnreachable, match="connection reset by peer"):
        store.publish(tmp_path / "p@v1")
    files.work()
    with pytest.raises(NotPublished):
        store.check(sha256)
    with pytest.raises(NotPublished):
        pull(store, sha256, tmp_path / "pulled")
    assert list(tmp_path.glob("*pulled*")) == []
    before = set(store.objects().get(sha256, {}))
    files.calls.clear()
    store.publish(tmp_path / "p@v1")
    store.check(sha256)
    written = {name for method, name in files.calls if method in ("put_file", "pipe_file")}
    assert written == {WEIGHTS, CONFIG, MANIFEST} - before
    assert [name for method, name in files.calls if method in ("put_file", "pipe_file")][-1] == MANIFEST


def test_an_object_that_is_gone_is_put_again(tmp_path: Path) -> None:
    sha256 = write_adapter(tmp_path / "p@v1")
    store, _ = faulty_store(tmp_path / "store")
    store.publish(tmp_path / "p@v1")
    (tmp_path / "store" / sha256 / WEIGHTS).unlink()
    with pytest.raises(NotPublished, match=WEIGHTS):
        store.check(sha256)
    store.publish(tmp_path / "p@v1")
    store.check(sha256)


def test_a_pulled_adapter_can_be_published_elsewhere(tmp_path: Path) -> None:
    sha256 = write_adapter(tmp_path / "p@v1")
    store, _ = faulty_store(tmp_path / "store")
    store.publish(tmp_path / "p@v1")
    pull(store, sha256, tmp_path / "pulled")
    second, _ = faulty_store(tmp_path / "second")
    assert second.publish(tmp_path / "pulled") == sha256
    second.check(sha256)


def test_a_damaged_adapter_is_not_published(tmp_path: Path) -> None:
    write_adapter(tmp_path / "p@v1")
    (tmp_path / "p@v1" / BF16_WEIGHTS).write_bytes(b"IN BF16")
    store, files = faulty_store(tmp_path / "store")
    with pytest.raises(AdapterDamaged, match="SHA-256"):
        store.publish(tmp_path / "p@v1")
    assert files.calls == []


@pytest.mark.parametrize("name", [WEIGHTS, CONFIG, MANIFEST])
def test_what_was_altered_in_the_store_is_not_pulled(tmp_path: Path, name: str) -> None:
    sha256 = write_adapter(tmp_path / "p@v1")
    store, _ = faulty_store(tmp_path / "store")
    store.publish(tmp_path / "p@v1")
    path = tmp_path / "store" / sha256 / name
    path.write_bytes(path.read_bytes()[:-1] + b" ")
    with pytest.raises(AdapterDamaged, match="SHA-256"):
        pull(store, sha256, tmp_path / "pulled")
    assert not list(tmp_path.glob("*pulled*")), "neither a folder with the name, nor an unfinished one"


def test_another_adapter_under_its_name_is_not_pulled(tmp_path: Path) -> None:
    """Who can write the store cannot exchange an adapter: the database has the hash."""
    first, second = write_adapter(tmp_path / "p@v1"), write_adapter(tmp_path / "p@v2")
    store, _ = faulty_store(tmp_path / "store")
    store.publish(tmp_path / "p@v2")
    (tmp_path / "store" / second).rename(tmp_path / "store" / first)
    with pytest.raises(AdapterDamaged, match="database"):
        store.check(first)
    with pytest.raises(AdapterDamaged, match="database"):
        pull(store, first, tmp_path / "pulled")


def test_a_deletion_that_stops_leaves_nothing_that_could_be_pulled(tmp_path: Path) -> None:
    sha256 = write_adapter(tmp_path / "p@v1")
    store, files = faulty_store(tmp_path / "store")
    store.publish(tmp_path / "p@v1")
    files.fail_at(WEIGHTS)
    with pytest.raises(StoreUnreachable):
        store.delete(sha256, store.objects()[sha256])
    files.work()
    left = store.objects()[sha256]
    assert WEIGHTS in left and MANIFEST not in left
    store.delete(sha256, {**left, CONFIG: 2})
    assert store.objects() == {}


def test_other_objects_under_the_prefix_are_left_alone(tmp_path: Path) -> None:
    store, _ = faulty_store(tmp_path / "store")
    (tmp_path / "store" / "other").mkdir(parents=True)
    (tmp_path / "store" / "other" / MANIFEST).write_bytes(json.dumps({}).encode())
    assert store.objects() == {}


def test_a_store_that_does_not_answer_is_given_up_after_the_limit() -> None:
    store = ObjectStore("s3://bucket/prefix", 0.2, SilentFiles(), "bucket/prefix")
    with pytest.raises(StoreUnreachable, match=r"s3://bucket/prefix: .*no answer within 0.2 s"):
        store.objects()


def test_a_missing_package_is_named_with_its_extra() -> None:
    with pytest.raises(SettingsError, match=r"pip install 'whetstone-proxy\[az\]'"):
        store_of(AdapterSettings(store="az://container/prefix"))
    assert store_of(AdapterSettings()) is None
