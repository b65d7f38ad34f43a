"""The adapter store has what the database has: no more after retention, no less after a loss."""

import os
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, update

from migrations import schema
from tests.conftest import NOW
from tests.unit.whetstone.registry.remote.stores import faulty_store, write_adapter
from trainer.adapters.published import UNRECORDED_S, bring, sweep_published
from trainer.adapters.retention import Sweeper
from trainer.store.retention import ManifestStore, RetentionStore
from whetstone.config.settings import Settings
from whetstone.registry.adapters import WEIGHTS, AdapterDamaged, NotPublished, StoreUnreachable, verify
from whetstone.registry.remote.object_store import ObjectStore

LONG_AGO = NOW - timedelta(days=30)


class Trainer:
    """A trainer's machine with versions on its disk, and a store."""

    def __init__(self, engine: Engine, seed: Any, folder: Path) -> None:
        self.engine, self.seed = engine, seed
        self.adapters = folder / "data" / "adapters"
        self.store, self.files = faulty_store(folder / "store")
        self.manifests = ManifestStore(engine)

    def write(self, version: int, **values: Any) -> str:
        """Write a version as a step does, and publish it. Return its hash."""
        folder = self.adapters / f"starter@v{version}"
        sha256 = write_adapter(folder)
        self.store.publish(folder)
        row = {"state": "retired", "served": False, "created_at": LONG_AGO, "unserved_at": LONG_AGO, "parent": 0}
        self.seed.insert(
            schema.policy_versions, project="default", id=folder.name, policy="starter", version=version,
            adapter_path=str(folder), manifest_sha256=sha256, **(row | values),
        )  # fmt: skip
        return sha256

    def mark_removed(self, version: int) -> None:
        v = schema.policy_versions.c
        with self.engine.begin() as connection:
            connection.execute(update(schema.policy_versions).where(v.version == version).values(removed_at=NOW))

    def sweep(self, now: datetime | None = None) -> list[str]:
        return sweep_published(self.manifests, self.store, now or datetime.now(UTC))


@pytest.fixture
def trainer(engine: Engine, seed: Any, tmp_path: Path) -> Trainer:
    return Trainer(engine, seed, tmp_path)


def test_what_retention_has_removed_goes_and_the_rest_stays(trainer: Trainer) -> None:
    old, new = trainer.write(1), trainer.write(2)
    assert trainer.sweep() == []
    trainer.mark_removed(1)
    assert trainer.sweep() == [old]
    assert trainer.store.objects().keys() == {new}
    assert trainer.sweep() == []


def test_a_copy_of_a_removed_version_protects_the_objects_that_both_have(trainer: Trainer) -> None:
    sha256 = trainer.write(1)
    trainer.seed.insert(
        schema.policy_versions, project="default", id="starter@v7", policy="starter", version=7, state="candidate",
        adapter_path=str(trainer.adapters / "starter@v7"), manifest_sha256=sha256, created_at=NOW, served=True,
    )  # fmt: skip
    trainer.mark_removed(1)
    assert trainer.sweep() == []
    assert trainer.store.objects().keys() == {sha256}


def test_what_a_killed_step_has_published_goes_after_an_hour(trainer: Trainer, tmp_path: Path) -> None:
    sha256 = write_adapter(tmp_path / "killed")
    trainer.store.publish(tmp_path / "killed")
    assert trainer.sweep() == [], "its version may be recorded any moment"
    assert trainer.sweep(datetime.now(UTC) + timedelta(seconds=UNRECORDED_S + 60)) == [sha256]


def test_half_of_an_adapter_goes_as_well(trainer: Trainer, tmp_path: Path) -> None:
    sha256 = write_adapter(tmp_path / "killed")
    trainer.files.fail_at("adapter_config.json")
    with pytest.raises(StoreUnreachable):
        trainer.store.publish(tmp_path / "killed")
    trainer.files.work()
    assert set(trainer.store.objects()[sha256]) == {WEIGHTS}
    weights = Path(trainer.store._root) / sha256 / WEIGHTS
    then = time.time() - UNRECORDED_S - 60
    os.utime(weights, (then, then))
    assert trainer.sweep() == [sha256]


def test_what_the_store_has_lost_is_published_again_by_the_machine_that_has_it(trainer: Trainer) -> None:
    """So also everything that was written before there was a store."""
    sha256, other = trainer.write(1), trainer.write(2)
    trainer.store.delete(sha256, trainer.store.objects()[sha256])
    (Path(trainer.store._root) / other / WEIGHTS).unlink()
    trainer.sweep()
    for one in (sha256, other):
        trainer.store.check(one)


def test_a_damaged_folder_stops_no_sweep(trainer: Trainer, caplog: pytest.LogCaptureFixture) -> None:
    damaged, whole = trainer.write(1), trainer.write(2)
    for sha256 in (damaged, whole):
        trainer.store.delete(sha256, trainer.store.objects()[sha256])
    (trainer.adapters / "starter@v1" / WEIGHTS).write_bytes(b"half")
    trainer.sweep()
    assert trainer.store.objects().keys() == {whole}
    assert "starter@v1 cannot be published" in caplog.text


def test_retention_removes_the_folder_and_then_the_objects(
    engine: Engine, seed: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    address = f"file://{tmp_path}/store"
    settings = Settings(
        data=tmp_path / "data", trainer={"keep_adapters": 1, "keep_adapters_s": 0}, adapters={"store": address}
    )
    trainer = Trainer(engine, seed, tmp_path)
    old, new = trainer.write(1), trainer.write(2, state="live", served=True, unserved_at=None)
    sweeper = Sweeper(RetentionStore(engine, "default"), settings, ManifestStore(engine))
    sweeper.go_on(NOW)
    assert [path.name for path in trainer.adapters.iterdir()] == ["starter@v2"]
    assert ObjectStore(address, 60).objects().keys() == {new} and old != new


def test_a_store_that_is_away_stops_no_other_work(trainer: Trainer, tmp_path: Path) -> None:
    sha256 = trainer.write(1)
    trainer.mark_removed(1)
    trainer.files.fail()
    with pytest.raises(StoreUnreachable):
        trainer.sweep()
    trainer.files.work()
    assert trainer.sweep() == [sha256]


def test_a_version_of_another_machine_is_pulled_and_one_of_this_machine_is_not(
    trainer: Trainer, tmp_path: Path
) -> None:
    sha256 = trainer.write(1)
    bring(trainer.store, trainer.adapters / "starter@v1", sha256)
    elsewhere = tmp_path / "elsewhere" / "starter@v1"
    bring(trainer.store, elsewhere, sha256)
    assert verify(elsewhere) == sha256
    assert trainer.files.calls.count(("get_file", WEIGHTS)) == 1
    with pytest.raises(NotPublished):
        bring(trainer.store, tmp_path / "elsewhere" / "starter@v2", "0" * 64)
    with pytest.raises(AdapterDamaged, match="no hash"):
        bring(trainer.store, tmp_path / "elsewhere" / "starter@v3", None)
