"""A side of the comparison: its processes, what they have used, and, where it is our proxy, what SQL has of it.

A side that is not asked is stopped (SIGSTOP), so that it takes no time from the others. Linux, for /proc.
"""

import functools
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.bench_client import Target
from migrations.database import connect
from whetstone.settings import Settings

START_S = 120.0
"""How long a side may take until it answers: LiteLLM imports for half a minute."""
DIRECT = "direct"
"""The side that is the upstream alone."""
SQL_OFF = "SQL off"
"""The form of the proxy whose database is held while it is asked."""


@dataclass
class Side:
    """Something that answers."""

    name: str
    targets: tuple[Target, ...]
    """One for each worker."""
    pids: tuple[int, ...] = ()
    """Its processes, without their children; of the upstream alone, it and this one, which asks."""
    cores: int = 1
    """That it may use."""
    settings: Settings | None = None
    """The proxy's."""
    form: str | None = None
    """Which of the proxy's; none where it is not ours."""

    @property
    def target(self) -> Target:
        return self.targets[0]

    @functools.cached_property
    def processes(self) -> list[int]:
        """All of its processes, once it has started: to look for them takes longer than what is measured."""
        return [pid for own in self.pids for pid in (own, *(() if self.name == DIRECT else _children(own)))]

    def cpu_s(self) -> float:
        """What it has used of processors so far."""
        return sum(_cpu_s(pid) for pid in self.processes)

    def memory_bytes(self, field: str = "VmRSS") -> int:
        """What its processes have resident, or had at most (`VmHWM`)."""
        return sum(_memory_bytes(pid, field) for pid in self.processes)

    def stop(self) -> None:
        """Have it take no time until it goes on; not the upstream, which all others need."""
        for pid in self.processes if self.name != DIRECT else ():
            os.kill(pid, signal.SIGSTOP)

    def go_on(self) -> None:
        """Have it answer again."""
        for pid in self.processes if self.name != DIRECT else ():
            os.kill(pid, signal.SIGCONT)
        if self.settings is not None:
            self.wait_written()

    def state(self, target: Target) -> dict[str, Any]:
        """What the proxy says of itself."""
        headers = dict([self.target.headers.strip().split(": ", 1)])
        answer = httpx.get(f"http://{target.host}:{target.port}/readyz", headers=headers, timeout=30)
        told: dict[str, Any] = answer.json()
        return told

    def wait_written(self) -> float:
        """Until the proxy can serve and SQL has everything; how long that took.

        Raises:
            SystemExit: it does not come to be.
        """
        began_s = time.perf_counter()
        while time.perf_counter() - began_s < START_S:
            told = [self.state(target) for target in self.targets]
            if all(one["status"] == "ok" and one["unwritten"] == 0 for one in told):
                return time.perf_counter() - began_s
            time.sleep(0.02)
        raise SystemExit(f"{self.name}: not ready, or not everything written, after {START_S:g} s: {told}")

    def rows(self) -> tuple[int, int]:
        """Completions in SQL, and calls that they are of."""
        assert self.settings is not None
        engine = connect(self.settings.database_url)
        with engine.begin() as connection:
            counted = connection.exec_driver_sql("SELECT count(*), count(DISTINCT call_id) FROM completions").one()
        engine.dispose()
        return counted[0], counted[1]

    @contextmanager
    def asked(self) -> Iterator[None]:
        """While it is asked: the database takes nothing, where that is what is measured. What waits for it is in the
        journal, and is written afterwards."""
        if self.form != SQL_OFF:
            yield
            return
        assert self.settings is not None
        engine = connect(self.settings.database_url)
        with engine.connect() as connection:
            connection.exec_driver_sql("SELECT 1")  # its transaction has the write lock from its first statement on
            yield
            connection.rollback()
        engine.dispose()


@contextmanager
def on_cores(cores: set[int]) -> Iterator[None]:
    """What is started here runs on these."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _children(pid: int) -> list[int]:
    stats = Path("/proc").glob("[0-9]*/stat")
    found = [int(path.parent.name) for path in stats if int(_stat(path)[1]) == pid]
    return [one for child in found for one in (child, *_children(child))]


def _stat(path: Path) -> list[str]:
    """What stands behind the name: state, parent, ...; of a process that has just ended, nobody's child."""
    try:
        return path.read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ["X", "-1"]


def _cpu_s(pid: int) -> float:
    fields = _stat(Path(f"/proc/{pid}/stat"))
    if len(fields) < 13:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _memory_bytes(pid: int, field: str) -> int:
    """Of a process that has ended meanwhile, as a worker of another proxy's may, none."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":")), 0)
