"""Soak the proxy: many requests at once, apps that hang up, a model server that fails, and no record missing.

Starts the server of `benchmarks.fakes.vllm` and a proxy of its own with SQLite, sends requests as apps do, waits until
everything is written, and compares three ledgers: what the model server did, what the apps saw, what SQL has. Watches
memory, files and log meanwhile. Exit 0 only if everything holds. Loopback only; Linux, for /proc.
"""

import argparse
import asyncio
import contextlib
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import uvloop
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from benchmarks.fakes.vllm import Arrival, Faulty
from benchmarks.kit import proc
from benchmarks.kit.check import counted, data_folder, figures_table, verdict
from benchmarks.kit.process import (
    DRAIN_S,
    START_S,
    STOP_S,
    left_open,
    mib,
    open_files,
    ready,
    running_proxy,
    state,
    unhandled,
    until,
)
from benchmarks.soak.apps import DIALECTS, Ask, ReceivedAnswer, ask, ask_of, wrong_with
from benchmarks.soak.records import Record, records_of, wrong_with_records
from benchmarks.soak.steady import MOST_GROWTH, RATE, Steady
from migrations.run import upgrade
from whetstone.config.settings import load
from whetstone.database.engine import connect
from whetstone.registry.projects import Store

SILENCE_S = 5.0
"""Setting `proxy.upstream_timeout_s` of the run."""
SAMPLES = 200
"""Number of samples of the proxy's process during the load."""
MOST_GROWTH_BYTES = 6 * 2**20
"""Largest growth between the medians of the third and of the last quarter."""
STATUSES = ("complete", "aborted", "error", "none")
"""Statuses of a request's record; none: it has no record."""


@dataclass(frozen=True)
class Sample:
    """The proxy's process at one moment."""

    answered: int
    rss_bytes: int
    files: Counter[str]
    """Open files, by kind."""
    unwritten: int
    """Calls that SQL does not have yet."""


def flat(samples: list[Sample]) -> tuple[float, float, bool]:
    """Return median bytes of memory in the third and the last quarter of the requests, and whether that is flat."""
    last = max(sample.answered for sample in samples)
    quarters: dict[int, list[int]] = {}
    for sample in samples:
        quarters.setdefault(min(3, 4 * sample.answered // max(last, 1)), []).append(sample.rss_bytes)
    third, fourth = (statistics.median(quarters[quarter]) for quarter in (2, 3))
    return third, fourth, fourth - third < MOST_GROWTH_BYTES


class Run:
    """One run: `go`, then `report`."""

    def __init__(self, asks: list[Ask], seed: int, data: Path) -> None:
        self._asks, self._data, self._log = asks, data, data / "proxy.log"
        self._model = Faulty(seed)
        self._seen: list[ReceivedAnswer] = []
        self._samples: list[Sample] = []
        self._faults: list[str] = []

    async def go(self, connections: int, rate: float, seconds: float, console: Console) -> None:
        """Start, send at most `rate` requests per second, wait until all is written, stop."""
        settings = load(
            environment={},
            data=self._data,
            policy="soak",
            # There is no broker: hints are lost, which does not matter here.
            broker="redis://127.0.0.1:1/0",
            vllm__urls=(model_server := await self._model.start(),),
            proxy__upstream_timeout_s=SILENCE_S,
        )
        upgrade(settings.database_url)
        Store(connect(settings.database_url)).prepare(settings)
        with running_proxy(settings, self._log) as (url, process):
            async with aiohttp.ClientSession() as control:

                async def look() -> Sample:
                    unwritten = (await state(control, url)).get("unwritten", 0)
                    files = open_files(process.pid, url, [model_server])
                    self._samples.append(Sample(len(self._seen), proc.memory_bytes(process.pid), files, unwritten))
                    return self._samples[-1]

                if not await until(lambda: ready(control, url), START_S):
                    sys.exit(f"the proxy did not start:\n{self._log.read_text()}")
                await look()
                began = time.perf_counter()
                await self._drive(url, look, connections, rate, seconds, console)
                self._took_s = time.perf_counter() - began
                if not await until(lambda: ready(control, url, unwritten=0), DRAIN_S):
                    self._faults.append(f"records are still unwritten after {DRAIN_S:g} s")
                self._drained_s = time.perf_counter() - began - self._took_s
                await look()
            before = self._samples[0].files
            self._left_open, faults = await left_open(process.pid, url, [model_server], before)
            self._faults += faults
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(process.wait, STOP_S)
            self._exit = process.returncode
        self._model.stop()

    async def _drive(
        self,
        url: str,
        look: Callable[[], Awaitable[Sample]],
        connections: int,
        rate: float,
        seconds: float,
        console: Console,
    ) -> None:
        """Send everything, at most `connections` at once, and sample the proxy meanwhile."""
        asks = iter(self._asks)
        every = max(1, len(self._asks) // SAMPLES)
        began = time.perf_counter()
        columns = TextColumn("soak"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        with Progress(*columns, TextColumn("{task.description}"), console=console) as progress:
            task = progress.add_task("", total=len(self._asks))

            async def app(session: aiohttp.ClientSession) -> None:
                for planned in asks:
                    await asyncio.sleep(began + planned.number / rate - time.perf_counter())
                    if time.perf_counter() > began + seconds:
                        self._faults.append(f"request {planned.number} was not sent within {seconds:g} s")
                        return
                    seen = await ask(session, url, planned)
                    if fault := wrong_with(seen):
                        self._faults.append(f"request {planned.number} ({planned.plan.fate}): {fault}")
                    self._seen.append(seen)
                    if len(self._seen) % every == 0:
                        now = await look()
                        text = f"{mib(now.rss_bytes)}, {now.unwritten} unwritten, {len(self._faults)} faults"
                        progress.update(task, completed=len(self._seen), description=text)

            async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=connections)) as session:
                await asyncio.gather(*(app(session) for _ in range(connections)))

    def report(self, console: Console) -> int:
        """Print the result; return the exit code."""
        fates = self._check_records()
        log = self._log.read_text(encoding="utf-8", errors="replace")
        self._faults += unhandled(log)
        third, fourth, is_flat = flat(self._samples)
        if not is_flat:
            self._faults.append(f"memory grows: {mib(third)} in the third quarter, {mib(fourth)} in the last")
        left_behind = sorted(path.name for path in (self._data / "journal").iterdir())
        if self._exit != 0 or left_behind:
            self._faults.append(f"the proxy stopped with {self._exit} and left in the journal: {left_behind}")
        saw = Counter("left" if seen.left else "broke off" if seen.broken else seen.status for seen in self._seen)
        errors = Counter(line.partition("ERROR")[2].strip(" :")[:70] for line in log.splitlines() if "ERROR" in line)
        figures = {
            "requests": f"{len(self._seen)} in {self._took_s:.0f} s, {len(self._seen) / self._took_s:.0f}/s",
            "apps saw": counted(saw),
            "paths": counted(Counter(seen.ask.dialect.path for seen in self._seen)),
            "errors in the log": counted(Counter(dict(errors.most_common(5)))),
            "memory": f"{mib(self._samples[0].rss_bytes)} at the start, then by eighths {self._curve()}; "
            f"median of the third quarter {mib(third)}, of the last {mib(fourth)}",
            "records not yet in SQL": f"at most {max(sample.unwritten for sample in self._samples)}, "
            f"the last one {self._drained_s:.1f} s after the last request",
            "open files": f"{self._samples[0].files.total()} before, at most "
            f"{max(sample.files.total() for sample in self._samples)}, after: {counted(self._left_open)}",
        }
        console.print(fates, figures_table(figures))
        return verdict(self._faults, console)

    def _curve(self) -> str:
        eighths = {8 * sample.answered // len(self._seen): sample.rss_bytes for sample in self._samples}
        return ", ".join(mib(size) for size in eighths.values())

    def _check_records(self) -> Table:
        """Compare the ledgers, request by request; return a table of what both servers did."""
        arrivals: dict[int, list[Arrival]] = {}
        for arrival in self._model.arrivals:
            arrivals.setdefault(arrival.plan.number, []).append(arrival)
        records: dict[int, list[Record]] = {}
        for record in records_of(self._data / "whetstone.db"):
            records.setdefault(record.number, []).append(record)
        counts: dict[str, Counter[str]] = {}
        for seen in self._seen:
            number, plan = seen.ask.number, seen.ask.plan
            came, recorded = arrivals.get(number, []), records.pop(number, [])
            if fault := wrong_with_records(seen, came, recorded):
                self._faults.append(f"request {number} ({plan.fate}, {seen.ask.leaves or 'stays'}): {fault}")
            kind = str(plan.fate) if came else "refused" if seen.ask.refused else "never came"
            counts.setdefault(kind, Counter()).update(record.status for record in recorded)
            counts[kind]["none"] += not recorded
        self._faults += [f"records of request {number}, which no app sent" for number in records]
        table = Table(
            "the model server did", *STATUSES, "requests", title="requests, by fate and by status of the record"
        )
        for kind, statuses in sorted(counts.items(), key=lambda item: -item[1].total()):
            table.add_row(kind, *(str(statuses[status]) for status in STATUSES), str(statuses.total()))
        sums = [sum(statuses[status] for statuses in counts.values()) for status in STATUSES]
        table.add_row("together", *map(str, sums), str(sum(sums)), style="bold")
        return table


def main() -> int:
    """Run the soak."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, help="the other form: nothing goes wrong, and memory stays flat")
    parser.add_argument("--growth", type=float, default=MOST_GROWTH, help="of memory, with --minutes")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--connections", type=int, default=64)
    parser.add_argument("--rate", type=float, help="at most so many requests a second")
    parser.add_argument("--seed", type=int, default=1, help="decides every fault and every app that hangs up")
    parser.add_argument("--seconds", type=float, default=600, help="at most, for the requests")
    parser.add_argument("--paths", default=",".join(DIALECTS), help=f"some of {','.join(DIALECTS)}")
    parser.add_argument("--data", type=Path, help="a new folder to keep database and log in")
    args = parser.parse_args()
    paths = [DIALECTS[name] for name in args.paths.split(",")]
    asks = [ask_of(args.seed, number, paths) for number in range(args.requests)]
    console = Console(width=120)
    if args.data:
        args.data.mkdir(parents=True)
    with data_folder("soak", args.data) as data:
        if args.minutes:
            steady = Steady(args.minutes, args.rate or RATE, args.connections, args.growth, data)
            uvloop.run(steady.go(console))
            return steady.report(console)
        run = Run(asks, args.seed, data)
        asyncio.run(run.go(args.connections, args.rate or float("inf"), args.seconds, console))
        return run.report(console)


if __name__ == "__main__":
    sys.exit(main())
