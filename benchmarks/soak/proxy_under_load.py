"""A proxy that is soaked, in both forms: start it, sample its process, wait until everything is written, stop it."""

import asyncio
import contextlib
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.kit import proc
from benchmarks.kit.harness import prepared
from benchmarks.kit.process import (
    DRAIN_S,
    START_S,
    STOP_S,
    left_open,
    open_files,
    ready,
    running_proxy,
    state,
    until,
)
from proxy.recording.journal.log import SEGMENT_BYTES
from whetstone.config.settings import load


@dataclass(frozen=True)
class Sample:
    """The proxy's process at one moment."""

    at: float
    """Share of its requests, from 0 to 1; also of the time, where the machine keeps up with the rate."""
    seconds: float
    answered: int
    rss_bytes: int
    files: Counter[str]
    """Open files, by kind."""
    unwritten: int
    """Calls that SQL does not have yet."""
    waiting_segments: int
    """Segments of the journal that these calls fill."""


class ProxyUnderLoad:
    """A proxy, what was seen of it, and what does not hold."""

    def __init__(self, data: Path, count: int) -> None:
        """`count`: how many requests the run sends."""
        self.data, self.count = data, count
        self.samples: list[Sample] = []
        self.faults: list[str] = []
        self.before: Counter[str] = Counter()
        """What was open when the load began; `running` compares with it at its end."""
        self._log = data / "proxy.log"

    @contextlib.asynccontextmanager
    async def running(self, model_server: str, **given: Any) -> AsyncIterator[str]:
        """Start the proxy with these settings and yield its address; then see what it leaves open, and stop it."""
        self._urls = (model_server,)
        settings = load(environment={}, data=self.data, policy="soak", vllm__urls=self._urls, **given)
        with prepared(settings), running_proxy(settings, self._log) as (self.url, process):
            self.pid = process.pid
            async with aiohttp.ClientSession() as self._control:
                if not await until(lambda: ready(self._control, self.url), START_S):
                    sys.exit(f"the proxy did not start:\n{self.log()}")
                self.began = time.perf_counter()
                yield self.url
            self.left_open, faults = await left_open(self.pid, self.url, self._urls, self.before)
            self.faults += faults
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(process.wait, STOP_S)
            self.exit_code = process.returncode

    async def look(self, answered: int) -> Sample:
        """Sample the proxy's process, after so many answers."""
        reported = await state(self._control, self.url)
        sample = Sample(
            at=answered / self.count,
            seconds=time.perf_counter() - self.began,
            answered=answered,
            rss_bytes=proc.memory_bytes(self.pid),
            files=open_files(self.pid, self.url, self._urls),
            unwritten=reported.get("unwritten", 0),
            waiting_segments=reported.get("journal_bytes", 0) // SEGMENT_BYTES,
        )
        self.samples.append(sample)
        return sample

    async def drain(self) -> None:
        """Wait until everything is written."""
        if not await until(lambda: ready(self._control, self.url, unwritten=0), DRAIN_S):
            self.faults.append(f"records are still unwritten after {DRAIN_S:g} s")

    def log(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")
