"""Check that the proxy is steady: small requests at a fixed rate for minutes, with flat memory and open files.

The other form of `soak` (`--minutes`): nothing fails, an instant model server answers, apps keep their connections.
Samples the proxy's process each second. The first fifth of the time is for memory that fills up to a bound: the calls
that the proxy remembers to recognize their continuations (`proxy.kept_calls`, which is chosen so that it is full by
then; its default where the run is long enough).
"""

import asyncio
import functools
import json
import operator
import sqlite3
import statistics
import time
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httptools
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from benchmarks.fakes.instant_vllm import Instant
from benchmarks.fakes.wire import CHAT
from benchmarks.kit.check import verdict
from benchmarks.kit.harness import present
from benchmarks.kit.process import CONTROL_CONNECTIONS, POOLED, WHEN_QUIET, mib, running_broker, too_many, unhandled
from benchmarks.soak.proxy_under_load import ProxyUnderLoad, Sample
from whetstone.config.proxy import ProxySettings

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

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport

    async def ask(self, path: str, body: bytes, headers: str = "") -> tuple[int, bytes]:
        """Return status and body of the answer.

        Raises:
            ConnectionError: the connection ended before it.
            TimeoutError: it did not come.
        """
        self._parser = httptools.HttpResponseParser(self)
        self._body, self._answered = b"", asyncio.get_running_loop().create_future()
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


class Steady(ProxyUnderLoad):
    """One run: `go`, then `report`."""

    def __init__(self, minutes: float, rate: float, connections: int, most_growth: float, data: Path) -> None:
        super().__init__(data, int(minutes * 60 * rate))
        self._rate, self._connections, self._most_growth = rate, connections, most_growth
        self._calls_in_memory = max(1000, min(CALLS_IN_MEMORY, int(self.count * WARM * 0.7)))
        self._answered: Counter[str] = Counter()
        self._calls = 0

    async def go(self, console: Console) -> None:
        """Start, send requests at the rate, wait until all is written, stop."""
        model = Instant(("soak@v0",))
        with running_broker() as broker:
            given = {"broker": broker, "proxy__kept_calls": self._calls_in_memory, "log__level": "warning"}
            async with self.running(await model.start(), **given):
                await self._drive(console)
                await self.drain()
                self.before = [*lasting(self.samples), self.samples[-1].files][0]
        model.stop()

    async def _drive(self, console: Console) -> None:
        address, loop = urlsplit(self.url), asyncio.get_running_loop()
        self.began = time.perf_counter()

        async def app(place: int) -> None:
            transport, connection = await loop.create_connection(_App, address.hostname, address.port)
            with closing(transport):
                trajectory_id = ""
                # All at once: the proxy then has all the connections to the model server that it will need.
                await connection.ask(EMBEDDINGS, json.dumps({"model": "soak", "input": "soak"}).encode())
                for number in range(place, self.count, self._connections):
                    await asyncio.sleep(self.began + number / self._rate - time.perf_counter())
                    if self.faults:
                        return
                    trajectory_id = await self._ask(connection, number, trajectory_id)

        async def watch() -> None:
            columns = TextColumn("soak"), BarColumn(), TimeRemainingColumn(), TextColumn("{task.description}")
            with Progress(*columns, console=console) as progress:
                task = progress.add_task("", total=self.count)
                while True:
                    now = await self.look(self._answered.total())
                    line = f"{now.answered} answered, {now.unwritten} unwritten, {mib(now.rss_bytes)}"
                    progress.update(task, completed=now.answered, description=f"{line}, {now.files.total()} files")
                    await asyncio.sleep(1)

        watching = asyncio.ensure_future(watch())
        try:
            await asyncio.gather(*(app(place) for place in range(self._connections)))
        finally:
            watching.cancel()
        self._took_s = time.perf_counter() - self.began

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
            self.faults.append(f"request {number}: {type(error).__name__}: {error}")
            return trajectory_id
        self._answered[kind] += 1
        if status != due:
            self.faults.append(f"request {number}: {due} was due, came {status}: {body[:300]!r}")
        return trajectory_id

    def report(self, console: Console) -> int:
        """Print the result; return the exit code."""
        with closing(sqlite3.connect(self.data / "whetstone.db")) as database:
            (recorded,) = database.execute("SELECT count(DISTINCT call_id) FROM completions").fetchone()
        self.faults += [
            *present({f"the proxy stopped with {self.exit_code}": self.exit_code != 0}),
            *unhandled(self.log()),
            *present({f"{self._calls} calls were answered, {recorded} are in SQL": recorded != self._calls}),
        ]
        if lasting(self.samples):
            self.faults += memory_not_flat(self.samples, self._most_growth)
            self.faults += files_not_flat(self.samples, self._connections)
        else:
            self.faults.append("it was over before the proxy was looked at often enough")
        answered = ", ".join(f"{count} {kind}" for kind, count in self._answered.items())
        title = f"{answered} in {self._took_s:.0f} s; proxy.kept_calls = {self._calls_in_memory}"
        table = Table("time", "requests/s", "memory, least", "median", "most", "open files", "unwritten", title=title)
        for tenth in range(10):
            of_it = [one for one in self.samples if int(min(one.at, 0.999) * 10) == tenth]
            if not of_it:
                continue
            sizes = [one.rss_bytes for one in of_it]
            rate = (of_it[-1].answered - of_it[0].answered) / max(1e-9, of_it[-1].seconds - of_it[0].seconds)
            files = f"{min(one.files.total() for one in of_it)} to {max(one.files.total() for one in of_it)}"
            share = f"{10 * tenth} to {10 * tenth + 10} %"
            size_cells = (mib(size) for size in (min(sizes), statistics.median(sizes), max(sizes)))
            table.add_row(share, f"{rate:.0f}", *size_cells, files, str(max(one.unwritten for one in of_it)))
        console.print(table)
        return verdict(self.faults, console)
