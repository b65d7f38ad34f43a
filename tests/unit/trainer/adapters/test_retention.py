"""Which adapters are removed, and that nothing half removed is left, whatever dies."""

import shutil
from collections.abc import Collection
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, select, update

from migrations import schema
from tests.conftest import NOW
from trainer.adapters.retention import Choose, StoredAdapter, Sweeper, sweep_adapters
from trainer.store.retention import RetentionStore
from whetstone.config.settings import Settings
from whetstone.registry.adapters import OPTIMIZER_STATE, WEIGHTS
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
        (folder / OPTIMIZER_STATE).write_bytes(b"moments")
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

    def with_state(self) -> set[str]:
        return {path.parent.name for path in self.adapters.glob(f"*/{OPTIMIZER_STATE}")}

    def keep(self, **rules: Any) -> None:
        self.settings = Settings(data=self.settings.data, trainer=rules)

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


def test_the_optimizers_state_stays_with_the_newest_two_and_with_what_a_step_may_start_from(shelf: Shelf) -> None:
    shelf.keep(keep_adapters=20)
    shelf.add(2)
    shelf.add(3, state="live", served=True, unserved_at=None, parent=2)
    shelf.add(4, pinned_at=LONG_AGO)
    shelf.add(5, state="candidate")
    shelf.add(6, state="rejected")
    shelf.add(8)
    assert shelf.sweep() == []
    assert shelf.with_state() == {f"starter@v{version}" for version in (2, 3, 5, 8, 9)}
    assert shelf.standing() >= {"starter@v4", "starter@v6"}


def test_what_an_unfinished_step_started_from_has_its_optimizers_state(shelf: Shelf) -> None:
    shelf.keep(keep_adapters=20)
    shelf.add(8)
    shelf.seed.insert(
        schema.steps, project="default", id="starter#1", policy="starter", number=1, state="claimed", version_in=1,
        groups=0, trajectories=0, config={}, attempt=1, created_at=NOW,
    )  # fmt: skip
    shelf.sweep()
    assert "starter@v1" in shelf.with_state()


def test_a_folder_that_a_live_version_shares_has_its_optimizers_state(shelf: Shelf) -> None:
    shelf.keep(keep_adapters=20)
    shelf.add(8)
    shared = shelf.add(2)
    shelf.add(3, folder=shared, state="live", served=True, unserved_at=None)
    shelf.sweep()
    assert "starter@v2" in shelf.with_state()


@pytest.mark.parametrize(("most", "left"), [(28, {9}), (29, {9, 8}), (36, {9, 8, 7}), (43, {9, 8, 7, 1})])
def test_the_oldest_go_first_whatever_their_age_until_the_next_one_has_room(
    shelf: Shelf, most: int, left: set[int]
) -> None:
    """Versions of 7 bytes, the newest two with 7 more of their optimizer: so will the next one be."""
    shelf.keep(keep_adapters=20, max_adapter_bytes=most + 14 if 8 in left else most)
    for version in (7, 8):
        shelf.add(version, created_at=NOW - timedelta(minutes=1))
    shelf.sweep()
    assert shelf.standing() == {f"starter@v{version}" for version in left}


def test_what_must_stay_stays_above_the_cap_and_is_said(shelf: Shelf, caplog: pytest.LogCaptureFixture) -> None:
    shelf.keep(max_adapter_bytes=1)
    shelf.add(11, state="live", served=True, unserved_at=None, parent=9)
    shelf.add(12, pinned_at=LONG_AGO)
    shelf.add(13, heldout_mean=0.7)
    shelf.add(14, state="candidate")
    assert set(shelf.sweep()) == {"starter@v1"}
    assert shelf.standing() == {f"starter@v{version}" for version in (9, 11, 12, 13, 14)}
    assert shelf.sweep() == []
    assert "no room for another version within trainer.max_adapter_bytes" in caplog.text


WEIGHTS_BYTES, STATE_BYTES = 163_000_000, 327_000_000
"""Those of a LoRA of rank 16 on a model of 7B."""


class Deployment:
    """Retention's view of a policy whose every step makes a version, some of which are rejected, pinned or the best."""

    def __init__(self, adapters: Path) -> None:
        self.adapters = adapters
        self.versions: list[dict[str, Any]] = []
        self.live: int | None = None

    def policies(self) -> list[str]:
        return ["starter"]

    def mark(self, policy: str, choose: Choose, now: datetime) -> list[Path]:
        standing = [StoredAdapter(**one) for one in reversed(self.versions)]
        gone = {each.version for each in choose(standing)}
        self.versions = [one for one in self.versions if one["version"] not in gone]
        return [each.folder for each in standing if each.version in gone]

    def removed(self, folders: Collection[Path]) -> list[Path]:
        needed = {one["folder"] for one in self.versions}
        return [folder for folder in folders if folder not in needed]

    def step(self, version: int, now: datetime) -> None:
        """Write a version as a step does; every fifth is rejected, and every 300th of the others pinned."""
        folder = self.adapters / f"starter@v{version}"
        folder.mkdir(parents=True)
        for name, size in ((WEIGHTS, WEIGHTS_BYTES), (OPTIMIZER_STATE, STATE_BYTES)):
            with (folder / name).open("wb") as file:
                file.truncate(size)  # sparse: takes no room
        rejected = version % 5 == 0
        self.versions.append(
            {
                "name": folder.name, "version": version, "parent": self.live, "folder": folder, "begun": False,
                "state": "rejected" if rejected else "live", "in_use": version % 301 == 0, "unserved_at": now,
                "created_at": now, "heldout_mean": 0.9 if version == 77 else version / 10_000,
            }
        )  # fmt: skip
        if not rejected:
            for one in self.versions[:-1]:
                if one["state"] == "live":
                    one |= {"state": "retired", "unserved_at": now}
            self.live = version

    def bytes(self) -> int:
        return sum(path.stat().st_size for path in self.adapters.glob("*/*"))


def test_two_thousand_versions_never_pass_the_cap_and_live_pinned_and_best_stay(tmp_path: Path) -> None:
    cap = 5 * 10**9
    settings = Settings(data=tmp_path, trainer={"max_adapter_bytes": cap})
    deployment = Deployment(settings.data.resolve() / "adapters")
    sweeper = Sweeper(deployment, settings)
    now, most = NOW, 0
    for version in range(1, 2001):
        now += timedelta(seconds=20)
        deployment.step(version, now)
        most = max(most, deployment.bytes())
        sweeper.written()
        sweeper.go_on(now)
    assert 0.9 * cap < most <= cap
    standing = {path.name for path in deployment.adapters.iterdir()}
    pinned = {version for version in range(1, 2001) if version % 301 == 0}
    assert standing >= {f"starter@v{version}" for version in {deployment.live, 77, *pinned}}
    assert len(list(deployment.adapters.glob(f"*/{OPTIMIZER_STATE}"))) <= 4
