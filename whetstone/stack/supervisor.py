"""Start, monitor, restart and stop a set of processes."""

import contextlib
import ctypes
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from whetstone.errors import WhetstoneError
from whetstone.observability.log_setup import Format, line

STOP_TIMEOUT_S = 15.0
RESTARTS = 5
RESTART_WINDOW_S = 120.0
ALIVE_EVERY_S = 5.0
"""How often a part's liveness is checked."""
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)
"""Loaded before any fork: another thread may hold the loader's lock then (the demo's display has one)."""


class StartFailed(WhetstoneError):
    """A part did not start; the message has the end of its log and the remedy."""


@dataclass(frozen=True)
class Part:
    """One process of the stack."""

    name: str
    command: list[str]
    environment: Mapping[str, str]
    ready: Callable[[], bool]
    """Called after each start until it returns True; also does what a start requires. Returns within seconds."""
    timeout_s: float = 60.0
    """How long a start may take."""
    niceness: int = 0
    stop_timeout_s: float = STOP_TIMEOUT_S
    """How long a stop may take; then the part is killed."""
    alive: Callable[[], bool | None] | None = None
    """Called while the part is ready; returns within seconds. True: alive; False: kill it at once; None: unknown."""
    silence_s: float = 15.0
    """A part whose state is unknown for this long counts as hanging, and is killed."""


@dataclass
class _Running:
    part: Part
    process: subprocess.Popen[bytes]
    restarts: deque[float] = field(default_factory=deque)
    started_at: float = field(default_factory=time.monotonic)
    ready: bool = False
    checked_at: float = -math.inf
    silences: int = 0

    def lives(self) -> bool:
        """Whether it runs and, if it can be checked, is alive."""
        if self.process.poll() is not None:
            return False
        now = time.monotonic()
        if not self.ready:
            self.ready = self.part.ready()
            return self.ready or now - self.started_at < self.part.timeout_s
        if self.part.alive is None or now - self.checked_at < ALIVE_EVERY_S:
            return True
        self.checked_at = now
        answer = self.part.alive()
        # Counted, not timed: after a pause of the whole machine no part has been silent yet.
        self.silences = 0 if answer else self.silences + 1
        return answer is not False and self.silences * ALIVE_EVERY_S < self.part.silence_s


class Supervisor:
    """Runs parts; each has its own session and its own log file. Use it from one thread.

    A part that dies or hangs is restarted, at most RESTARTS times in RESTART_WINDOW_S. If the supervisor itself is
    killed, the kernel sends its parts SIGTERM (Linux).
    """

    def __init__(self, logs: Path, form: Format = "text") -> None:
        """`form`: format of the supervisor's own lines in the parts' logs."""
        self._logs = logs
        self._form: Format = form
        self._running: list[_Running] = []

    @property
    def pids(self) -> dict[str, int]:
        """Process ids by part."""
        return {running.part.name: running.process.pid for running in self._running}

    def log(self, name: str) -> Path:
        """Return the path of a part's log."""
        return self._logs / f"{name}.log"

    def start(self, part: Part) -> None:
        """Start a part; `await_ready` waits for it."""
        self._logs.mkdir(parents=True, exist_ok=True)
        self._running.append(_Running(part, self._spawn(part)))

    def await_ready(self, *names: str, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Wait until these parts are ready; `meanwhile` is called between two checks.

        Raises:
            StartFailed: a part died, or took longer than its timeout.
        """
        began = time.monotonic()
        for running in [running for running in self._running if running.part.name in names]:
            part = running.part
            while not part.ready():
                if running.process.poll() is not None:
                    raise StartFailed(f"{part.name} ended with code {running.process.returncode}.\n{self._tail(part)}")
                if time.monotonic() - began > part.timeout_s:
                    raise StartFailed(f"{part.name} was not ready after {part.timeout_s:.0f} s.\n{self._tail(part)}")
                meanwhile()
                time.sleep(0.1)
            running.ready = True

    def watch(self) -> list[str]:
        """Restart parts that have died or hang; return their names. Parts that are starting are checked for readiness.

        Raises:
            StartFailed: a part dies repeatedly.
        """
        restarted = []
        for place, running in enumerate(self._running):
            if running.lives():
                continue
            part, restarts = running.part, running.restarts
            if running.process.poll() is None:
                note = line(self._form, "supervisor", "it runs, but is not ready in time, dead, or silent: killed")
                with self.log(part.name).open("a", encoding="utf-8") as log:
                    log.write(note + "\n")
            _kill_group(running.process.pid)
            with contextlib.suppress(subprocess.TimeoutExpired):
                running.process.wait(STOP_TIMEOUT_S)
            now = time.monotonic()
            while restarts and now - restarts[0] > RESTART_WINDOW_S:
                restarts.popleft()
            if len(restarts) >= RESTARTS:
                raise StartFailed(f"{part.name} keeps dying.\n{self._tail(part)}")
            restarts.append(now)
            self._running[place] = _Running(part, self._spawn(part), restarts)
            restarted.append(part.name)
        return restarted

    def stop(self) -> None:
        """Stop every part, the last started first; leave no process behind."""
        for running in reversed(self._running):
            running.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                running.process.wait(running.part.stop_timeout_s)
            # Processes that the part started are in its session, and are killed with it.
            _kill_group(running.process.pid)
            running.process.wait()
        self._running.clear()

    def _spawn(self, part: Part) -> subprocess.Popen[bytes]:
        def prepare() -> None:
            die_with_parent(signal.SIGTERM)
            os.nice(part.niceness)

        with self.log(part.name).open("ab") as log:
            return subprocess.Popen(
                part.command,
                env={**os.environ, **part.environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=prepare,  # noqa: PLW1509 it takes no lock that another thread could hold
            )

    def _tail(self, part: Part) -> str:
        log = self.log(part.name)
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-20:] if log.exists() else []
        return "\n".join([f"The end of {log}:", *(f"  {line}" for line in lines)])


def die_with_parent(number: signal.Signals) -> None:
    """Make the kernel send this process the signal when its parent dies (Linux)."""
    if sys.platform == "linux":
        _LIBC.prctl(_PR_SET_PDEATHSIG, number)


def stop_at_signals(stopped: threading.Event) -> None:
    """Set the event at SIGTERM or SIGINT; the same signal again ends the process at once."""

    def stop(number: int, _: object) -> None:
        stopped.set()
        signal.signal(number, signal.SIG_DFL)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
