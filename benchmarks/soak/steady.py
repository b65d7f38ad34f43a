"""Check that the proxy is steady: small requests at a fixed rate for minutes, with flat memory and open files.

The other form of `soak` (`--minutes`): nothing fails, an instant model server answers, apps keep their connections.
Samples the proxy's process each second. The first fifth of the time is for memory that fills up to a bound: the calls
that the proxy remembers to recognize their continuations (`proxy.kept_calls`, which is chosen so that it is full by
then; its default where the run is long enough).
"""

import asyncio
import contextlib
import functools
import json
import operator
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import httptools
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from sqlalchemy import text

from benchmarks.fakes.instant_vllm import Instant
from benchmarks.fakes.wire import CHAT
from benchmarks.kit import proc
from benchmarks.kit.check import verdict
from benchmarks.kit.process import (
    CONTROL_CONNECTIONS,
    DRAIN_S,
    POOLED,
    START_S,
    STOP_S,
    WHEN_QUIET,
    left_open,
    mib,
    open_files,
    ready,
    running_broker,
    running_proxy,
    state,
    too_many,
    unhandled,
    until,
)
from migrations.run import upgrade
from proxy.recording.journal.log import SEGMENT_BYTES
from whetstone.config.proxy import ProxySettings
from whetstone.config.settings import load
from whetstone.database.engine import connect
from whetstone.registry.projects import Store

RATE = 1000 / 3
"""Requests per second: 300,000 in 15 minutes."""
CALLS_IN_MEMORY = ProxySettings().kept_calls
"""Calls in memory by default: this must be full before memory is checked."""
WARM = 0.2
"""Share of the run before memory is checked."""
MOST_GROWTH = 0.05
"""Largest growth of memory in the rest of the run."""
SYNCED = 3
"""More descriptors of the journal during a sync: its segment, the one before, and the folder."""
PATIENCE_S = 30.0
EMBEDDINGS, FEEDBACK = "/v1/embeddings", "/v1/feedback"


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


def memory_not_flat(samples: list[Sample], most_growth: float = MOST_GROWTH) -> list[str]:
    """Return whether memory grows or falls after the warm-up; empty where it is flat."""
    sizes = [sample.rss_bytes for sample in samples if sample.at >= WARM]
    least, most = min(sizes), max(sizes)
    if most <= least * (1 + most_growth):
        return []
    return [f"memory is not flat: {mib(least)} to {mib(most)}, {most / least - 1:.1%}"]


def files_not_flat(samples: list[Sample], connections: int) -> list[str]:
    """Return the kinds of open files that grow after the warm-up; empty where all are flat.

    Kinds that a pool or the number of apps bounds may vary below that bound, and are checked against what must be left
    at the end of the run (`benchmarks.kit.process.WHEN_QUIET`). All others stay the same, to the last descriptor. Files
    that are open for a moment do not count: of each tenth the sample with the fewest of a kind counts.
    """
    tenths = lasting(samples)
    most = WHEN_QUIET | {
        "clients": connections + 1,
        "model servers": connections + CONTROL_CONNECTIONS,
        "journal": WHEN_QUIET["journal"] + SYNCED,
        "database's log": POOLED,
        "rest": tenths[0]["rest"],
    }
    # The same kind in several tenths is one fault; the last one is reported.
    faults = {fault.partition(":")[0]: fault for files in tenths for fault in too_many(files, most)}
    return list(faults.values())


def lasting(samples: list[Sample]) -> list[Counter[str]]:
    """Return, for each tenth after the warm-up, the fewest open files of each kind; of at least three samples."""
    # A segment that waits for SQL is no leak; its calls are reported as unwritten.
    looks = [one.files - Counter(journal=one.waiting_segments) for one in samples if one.at >= WARM]
    size = max(3, len(looks) // 8)
    parts = [looks[start : start + size] for start in range(0, len(looks) - size + 1, size)]
    return [functools.reduce(operator.and_, part) for part in parts]


class _App(asyncio.Protocol):
    """A client with one persistent connection; one request at a time."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport

    async def ask(self, path: str, body: bytes, headers: str = "") -> tuple[int, bytes]:
        """Return status and body of the answer.

        Raises:
            ConnectionError: the connection ended before it.
            TimeoutError: it did not come.
        """
        self._parser = httptools.HttpResponseParser(self)
        self._body, self._answered = b"", self._loop.create_future()
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n{headers}"
        self._transport.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        async with asyncio.timeout(PATIENCE_S):
            return await self._answered

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        self._answered.set_result((self._parser.get_status_code(), self._body))

    def connection_lost(self, _error: Exception | None) -> None:
        if not self._answered.done():
            self._answered.set_exception(ConnectionError("the proxy hung up"))


class Steady:
    """One run: `go`, then `report`."""

    def __init__(self, minutes: float, rate: float, connections: int, most_growth: float, data: Path) -> None:
        self._seconds, self._rate, self._connections, self._data = minutes * 60, rate, connections, data
        self._most_growth = most_growth
        self._count = int(self._seconds * rate)
        self._calls_in_memory = max(1000, min(CALLS_IN_MEMORY, int(self._count * WARM * 0.7)))
        self._log = data / "proxy.log"
        self._answered: Counter[str] = Counter()
        self._samples: list[Sample] = []
        self._faults: list[str] = []
        self._calls = 0

    async def go(self, console: Console) -> None:
        """Start, send requests at the rate, wait until all is written, stop."""
        with running_broker() as broker:
            await self._go(broker, console)

    async def _go(self, broker: str, console: Console) -> None:
        model = Instant(("soak@v0",))
        settings = load(
            environment={},
            data=self._data,
            policy="soak",
            broker=broker,
            vllm__urls=(model_server := await model.start(),),
            proxy__kept_calls=self._calls_in_memory,
            log__level="warning",
        )
        upgrade(settings.database_url)
        Store(connect(settings.database_url)).prepare(settings)
        with running_proxy(settings, self._log) as (url, process):
            async with aiohttp.ClientSession() as control:
                if not await until(lambda: ready(control, url), START_S):
                    sys.exit(f"the proxy did not start:\n{self._log.read_text()}")
                await self._drive(url, model_server, process, control, console)
                if not await until(lambda: ready(control, url, unwritten=0), DRAIN_S):
                    self._faults.append(f"records are still unwritten after {DRAIN_S:g} s")
            warm = [*lasting(self._samples), self._samples[-1].files]
            _, faults = await left_open(process.pid, url, [model_server], warm[0])
            self._faults += faults
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(process.wait, STOP_S)
            if process.returncode != 0:
                self._faults.append(f"the proxy stopped with {process.returncode}")
        model.stop()

    async def _drive(
        self,
        url: str,
        model_server: str,
        process: subprocess.Popen[bytes],
        control: aiohttp.ClientSession,
        console: Console,
    ) -> None:
        address, loop = urlsplit(url), asyncio.get_running_loop()
        began = time.perf_counter()

        async def app(place: int) -> None:
            transport, connection = await loop.create_connection(lambda: _App(loop), address.hostname, address.port)
            with contextlib.closing(transport):
                trajectory_id = ""
                # All at once: the proxy then has all the connections to the model server that it will need.
                await connection.ask(EMBEDDINGS, json.dumps({"model": "soak", "input": "soak"}).encode())
                for number in range(place, self._count, self._connections):
                    await asyncio.sleep(began + number / self._rate - time.perf_counter())
                    if self._faults:
                        return
                    trajectory_id = await self._ask(connection, number, trajectory_id)

        async def watch() -> None:
            columns = TextColumn("soak"), BarColumn(), TimeRemainingColumn(), TextColumn("{task.description}")
            with Progress(*columns, console=console) as progress:
                task = progress.add_task("", total=self._count)
                while True:
                    reported = await state(control, url)
                    unwritten = reported.get("unwritten", 0)
                    segments = reported.get("journal_bytes", 0) // SEGMENT_BYTES
                    size, files = proc.memory_bytes(process.pid), open_files(process.pid, url, [model_server])
                    answered = self._answered.total()
                    at, seconds = answered / self._count, time.perf_counter() - began
                    self._samples.append(Sample(at, seconds, answered, size, files, unwritten, segments))
                    line = f"{answered} answered, {unwritten} unwritten, {mib(size)}, {files.total()} files"
                    progress.update(task, completed=answered, description=line)
                    await asyncio.sleep(1)

        watching = asyncio.ensure_future(watch())
        try:
            await asyncio.gather(*(app(place) for place in range(self._connections)))
        finally:
            watching.cancel()
        self._took_s = time.perf_counter() - began

    async def _ask(self, app: _App, number: int, trajectory_id: str) -> str:
        """Send one request: one in twenty is feedback, four of them streams; every other call continues the one before.

        Returns the trajectory that the next feedback is about.
        """
        try:
            if number // self._connections % 20 == 19 and trajectory_id:
                reward = {"trajectory_id": trajectory_id, "reward": number % 2}
                status, body = await app.ask(FEEDBACK, json.dumps(reward).encode())
                due, kind = 202, "feedback"
            else:
                turns = [{"role": "user", "content": f"soak #{number - number % (2 * self._connections)}"}]
                streamed = number % 5 == 0
                trajectory_id = f"t{number % self._connections}-{number // self._connections // 2}"
                fields = {"model": "soak", "messages": turns, "stream": streamed}
                headers = f"x-trajectory-id: {trajectory_id}\r\n" if number % 3 else ""
                status, body = await app.ask(CHAT, json.dumps(fields).encode(), headers)
                due, kind = 200, "streams" if streamed else "answers"
                self._calls += 1
        except (ConnectionError, TimeoutError) as error:
            self._faults.append(f"request {number}: {type(error).__name__}: {error}")
            return trajectory_id
        self._answered[kind] += 1
        if status != due:
            self._faults.append(f"request {number}: {due} was due, came {status}: {body[:300]!r}")
        return trajectory_id

    def report(self, console: Console) -> int:
        """Print the result; return the exit code."""
        self._faults += unhandled(self._log.read_text(encoding="utf-8", errors="replace"))
        engine = connect(f"sqlite:///{self._data / 'whetstone.db'}")
        with engine.begin() as connection:
            recorded = connection.scalar(text("SELECT count(DISTINCT call_id) FROM completions"))
        engine.dispose()
        if recorded != self._calls:
            self._faults.append(f"{self._calls} calls were answered, {recorded} are in SQL")
        if lasting(self._samples):
            self._faults += memory_not_flat(self._samples, self._most_growth)
            self._faults += files_not_flat(self._samples, self._connections)
        else:
            self._faults.append("it was over before the proxy was looked at often enough")
        answered = ", ".join(f"{count} {kind}" for kind, count in self._answered.items())
        title = f"{answered} in {self._took_s:.0f} s; proxy.kept_calls = {self._calls_in_memory}"
        table = Table("time", "requests/s", "memory, least", "median", "most", "open files", "unwritten", title=title)
        for tenth in range(10):
            of_it = [one for one in self._samples if int(min(one.at, 0.999) * 10) == tenth]
            if not of_it:
                continue
            sizes = [one.rss_bytes for one in of_it]
            rate = (of_it[-1].answered - of_it[0].answered) / max(1e-9, of_it[-1].seconds - of_it[0].seconds)
            files = f"{min(one.files.total() for one in of_it)} to {max(one.files.total() for one in of_it)}"
            share = f"{10 * tenth} to {10 * tenth + 10} %"
            size_cells = (mib(size) for size in (min(sizes), statistics.median(sizes), max(sizes)))
            table.add_row(share, f"{rate:.0f}", *size_cells, files, str(max(one.unwritten for one in of_it)))
        console.print(table)
        return verdict(self._faults, console)
