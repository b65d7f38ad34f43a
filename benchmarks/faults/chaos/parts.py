"""The programs that `chaos` kills: started as `whetstone up` does, killed with SIGKILL, restarted when they end."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx

from benchmarks.kit import redis_server
from benchmarks.kit.harness import worker_command
from benchmarks.kit.postgres import Postgres
from benchmarks.kit.process import ROOT
from whetstone.messaging.task_names import JUDGE_QUEUE, TRAINER_QUEUE

STOP_S = 60.0


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
        self._lock = threading.RLock()

    def start(self) -> None:
        """Start it, for the first time or again."""
        with self._lock, self._log.open("ab") as log:
            self._killed = False
            self._from = log.tell()
            self._process = subprocess.Popen(
                self._command, cwd=ROOT, env=self._environment, stdout=log, stderr=log, start_new_session=True
            )

    def kill(self) -> bool:
        """Send SIGKILL; return when it is gone, with whether it was running."""
        with self._lock:
            lived = self._process.poll() is None
            if lived:
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._killed = True
        return lived

    def look(self) -> bool:
        """Return whether it is ready. Restart it if it has ended by itself; if it was killed, it waits for `start`."""
        with self._lock:
            if self._killed:
                return False
            if self._process.poll() is not None:
                self.start()
                return False
        with self._log.open("rb") as log:
            log.seek(self._from)
            return self._ready(log.read())

    def stop(self) -> None:
        """End it for good."""
        self._process.send_signal(self._last)
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.kill()


@dataclass(frozen=True)
class Database:
    """PostgreSQL, with all of its processes: a part as a `Program` is."""

    postgres: Postgres
    name: str = "database"

    def start(self) -> None:
        self.postgres.start()

    def kill(self) -> bool:
        self.postgres.kill()
        return True

    def look(self) -> bool:
        return True

    def stop(self) -> None:
        """Do nothing: its creator closes it, after the last read."""


Part = Program | Database


def programs(url: str, socket: Path, environment: Mapping[str, str], folder: Path) -> list[Program]:
    """Return a Redis without persistence, the proxy at `url`, and both workers, in the order of their start."""

    def serves(_log: bytes) -> bool:
        try:
            return httpx.get(f"{url}/readyz", timeout=5, trust_env=False).status_code == 200
        except httpx.TransportError:
            return False

    def works(log: bytes) -> bool:
        return b" ready." in log

    redis = redis_server.command_of(socket, folder)
    judge = worker_command("judge", JUDGE_QUEUE, "--pool", "threads", "--concurrency", "3")
    # The trainer has the lowest priority: it always has work.
    trainer = ["nice", "-n", "10", *worker_command("trainer", TRAINER_QUEUE, "--pool", "solo")]
    return [
        Program("broker", redis, os.environ, folder, lambda log: b"eady to accept connections" in log),
        # Only the proxy has work to finish.
        Program("proxy", [sys.executable, "-P", "-m", "proxy"], environment, folder, serves, signal.SIGTERM),
        Program("judge", judge, environment, folder, works),
        Program("trainer", trainer, {**environment, "OMP_WAIT_POLICY": "PASSIVE"}, folder, works),
    ]
