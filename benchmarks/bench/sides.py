"""A side of the comparison: its processes, their CPU and memory and, for our proxy, its rows in SQL.

A side is stopped (SIGSTOP) while others are measured, so that it takes no time from them. Linux, for /proc.
"""

import functools
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import httpx
from sqlalchemy import Engine

from benchmarks.bench.client import Target
from benchmarks.kit import proc
from whetstone.config.settings import Settings
from whetstone.database.engine import connect

START_S = 120.0
"""How long a side may take until it answers: LiteLLM imports for half a minute."""
DIRECT = "direct"
"""The side that is the upstream alone."""
SQL_OFF = "SQL off"
"""The form of the proxy whose database is blocked during the load."""


@dataclass
class Side:
    """A server to measure."""

    name: str
    targets: tuple[Target, ...]
    """One for each worker."""
    pids: tuple[int, ...] = ()
    """Its processes, without their children; for the upstream alone, it and this process, which sends the requests."""
    cores: int = 1
    """Number of cores that it may use."""
    settings: Settings | None = None
    """The proxy's settings."""
    form: str | None = None
    """Form of the proxy; None for other servers."""

    @property
    def target(self) -> Target:
        return self.targets[0]

    @functools.cached_property
    def processes(self) -> list[int]:
        """All of its processes after the start; cached, since finding them takes longer than a measurement."""
        return [pid for own in self.pids for pid in (own, *(() if self.name == DIRECT else proc.descendants(own)))]

    def cpu_s(self) -> float:
        """Return the CPU time that it has used so far."""
        return sum(proc.cpu_s(pid) for pid in self.processes)

    def memory_bytes(self, field: str = "VmRSS") -> int:
        """Return the resident memory of its processes, or their maximum (`VmHWM`)."""
        return sum(proc.memory_bytes(pid, field) for pid in self.processes)

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Continue its processes, and stop them at the end."""
        self._send(signal.SIGCONT)
        if self.settings is not None:
            self.wait_written()
        yield
        self._send(signal.SIGSTOP)

    def _send(self, sent: signal.Signals) -> None:
        """Send a signal to its processes; not to the upstream, which all others need."""
        for pid in self.processes if self.name != DIRECT else ():
            os.kill(pid, sent)

    def wait_written(self) -> float:
        """Wait until the proxy can serve and SQL has everything; return how long that took.

        Raises:
            SystemExit: it is not ready in time.
        """
        began_s, headers = time.perf_counter(), dict([self.target.headers.strip().split(": ", 1)])
        while time.perf_counter() - began_s < START_S:
            states = [httpx.get(f"{one.url}/readyz", headers=headers, timeout=30).json() for one in self.targets]
            if all(one["status"] == "ok" and one["unwritten"] == 0 for one in states):
                return time.perf_counter() - began_s
            time.sleep(0.02)
        raise SystemExit(f"{self.name}: not ready, or not everything written, after {START_S:g} s: {states}")

    @functools.cached_property
    def _engine(self) -> Engine:
        assert self.settings is not None
        return connect(self.settings.database_url)

    def rows(self) -> tuple[int, int]:
        """Return the number of completions in SQL, and of their calls."""
        with self._engine.connect() as connection:
            rows, calls = connection.exec_driver_sql("SELECT count(*), count(DISTINCT call_id) FROM completions").one()
        return rows, calls

    @contextmanager
    def database_blocked(self) -> Iterator[None]:
        """Block the database during the load, where that form is measured.

        The journal stores what waits, and it is written afterwards.
        """
        if self.form != SQL_OFF:
            yield
            return
        with self._engine.connect() as connection:
            connection.exec_driver_sql("SELECT 1")  # its transaction has the write lock from its first statement on
            yield


@contextmanager
def on_cores(cores: set[int]) -> Iterator[None]:
    """Run what is started inside on these cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
