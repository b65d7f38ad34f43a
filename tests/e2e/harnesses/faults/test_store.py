"""The adapter store under faults in its short form, and that the proof can fail: each fault is reported."""

import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, update

from benchmarks.faults.store.publishing import Publishing
from benchmarks.faults.store.relay import FaultyRelay, at_random
from benchmarks.faults.store.witness import Witness, hashes
from benchmarks.kit.harness import prepared
from migrations import schema
from tests.conftest import NOW
from tests.unit.whetstone.registry.remote.stores import FILES, faulty_store, write_adapter
from whetstone.config.settings import load
from whetstone.registry.adapters import CONFIG, OPTIMIZER_STATE, WEIGHTS
from whetstone.registry.remote.object_store import ObjectStore
from whetstone.vllm.client import Vllm

ROOT = Path(__file__).resolve().parents[4]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.long(part="store")
@pytest.mark.parametrize("options", [["--alone"], ["--kills", "2"]], ids=["alone", "with a learner"])
def test_a_store_that_is_slow_silent_and_cut_leaves_nothing_half(tmp_path: Path, options: list[str]) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.faults.store"]
    command += ["--steps", "10", "--seed", "1", "--data", str(tmp_path), *options]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1180, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "10 versions, nothing half published, nothing half live: it holds" in run.stdout


@pytest.mark.slow
def test_versions_through_a_store_that_fails_at_random_are_whole_or_not_there(tmp_path: Path) -> None:
    """The same without a network: a folder, each call of which is late or fails."""
    rng = random.Random(1)

    def fail(_method: str, _path: str) -> None:
        time.sleep(rng.uniform(0, 0.2))
        if rng.random() < 0.15:
            raise ConnectionError("connection reset by peer")

    def faulty() -> ObjectStore:
        store, files = faulty_store(tmp_path / "store")
        files.before = fail
        return store

    rules = {"keep_adapters": 2, "keep_adapters_s": 0}
    settings = load(environment={}, data=tmp_path / "data", trainer=rules, proxy={"drain_s": 0})
    settings.data.mkdir()
    direct, _ = faulty_store(tmp_path / "store")
    with prepared(settings) as engine:
        run = Publishing(settings, engine, faulty, direct, rng)
        assert run.run(10, tmp_path) == []
        states, standing = hashes(engine)
    assert run.kills > 0 and states["live"] == 1 and states["removed"] > 0
    assert set(direct.objects()) == standing
    assert len(run.witness.live) > 1 and all(run.witness.live.values())


class Loads(Vllm):
    """A server that has these versions."""

    def __init__(self, *names: str) -> None:
        super().__init__("http://127.0.0.1:1")
        self.names = {"starter@v0", *names}

    def models(self) -> set[str]:
        return self.names


class Scene:
    """A store, a database with a live version, and a witness."""

    def __init__(self, engine: Engine, seed: Any, folder: Path) -> None:
        self.engine = engine
        self.store, _ = faulty_store(folder / "store")
        self.objects = folder / "store"
        self.adapter = folder / "starter@v1"
        self.sha256 = write_adapter(self.adapter)
        self.vllm = Loads("starter@v1")
        self.witness = Witness(self.store, engine, self.vllm)
        seed.insert(
            schema.policy_versions, project="default", id="starter@v1", policy="starter", version=1, state="live",
            adapter_path=str(self.adapter), manifest_sha256=self.sha256, created_at=NOW, served=True,
        )  # fmt: skip

    def go_live(self) -> None:
        with self.engine.begin() as connection:
            connection.execute(update(schema.policies).values(live_version=1))


@pytest.fixture
def scene(engine: Engine, seed: Any, tmp_path: Path) -> Scene:
    return Scene(engine, seed, tmp_path)


def test_a_published_and_loaded_version_has_no_fault(scene: Scene) -> None:
    scene.store.publish(scene.adapter)
    scene.go_live()
    scene.witness.look()
    assert (scene.witness.faults, scene.witness.whole, scene.witness.live) == ([], {scene.sha256}, {1: True})
    assert hashes(scene.engine) == ({"live": 1}, {scene.sha256})


@pytest.mark.parametrize("name", [WEIGHTS, CONFIG])
@pytest.mark.parametrize("content", [None, b"half"], ids=["missing", "half"])
def test_a_manifest_without_all_of_its_objects_is_a_fault(scene: Scene, name: str, content: bytes | None) -> None:
    scene.store.publish(scene.adapter)
    path = scene.objects / scene.sha256 / name
    path.unlink() if content is None else path.write_bytes(content)
    scene.witness.look()
    assert len(scene.witness.faults) == 1 and "half published" in scene.witness.faults[0]


def test_objects_without_a_manifest_are_none(scene: Scene) -> None:
    scene.store.publish(scene.adapter)
    (scene.objects / scene.sha256 / "manifest.json").unlink()
    scene.witness.look()
    assert (scene.witness.faults, scene.witness.unfinished) == ([], {scene.sha256})


def test_the_optimizers_state_in_the_store_is_a_fault(scene: Scene) -> None:
    scene.store.publish(scene.adapter)
    (scene.objects / scene.sha256 / OPTIMIZER_STATE).write_bytes(FILES[OPTIMIZER_STATE])
    scene.witness.look()
    assert OPTIMIZER_STATE in scene.witness.faults[0]


def test_a_live_version_that_the_server_lacks_or_could_not_load_again_is_a_fault(scene: Scene) -> None:
    scene.vllm.names.remove("starter@v1")
    scene.go_live()
    scene.witness.look()
    assert ["does not have it" in fault for fault in scene.witness.faults] == [True, False]
    assert "cannot load it" in scene.witness.faults[1]


# --- the relay


@pytest.fixture
def echo() -> Iterator[int]:
    """A server that sends back what comes."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                threading.Thread(target=send_back, args=(connection,), daemon=True).start()

        def send_back(connection: socket.socket) -> None:
            with connection:
                try:
                    while chunk := connection.recv(4096):
                        connection.sendall(chunk)
                except OSError:
                    return

        threading.Thread(target=serve, daemon=True).start()
        yield listening.getsockname()[1]
        listening.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def relay(echo: int) -> Iterator[FaultyRelay]:
    relay = FaultyRelay(echo)
    yield relay
    relay.close()


def test_the_relay_forwards_and_resets(relay: FaultyRelay) -> None:
    with socket.create_connection(("127.0.0.1", relay.port), timeout=10) as client:
        client.sendall(b"hello")
        assert client.recv(100) == b"hello"
        relay.mode = "cut"
        with pytest.raises(OSError):
            while True:
                client.sendall(b"hello")
                time.sleep(0.02)
    assert relay.cuts > 0


def test_the_relay_holds_back_what_comes_while_it_is_silent(relay: FaultyRelay) -> None:
    relay.mode = "silent"
    with socket.create_connection(("127.0.0.1", relay.port), timeout=0.3) as client:
        client.sendall(b"hello")
        with pytest.raises(TimeoutError):
            client.recv(100)
        relay.mode = "slow"
        client.settimeout(10)
        assert client.recv(100) == b"hello"


def test_its_modes_come_at_random(relay: FaultyRelay) -> None:
    with at_random(relay, random.Random(1)) as seconds:
        deadline = time.monotonic() + 20
        while not seconds and time.monotonic() < deadline:
            time.sleep(0.05)
    assert seconds and relay.mode == "open"
