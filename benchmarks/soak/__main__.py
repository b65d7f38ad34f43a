"""Soak the proxy: many requests at once, apps that hang up, a model server that fails, and no record missing.

Starts the server of `benchmarks.fakes.vllm` and a proxy of its own with SQLite, sends requests as apps do, waits until
everything is written, and compares three ledgers: what the model server did, what the apps saw, what SQL has. Watches
memory, files and log meanwhile. Exit 0 only if everything holds. Loopback only; Linux, for /proc.
"""

import argparse
import asyncio
import statistics
import sys
import time
from collections import Counter
from pathlib import Path

import aiohttp
import uvloop
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from benchmarks.fakes.vllm import Arrival, Faulty
from benchmarks.kit.check import counted, figures_table, verdict
from benchmarks.kit.harness import opened
from benchmarks.kit.options import parser_of
from benchmarks.kit.process import mib, unhandled
from benchmarks.soak.apps import DIALECTS, ReceivedAnswer, ask, ask_of, wrong_with
from benchmarks.soak.proxy_under_load import ProxyUnderLoad, Sample
from benchmarks.soak.records import Record, records_of, wrong_with_records
from benchmarks.soak.steady import MOST_GROWTH, RATE, Steady

SILENCE_S = 5.0
"""Setting `proxy.upstream_timeout_s` of the run."""
SAMPLES = 200
"""Number of samples of the proxy's process during the load."""
MOST_GROWTH_BYTES = 6 * 2**20
"""Largest growth between the medians of the third and of the last quarter."""
STATUSES = ("complete", "aborted", "error", "none")
"""Statuses of a request's record; none: it has no record."""


def flat(samples: list[Sample]) -> tuple[float, float, bool]:
    """Return median bytes of memory in the third and the last quarter of the requests, and whether that is flat."""
    last = max(sample.answered for sample in samples)
    sizes = [(min(3, 4 * sample.answered // max(last, 1)), sample.rss_bytes) for sample in samples]
    third, fourth = (statistics.median(size for place, size in sizes if place == quarter) for quarter in (2, 3))
    return third, fourth, fourth - third < MOST_GROWTH_BYTES


class Run(ProxyUnderLoad):
    """One run: `go`, then `report`."""

    def __init__(self, args: argparse.Namespace, data: Path) -> None:
        super().__init__(data, args.requests)
        paths = [DIALECTS[name] for name in args.paths.split(",")]
        self._asks = [ask_of(args.seed, number, paths) for number in range(args.requests)]
        self._args, self._model = args, Faulty(args.seed)
        self._seen: list[ReceivedAnswer] = []

    async def go(self, console: Console) -> None:
        """Start, send at most `--rate` requests per second, wait until all is written, stop."""
        # There is no broker: hints are lost, which does not matter here.
        given = {"broker": "redis://127.0.0.1:1/0", "proxy__upstream_timeout_s": SILENCE_S}
        async with self.running(await self._model.start(), **given):
            self.before = (await self.look(0)).files
            self.began = time.perf_counter()
            await self._drive(console)
            self._took_s = time.perf_counter() - self.began
            await self.drain()
            self._drained_s = time.perf_counter() - self.began - self._took_s
            await self.look(len(self._seen))
        self._model.stop()

    async def _drive(self, console: Console) -> None:
        """Send everything, at most `--connections` at once, and sample the proxy meanwhile."""
        connections, rate, seconds = self._args.connections, self._args.rate or float("inf"), self._args.seconds
        asks = iter(self._asks)
        columns = TextColumn("soak"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        with Progress(*columns, TextColumn("{task.description}"), console=console) as progress:
            task = progress.add_task("", total=self.count)

            async def app(session: aiohttp.ClientSession) -> None:
                for planned in asks:
                    await asyncio.sleep(self.began + planned.number / rate - time.perf_counter())
                    if time.perf_counter() > self.began + seconds:
                        self.faults.append(f"request {planned.number} was not sent within {seconds:g} s")
                        return
                    seen = await ask(session, self.url, planned)
                    if fault := wrong_with(seen):
                        self.faults.append(f"request {planned.number} ({planned.plan.fate}): {fault}")
                    self._seen.append(seen)
                    if len(self._seen) % max(1, self.count // SAMPLES) == 0:
                        now = await self.look(len(self._seen))
                        text = f"{mib(now.rss_bytes)}, {now.unwritten} unwritten, {len(self.faults)} faults"
                        progress.update(task, completed=len(self._seen), description=text)

            async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=connections)) as session:
                await asyncio.gather(*(app(session) for _ in range(connections)))

    def report(self, console: Console) -> int:
        """Print the result; return the exit code."""
        fates = self._check_records()
        log = self.log()
        self.faults += unhandled(log)
        third, fourth, is_flat = flat(self.samples)
        if not is_flat:
            self.faults.append(f"memory grows: {mib(third)} in the third quarter, {mib(fourth)} in the last")
        left_behind = sorted(path.name for path in (self.data / "journal").iterdir())
        if self.exit_code != 0 or left_behind:
            self.faults.append(f"the proxy stopped with {self.exit_code} and left in the journal: {left_behind}")
        saw = Counter("left" if seen.left else "broke off" if seen.broken else seen.status for seen in self._seen)
        errors = Counter(line.partition("ERROR")[2].strip(" :")[:70] for line in log.splitlines() if "ERROR" in line)
        eighths = {8 * sample.answered // len(self._seen): sample.rss_bytes for sample in self.samples}
        curve = ", ".join(map(mib, eighths.values()))
        figures = {
            "requests": f"{len(self._seen)} in {self._took_s:.0f} s, {len(self._seen) / self._took_s:.0f}/s",
            "apps saw": counted(saw),
            "paths": counted(Counter(seen.ask.dialect.path for seen in self._seen)),
            "errors in the log": counted(Counter(dict(errors.most_common(5)))),
            "memory": f"{mib(self.samples[0].rss_bytes)} at the start, then by eighths {curve}; "
            f"median of the third quarter {mib(third)}, of the last {mib(fourth)}",
            "records not yet in SQL": f"at most {max(sample.unwritten for sample in self.samples)}, "
            f"the last one {self._drained_s:.1f} s after the last request",
            "open files": f"{self.samples[0].files.total()} before, at most "
            f"{max(sample.files.total() for sample in self.samples)}, after: {counted(self.left_open)}",
        }
        console.print(fates, figures_table(figures))
        return verdict(self.faults, console)

    def _check_records(self) -> Table:
        """Compare the ledgers, request by request; return a table of what both servers did."""
        arrivals: dict[int, list[Arrival]] = {}
        for arrival in self._model.arrivals:
            arrivals.setdefault(arrival.plan.number, []).append(arrival)
        records: dict[int, list[Record]] = {}
        for record in records_of(self.data / "whetstone.db"):
            records.setdefault(record.number, []).append(record)
        counts: dict[str, Counter[str]] = {}
        for seen in self._seen:
            number, plan = seen.ask.number, seen.ask.plan
            came, recorded = arrivals.get(number, []), records.pop(number, [])
            if fault := wrong_with_records(seen, came, recorded):
                self.faults.append(f"request {number} ({plan.fate}, {seen.ask.leaves or 'stays'}): {fault}")
            kind = str(plan.fate) if came else "refused" if seen.ask.refused else "never came"
            counts.setdefault(kind, Counter()).update(record.status for record in recorded)
            counts[kind]["none"] += not recorded
        self.faults += [f"records of request {number}, which no app sent" for number in records]
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
    parser = parser_of(
        __doc__.splitlines()[0],
        {
            "--minutes": {"type": float, "help": "the other form: nothing goes wrong, and memory stays flat"},
            "--growth": {"type": float, "default": MOST_GROWTH, "help": "of memory, with --minutes"},
            "--requests": {"type": int, "default": 10_000},
            "--connections": {"type": int, "default": 64},
            "--rate": {"type": float, "help": "at most so many requests a second"},
            "--seed": {"type": int, "default": 1, "help": "decides every fault and every app that hangs up"},
            "--seconds": {"type": float, "default": 600, "help": "at most, for the requests"},
            "--paths": {"default": ",".join(DIALECTS), "help": f"some of {','.join(DIALECTS)}"},
            "--data": {"type": Path, "help": "a new folder to keep database and log in"},
        },
    )
    args = parser.parse_args()
    if unknown := set(args.paths.split(",")) - set(DIALECTS):
        parser.error(f"no such path: {', '.join(sorted(unknown))}; there are {', '.join(DIALECTS)}")
    if args.data:
        args.data.mkdir(parents=True)
    with opened("soak", args.data) as (data, console):
        if args.minutes:
            run: Steady | Run = Steady(args.minutes, args.rate or RATE, args.connections, args.growth, data)
            uvloop.run(run.go(console))
        else:
            run = Run(args, data)
            asyncio.run(run.go(console))
        return run.report(console)


if __name__ == "__main__":
    sys.exit(main())
