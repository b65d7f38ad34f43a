"""Processes: ready, restarted, stopped with all that they started."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from whetstone.stack.supervisor import RESTARTS, Part, StartFailed, Supervisor

SLEEPER = [sys.executable, "-c", "import time; time.sleep(60)"]
PARENT = [
    sys.executable,
    "-c",
    "import subprocess, sys, time; print(subprocess.Popen(['sleep', '60']).pid, flush=True); time.sleep(60)",
]


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[Supervisor]:
    supervisor = Supervisor(tmp_path / "logs")
    yield supervisor
    supervisor.stop()


def part(command: list[str], ready: Callable[[], bool] = lambda: True, timeout_s: float = 10) -> Part:
    return Part("part", command, {}, ready, timeout_s)


def alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_part_that_dies_at_its_start_shows_the_end_of_its_log(supervisor: Supervisor) -> None:
    supervisor.start(part([sys.executable, "-c", "print('no such model'); raise SystemExit(3)"], lambda: False))
    with pytest.raises(StartFailed, match=r"ended with code 3.*\n.*\n\s+no such model"):
        supervisor.await_ready("part")


def test_a_part_that_never_gets_ready_is_given_up(supervisor: Supervisor) -> None:
    supervisor.start(part(SLEEPER, lambda: False, timeout_s=0.3))
    with pytest.raises(StartFailed, match="not ready after"):
        supervisor.await_ready("part")


def test_a_part_that_dies_is_started_again(supervisor: Supervisor) -> None:
    supervisor.start(part(SLEEPER))
    pid = supervisor.pids["part"]
    assert supervisor.watch() == []
    os.kill(pid, signal.SIGKILL)
    until(lambda: supervisor.watch() == ["part"])
    assert alive(supervisor.pids["part"])
    assert supervisor.pids["part"] != pid


def watched(supervisor: Supervisor, times: int) -> list[str]:
    """Whom so many looks start again; each look asks the parts for life (see the fixture `hurried`)."""
    return [name for _ in range(times) for name in supervisor.watch()]


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> float:
    """How often a part is asked for life, in seconds: at every look, for what a clock can tell."""
    every_s = 1e-9
    monkeypatch.setattr("whetstone.stack.supervisor.ALIVE_EVERY_S", every_s)
    return every_s


def test_a_part_that_says_it_is_dead_is_killed_and_started_again(supervisor: Supervisor, hurried: float) -> None:
    answers = iter([True, False])
    supervisor.start(replace(part(SLEEPER), alive=lambda: next(answers)))
    supervisor.await_ready("part")
    pid = supervisor.pids["part"]
    assert watched(supervisor, 2) == ["part"]
    assert not alive(pid) and alive(supervisor.pids["part"])
    assert "supervisor: it runs, but" in supervisor.log("part").read_text()


def test_a_part_that_cannot_tell_whether_it_lives_is_killed_only_if_that_lasts(
    supervisor: Supervisor, hurried: float
) -> None:
    answers = iter([None, None, True, None, None, None])
    supervisor.start(replace(part(SLEEPER), alive=lambda: next(answers), silence_s=3 * hurried))
    supervisor.await_ready("part")
    assert watched(supervisor, 5) == []
    assert watched(supervisor, 1) == ["part"]


def test_a_part_is_asked_for_life_every_few_seconds_only(supervisor: Supervisor) -> None:
    asked: list[bool] = []
    supervisor.start(replace(part(SLEEPER), alive=lambda: asked.append(True) or True))
    supervisor.await_ready("part")
    assert watched(supervisor, 10) == []
    assert len(asked) == 1


def test_a_part_that_was_started_again_is_asked_whether_it_is_ready_before_it_is_asked_for_life(
    supervisor: Supervisor, hurried: float
) -> None:
    asked: list[str] = []
    readiness = iter([True, False, True])

    def ready() -> bool:
        asked.append("ready")
        return next(readiness)

    def lives() -> bool:
        asked.append("alive")
        return True

    supervisor.start(replace(part(SLEEPER, ready), alive=lives))
    supervisor.await_ready("part")
    os.kill(supervisor.pids["part"], signal.SIGKILL)
    until(lambda: watched(supervisor, 1) == ["part"])
    asked.clear()
    assert watched(supervisor, 3) == []
    assert asked == ["ready", "ready", "alive"]


def test_a_part_that_does_not_get_ready_after_its_restart_is_started_again(supervisor: Supervisor) -> None:
    readiness = iter([True])
    supervisor.start(part(SLEEPER, lambda: next(readiness, False), timeout_s=0.5))
    supervisor.await_ready("part")
    os.kill(supervisor.pids["part"], signal.SIGKILL)
    until(lambda: watched(supervisor, 1) == ["part"])
    pid = supervisor.pids["part"]
    until(lambda: watched(supervisor, 1) == ["part"])
    assert not alive(pid)


def test_a_part_that_keeps_dying_ends_the_stack(supervisor: Supervisor) -> None:
    supervisor.start(part([sys.executable, "-c", "raise SystemExit(1)"]))

    def watch_for_ever() -> None:
        for _ in range(1000):
            supervisor.watch()
            time.sleep(0.02)

    with pytest.raises(StartFailed, match="keeps dying"):
        watch_for_ever()
    assert RESTARTS < 1000


def test_stopping_leaves_no_process_not_even_those_that_a_part_started(supervisor: Supervisor) -> None:
    supervisor.start(part(PARENT))
    until(lambda: supervisor.log("part").read_text().strip().isdigit())
    child = int(supervisor.log("part").read_text())
    pid = supervisor.pids["part"]
    supervisor.stop()
    assert not alive(pid)
    until(lambda: not alive(child))
    assert supervisor.pids == {}


def test_a_part_that_ignores_sigterm_is_killed(supervisor: Supervisor) -> None:
    deaf = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)"
    )
    supervisor.start(replace(part([sys.executable, "-c", deaf]), stop_timeout_s=0.3))
    until(lambda: supervisor.log("part").read_text() == "deaf\n")
    pid = supervisor.pids["part"]
    supervisor.stop()
    assert not alive(pid)


def test_parts_die_with_a_supervisor_that_is_killed(tmp_path: Path) -> None:
    script = (
        "import sys, time; from pathlib import Path; from whetstone.stack.supervisor import Part, Supervisor\n"
        f"s = Supervisor(Path({str(tmp_path)!r})); s.start(Part('p', ['sleep', '60'], {{}}, lambda: True))\n"
        "print(s.pids['p'], flush=True); time.sleep(60)"
    )
    root = Path(__file__).resolve().parents[4]
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, cwd=root) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        assert alive(pid)
        process.kill()
        until(lambda: not alive(pid))
