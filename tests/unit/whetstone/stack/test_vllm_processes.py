"""Several vLLM servers: a part for each, each asked and given its adapters by itself, all awaited."""

import json
import os
import random
import signal
import socket
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine

from migrations import schema
from tests.conftest import Seed
from tests.unit.whetstone.conftest import FakeVllm
from tests.unit.whetstone.stack.test_supervisor import until
from whetstone.config.settings import Settings, SettingsError, load
from whetstone.registry import adapters
from whetstone.registry.projects import Store
from whetstone.stack import stack, vllm_processes
from whetstone.stack.supervisor import StartFailed, Supervisor

SLEEPER = [sys.executable, "-c", "import time; time.sleep(60)"]


class Loading(FakeVllm):
    """One that keeps which adapters it was told to load."""

    def __init__(self) -> None:
        self.loaded: set[str] = set()
        super().__init__()

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        if self.whole is None and path == "/health":
            return 200, b""
        if self.whole is None and path == "/v1/load_lora_adapter":
            self.loaded.add(body["lora_name"])
            return 200, b"loaded"
        if self.whole is None and path == "/v1/models":
            names = [self.served, *self.loaded]
            return 200, json.dumps({"object": "list", "data": [{"id": name} for name in names]}).encode()
        return super().answer(path, body)


@pytest.fixture
def two() -> Any:
    """Two servers."""
    with Loading() as first, Loading() as second:
        yield first, second


def settings_of(*urls: str) -> Settings:
    return Settings(vllm={"urls": urls})


@pytest.fixture
def adapter(seed: Seed, tmp_path: Path) -> str:
    """The name of an adapter that is to be served."""
    folder = tmp_path / "starter@v1"
    folder.mkdir()
    manifest = {"format": adapters.FORMAT, "base_model": {}, "files": {}}
    (folder / adapters.MANIFEST).write_text(json.dumps(manifest))
    seed.insert(
        schema.policy_versions, project="default", id=folder.name, policy="starter", version=1, state="live",
        served=True, created_at=seed.now, adapter_path=str(folder),
    )  # fmt: skip
    return folder.name


def test_one_server_is_called_vllm_and_several_are_numbered(engine: Engine) -> None:
    (only,) = vllm_processes.parts(settings_of("http://127.0.0.1:8001"), Store(engine))
    assert only.name == "vllm"
    pair = vllm_processes.parts(settings_of("http://127.0.0.1:8001", "http://127.0.0.1:8005"), Store(engine))
    assert [part.name for part in pair] == ["vllm-1", "vllm-2"]
    assert [part.command[part.command.index("--port") + 1] for part in pair] == ["8001", "8005"]


def test_each_process_sees_its_own_gpus_and_without_gpus_what_up_sees(engine: Engine, tmp_path: Path) -> None:
    urls = ("http://127.0.0.1:8001", "http://127.0.0.1:8005")
    settings = Settings(vllm={"urls": urls, "replicas": 2, "devices": (0, 1, 3, 2)}, trainer={"devices": (4,)})
    parts = vllm_processes.parts(settings, Store(engine))
    trainer = stack.training_worker(settings, Supervisor(tmp_path), {})
    assert [one.environment["CUDA_VISIBLE_DEVICES"] for one in (*parts, trainer)] == ["0,1", "3,2", "4"]
    assert {one.environment["CUDA_DEVICE_ORDER"] for one in (*parts, trainer)} == {"PCI_BUS_ID"}
    plain = vllm_processes.parts(settings_of(*urls), Store(engine))
    assert not any(name.startswith("CUDA") for part in plain for name in part.environment)
    assert "CUDA_VISIBLE_DEVICES" not in stack.training_worker(Settings(), Supervisor(tmp_path), {}).environment


def test_a_launcher_takes_the_place_of_the_training_worker(tmp_path: Path) -> None:
    settings = Settings(launcher={"command": ("true",)})
    part = stack.training_worker(settings, Supervisor(tmp_path), {})
    assert (part.name, part.command[1:]) == ("trainer", ["-m", "trainer.launcher"])


def test_each_server_is_given_its_adapters_whatever_the_other_has(two: Any, adapter: str, engine: Engine) -> None:
    first, second = two
    one, other = vllm_processes.parts(settings_of(first.url, second.url), Store(engine))
    assert one.ready()
    assert (first.loaded, second.loaded) == ({adapter}, set())
    first.whole = 500, b"down"
    assert not one.ready() and other.ready()
    assert second.loaded == {adapter}


def test_a_server_that_dies_is_started_again_and_gets_its_adapters_while_the_other_stays(
    two: Any, adapter: str, engine: Engine, tmp_path: Path
) -> None:
    first, second = two
    supervisor = Supervisor(tmp_path / "logs")
    try:
        for part in vllm_processes.parts(settings_of(first.url, second.url), Store(engine)):
            supervisor.start(replace(part, command=SLEEPER))
        supervisor.await_ready("vllm-1", "vllm-2")
        before = supervisor.pids
        first.loaded.clear()
        os.kill(before["vllm-1"], signal.SIGKILL)
        until(lambda: supervisor.watch() == ["vllm-1"])
        until(lambda: supervisor.watch() == [] and first.loaded == {adapter})
        assert supervisor.pids["vllm-1"] != before["vllm-1"]
        assert supervisor.pids["vllm-2"] == before["vllm-2"]
    finally:
        supervisor.stop()


def test_a_start_waits_until_every_server_has_the_live_version(two: Any) -> None:
    first, second = two
    first.loaded.add("starter@v1")
    looks: list[int] = []

    def meanwhile() -> None:
        looks.append(1)
        if len(looks) == 2:
            second.loaded.add("starter@v1")

    vllm_processes.await_loaded("starter@v1", (first.url, second.url), 10, meanwhile, enough=2)
    assert len(looks) == 2


def test_where_one_server_is_enough_the_other_may_be_away(two: Any) -> None:
    first, _ = two
    first.loaded.add("starter@v1")
    vllm_processes.await_loaded("starter@v1", (first.url, "http://127.0.0.1:1"), 0, lambda: None, enough=1)


def test_a_server_that_never_has_it_is_named_with_what_it_answers(two: Any) -> None:
    first, second = two
    second.loaded.add("starter@v1")
    with pytest.raises(StartFailed, match=f"^vLLM at {first.url}: starter@v1 is not loaded$"):
        vllm_processes.await_loaded("starter@v1", (first.url, second.url), 0, lambda: None, enough=2)
    with pytest.raises(StartFailed, match="vLLM at http://127.0.0.1:1: vLLM does not answer"):
        vllm_processes.await_loaded("starter@v1", ("http://127.0.0.1:1",), 0, lambda: None, enough=1)


def taken_after_a_free_one() -> socket.socket:
    """Listen on a port after a free one. Both lie below those that Linux gives to whoever asks for any: other tests
    would take the free one."""
    for port in random.sample(range(20_000, 32_000), 100):
        with socket.socket() as free, suppress(OSError):
            free.bind(("127.0.0.1", port))
            return socket.create_server(("127.0.0.1", port + 1))
    raise AssertionError("none of 100 ports is free")


def test_a_port_of_a_later_server_that_is_taken_stops_the_start(tmp_path: Path) -> None:
    with taken_after_a_free_one() as taken:
        port = taken.getsockname()[1]
        settings = load(environment={}, data=tmp_path, proxy__port=0, vllm__port=port - 1, vllm__replicas=2)
        with (
            pytest.raises(SettingsError, match=rf"port {port} on 127.0.0.1 .* \(vllm\.port"),
            stack.running(settings, print),
        ):
            pass


@pytest.mark.parametrize("first", ["the proxy's is the second", "the last there is"])
def test_ports_that_do_not_suffice_stop_the_start(tmp_path: Path, first: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        proxy = free.getsockname()[1]
    port = 65535 if first == "the last there is" else proxy - 1
    settings = load(environment={}, data=tmp_path, proxy__port=proxy, vllm__port=port, vllm__replicas=2)
    with pytest.raises(SettingsError, match="leaves 2 servers no ports"), stack.running(settings, print):
        pass
