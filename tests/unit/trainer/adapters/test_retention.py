"""Which adapters are removed, and that nothing half removed is left, whatever dies."""

import shutil
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, select, update

from migrations import schema
from tests.conftest import NOW
from trainer.adapters.retention import Sweeper, sweep_adapters
from trainer.store.retention import RetentionStore
from whetstone.config.settings import Settings
from whetstone.registry.versions import LedgerError, lock, make_live

LONG_AGO = NOW - timedelta(days=30)


class Shelf:
    """A policy's adapters: rows, and folders on the disk."""

    def __init__(self, engine: Engine, seed: Any, data: Path) -> None:
        self.engine, self.seed = engine, seed
        self.settings = Settings(data=data, trainer={"keep_adapters": 1, "keep_adapters_s": 3600})
        self.adapters = data.resolve() / "adapters"
        self.store = RetentionStore(engine, "default")

    def add(self, version: int, folder: Path | None = None, **values: Any) -> Path:
        folder = folder or self.adapters / f"starter@v{version}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "adapter_model.safetensors").write_bytes(b"weights")
        row = {
            "parent": 0, "state": "retired", "served": False, "adapter_path": str(folder),
            "created_at": LONG_AGO, "unserved_at": LONG_AGO,
        }  # fmt: skip
        self.seed.insert(
            schema.policy_versions, project="default", id=f"starter@v{version}", policy="starter", version=version,
            **(row | values),
        )  # fmt: skip
        return folder

    def sweep(self) -> list[str]:
        return [folder.name for folder in sweep_adapters(self.store, self.settings, NOW)]

    def standing(self) -> set[str]:
        return {folder.name for folder in self.adapters.iterdir()}

    def removed(self) -> set[int]:
        v = schema.policy_versions.c
        with self.engine.connect() as connection:
            return set(connection.execute(select(v.version).where(v.removed_at.is_not(None))).scalars())


@pytest.fixture
def shelf(engine: Engine, seed: Any, tmp_path: Path) -> Shelf:
    shelf = Shelf(engine, seed, tmp_path)
    shelf.add(1)
    shelf.add(9)
    return shelf


def test_an_old_adapter_that_nothing_speaks_for_is_removed(shelf: Shelf) -> None:
    assert shelf.sweep() == ["starter@v1"]
    assert shelf.standing() == {"starter@v9"}
    assert shelf.removed() == {1}
    assert shelf.sweep() == []


@pytest.mark.parametrize(
    "kept",
    [
        {"state": "live", "served": True, "unserved_at": None},
        {"state": "candidate"},
        {"served": True, "unserved_at": None},
        {"pinned_at": LONG_AGO},
        {"heldout_mean": 0.7},
        {"created_at": NOW - timedelta(minutes=59)},
        {"unserved_at": NOW - timedelta(seconds=9)},
    ],
    ids=["live", "candidate", "served", "pinned", "best", "young", "draining"],
)
def test_what_something_speaks_for_stays(shelf: Shelf, kept: dict[str, Any]) -> None:
    shelf.add(2, **kept)
    assert shelf.sweep() == ["starter@v1"]
    assert shelf.standing() == {"starter@v2", "starter@v9"}


def test_the_newest_stay_however_old_they_are(shelf: Shelf) -> None:
    shelf.add(5)
    shelf.settings = Settings(data=shelf.settings.data, trainer={"keep_adapters": 2, "keep_adapters_s": 0})
    assert shelf.sweep() == ["starter@v1"]
    assert shelf.standing() == {"starter@v5", "starter@v9"}


def test_of_equally_good_ones_the_newest_stays_and_a_rejected_one_is_not_good(shelf: Shelf) -> None:
    shelf.add(2, heldout_mean=0.7)
    shelf.add(3, heldout_mean=0.7)
    shelf.add(4, heldout_mean=0.9, state="rejected")
    shelf.sweep()
    assert shelf.standing() == {"starter@v3", "starter@v9"}


def test_the_version_that_a_rollback_would_go_to_stays(shelf: Shelf) -> None:
    shelf.add(2)
    shelf.add(3, state="live", served=True, unserved_at=None, parent=1)
    shelf.sweep()
    assert shelf.standing() == {"starter@v1", "starter@v3", "starter@v9"}


def test_what_a_server_has_loaded_stays_until_it_has_let_it_go(shelf: Shelf) -> None:
    shelf.seed.insert(
        schema.replicas, project="default", id="http://one", state="serving", adapters=["starter@v1"], seen_at=NOW
    )
    shelf.seed.insert(schema.replicas, project="default", id="http://two", state="away", adapters=None, seen_at=NOW)
    assert shelf.sweep() == []
    with shelf.engine.begin() as connection:
        connection.execute(update(schema.replicas).values(adapters=[]))
    assert shelf.sweep() == ["starter@v1"]


def test_what_an_unfinished_step_started_from_stays_until_it_is_over(shelf: Shelf) -> None:
    shelf.seed.insert(
        schema.steps, project="default", id="starter#1", policy="starter", number=1, state="claimed", version_in=1,
        groups=0, trajectories=0, config={}, attempt=1, created_at=NOW,
    )  # fmt: skip
    assert shelf.sweep() == []
    with shelf.engine.begin() as connection:
        connection.execute(update(schema.steps).values(state="failed", ended_at=NOW))
    assert shelf.sweep() == ["starter@v1"]


def test_a_removed_version_can_no_longer_be_promoted(shelf: Shelf) -> None:
    shelf.sweep()
    with shelf.engine.begin() as connection, pytest.raises(LedgerError, match="adapter of starter@v1 was removed"):
        lock(connection, "default", "starter")
        make_live(connection, "default", "starter", 1, 2, NOW)


def test_a_folder_whose_removal_was_cut_short_goes_with_the_next_sweep(shelf: Shelf) -> None:
    shelf.store.mark("starter", lambda standing: [each for each in standing if each.version == 1], NOW)
    assert "starter@v1" in shelf.standing() and shelf.removed() == {1}
    assert shelf.sweep() == ["starter@v1"]
    assert shelf.standing() == {"starter@v9"}


def test_a_folder_that_another_version_needs_stays_until_that_is_removed_too(shelf: Shelf) -> None:
    shared = shelf.add(2)
    shelf.add(3, folder=shared, served=True, unserved_at=None)
    assert shelf.sweep() == ["starter@v1"]
    assert shelf.removed() == {1, 2} and shared.is_dir()
    with shelf.engine.begin() as connection:
        connection.execute(update(schema.policy_versions).values(served=False, unserved_at=LONG_AGO))
    assert shelf.sweep() == ["starter@v2"]


def test_folders_that_are_not_ours_are_left_alone(shelf: Shelf, tmp_path: Path) -> None:
    elsewhere = shelf.add(2, folder=tmp_path / "elsewhere")
    stranger = shelf.adapters / "stranger"
    stranger.mkdir()
    assert shelf.sweep() == ["starter@v1"]
    assert elsewhere.is_dir() and stranger.is_dir() and shelf.removed() == {1}


def test_a_folder_that_is_gone_already_harms_nothing(shelf: Shelf) -> None:
    shutil.rmtree(shelf.adapters / "starter@v1")
    assert shelf.sweep() == []
    assert shelf.removed() == {1}


def test_other_projects_adapters_are_not_looked_at(shelf: Shelf) -> None:
    shelf.seed.project("other")
    shelf.seed.insert(
        schema.policy_versions, project="other", id="starter@v1", policy="starter", version=1, state="retired",
        served=False, adapter_path=str(shelf.adapters / "starter@v1"), created_at=LONG_AGO,
    )  # fmt: skip
    assert shelf.sweep() == []
    assert "starter@v1" in shelf.standing()


def test_the_worker_sweeps_at_most_once_a_minute(shelf: Shelf) -> None:
    sweeper = Sweeper(shelf.store, shelf.settings)
    sweeper.go_on(NOW)
    assert shelf.standing() == {"starter@v9"}
    shelf.add(2)
    sweeper.go_on(NOW + timedelta(seconds=59))
    assert "starter@v2" in shelf.standing()
    sweeper.go_on(NOW + timedelta(seconds=61))
    assert shelf.standing() == {"starter@v9"}
