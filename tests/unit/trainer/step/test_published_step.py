"""A step publishes its version before the database knows it, and servers load what they have pulled."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine

from migrations import schema
from tests.unit.trainer.step.test_step import FakeVllm, Training, database_kind, fake
from trainer.step.learners import Learners
from trainer.step.step import take_step
from trainer.vllm.pool import Replicas
from whetstone.registry.adapters import CONFIG, MANIFEST, WEIGHTS, StoreUnreachable, verify
from whetstone.registry.remote.object_store import ObjectStore, store_of
from whetstone.registry.remote.sources import source_of

__all__ = ["database_kind", "fake"]


class Publishing(Training):
    """A trainer with a store in a folder; the server's machine pulls into another."""

    def __init__(self, engine: Engine, seed: Any, fake: FakeVllm, folder: Path) -> None:
        super().__init__(engine, seed, fake, folder / "data")
        self.bucket = folder / "store"
        adapters = self.settings.adapters.model_copy(update={"store": f"file://{self.bucket}"})
        self.settings = self.settings.model_copy(update={"adapters": adapters})
        self.learners = Learners(self.settings)
        self.server_machine = folder / "server"

    @property
    def objects(self) -> ObjectStore:
        store = store_of(self.settings.adapters)
        assert store is not None
        return store

    def step(self) -> bool:
        source = source_of(self.server_machine, self.settings.adapters)
        replicas = Replicas({"http://one": self.vllm}, source)
        return take_step("starter", self.store, self.learners, replicas, self.settings)

    def is_away(self) -> None:
        """Make the store unreachable, and wait for nothing."""
        self.vllm_stays_away()
        self.fake.when_called = lambda _path: True
        self.bucket.write_text("no folder")

    def version(self, number: int) -> Any:
        return self.seed.one(schema.policy_versions, f"starter@v{number}")


@pytest.fixture
def publishing(engine: Engine, seed: Any, fake: FakeVllm, tmp_path: Path) -> Iterator[Publishing]:
    publishing = Publishing(engine, seed, fake, tmp_path)
    yield publishing
    publishing.vllm.close()


def test_the_server_loads_what_it_pulled_and_the_trainer_keeps_everything(publishing: Publishing) -> None:
    publishing.group("g")
    assert publishing.step() is True
    sha256 = publishing.version(1).manifest_sha256
    pulled = publishing.server_machine / "pulled" / sha256
    assert publishing.fake.loaded == {"starter@v1": pulled}
    assert {path.name for path in pulled.iterdir()} == {WEIGHTS, CONFIG, MANIFEST}
    own = publishing.adapters / "starter@v1"
    assert verify(own) == verify(pulled) == sha256
    half, whole = ((folder / WEIGHTS).stat().st_size for folder in (pulled, own))
    assert 0.4 < half / whole < 0.6, "bf16"
    publishing.objects.check(sha256)
    assert 0 < publishing.version(1).probe_k3 < 1e-4, "rounded, so not equal, but near"
    assert publishing.live_version == 1


def test_a_store_that_is_away_leaves_no_version_and_no_folder(publishing: Publishing) -> None:
    publishing.group("g")
    publishing.is_away()
    with pytest.raises(StoreUnreachable, match="store"):
        publishing.step()
    assert publishing.versions() == {0: "live"}
    assert list(publishing.adapters.iterdir()) == [] and publishing.fake.loaded == {}
    publishing.bucket.unlink()
    publishing.lease_ends()
    assert publishing.step() is True
    (live,) = [number for number, state in publishing.versions().items() if state == "live"]
    assert live == publishing.live_version == 2, "a number is never used twice"


def test_a_trainer_on_another_machine_pulls_the_parent_and_begins_with_new_moments(
    publishing: Publishing, caplog: pytest.LogCaptureFixture
) -> None:
    publishing.group("g")
    assert publishing.step() is True
    shutil.rmtree(publishing.adapters)
    publishing.learners = Learners(publishing.settings)
    publishing.group("h", version=1)
    assert publishing.step() is True
    assert publishing.live_version == 2
    parent = publishing.adapters / "starter@v1"
    assert {path.name for path in parent.iterdir()} == {WEIGHTS, CONFIG, MANIFEST}
    assert "no optimizer state" in caplog.text
    assert publishing.version(2).probe_k3 < 1e-4


def test_a_parent_that_can_no_longer_be_had_stops_the_step_and_names_it(
    publishing: Publishing, caplog: pytest.LogCaptureFixture
) -> None:
    publishing.group("g")
    assert publishing.step() is True
    shutil.rmtree(publishing.adapters)
    shutil.rmtree(publishing.bucket)
    publishing.learners = Learners(publishing.settings)
    publishing.group("h", version=1)
    assert publishing.step() is False
    assert publishing.live_version == 1
    assert "mend this, or promote another version" in caplog.text
