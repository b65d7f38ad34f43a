"""Measure what the proxy costs: the same requests to the upstream alone, the proxy and peers, in turns.

Prints rates, latencies, CPU and memory, their ratios, and whether the bars hold. Exits 1 if a bar is missed, an answer
was wrong, a connection was not reused, SQL has other rows than were requested, or (`--check`) a ratio is worse than the
baseline's. `--short` is too short for the bars: it checks none of them.
"""

import argparse
import asyncio
import itertools
import json
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import uvloop
from rich.console import Console
from rich.progress import Progress, TextColumn

from benchmarks.bench import report, start
from benchmarks.bench.figures import PACED_S, Figures, Measurement, as_json, bars, worse
from benchmarks.bench.host import Host
from benchmarks.bench.load import OPEN_CONNECTIONS, LoadResult, closed_loop, merged, open_loop, silent_streams
from benchmarks.bench.sides import DIRECT, SQL_OFF, Side, on_cores
from benchmarks.kit.process import ROOT, until

BASELINE = ROOT / "benchmarks" / "bench_baseline.json"
RATE = 1000.0
"""Requests per second of the open loop."""
SILENT_STREAMS = 2000
"""Silent streams at once."""
HOLD_S, QUIET_S = 2.0, 30.0
WARM_S = 0.5
"""How long each side gets requests before anything is measured."""


@dataclass(frozen=True)
class Measure:
    """A way of sending requests."""

    kind: str
    connections: int
    """Connections at once; 0: a fixed rate instead."""
    spread_s: float = 0.0
    """Connections start within this time."""
    of_all: bool = False
    """Measure every form of the proxy, not only the one with everything on."""


MEASURES = {
    "plain 1": Measure("plain", 1),
    "plain 16": Measure("plain", 16, of_all=True),
    "plain 64": Measure("plain", 64),
    "stream 1": Measure("stream", 1),
    "stream 16": Measure("stream", 16, of_all=True),
    "stream 64": Measure("stream", 64),
    "large 16": Measure("large", 16, of_all=True),
    "open": Measure("plain", 0, of_all=True),
    "first": Measure("first", 1),
    "paced 128": Measure("paced", 128, PACED_S),
    "paced 400": Measure("paced", 400, PACED_S),
}
BOTH_WORKERS = "plain 64"
"""The measurement that also uses two workers."""
SHORT = ("plain 16", "stream 16", "large 16", "open", "paced 128")


class Bench:
    """One run over all sides, the upstream first."""

    def __init__(self, sides: list[Side], seconds: float, silent_streams: int, tries: int) -> None:
        self._sides, self._seconds, self._silent_streams = sides, seconds, silent_streams
        self._upstream = sides[0].target.url
        self.figures, self.host = Figures(), Host(tries)
        self.faults: list[str] = []
        self.notes: list[str] = []
        """Faults of peers."""
        self._sent: Counter[str] = Counter()

    async def go(self, names: list[str], rounds: int, progress: Callable[[str], None]) -> None:
        """Measure all sides, in turns; hold silent streams; count the rows."""
        for side in self._sides:
            with side.awake():
                progress(f"{side.name}, first requests")
                for kind in ("plain", "stream"):
                    self._note(side, f"first {kind}", await self._closed(side, Measure(kind, 4), WARM_S))
        for _, name, side in itertools.product(range(rounds), names, self._sides):
            if _concerns(name, side):
                progress(f"{name}, {side.name}")
                with side.awake():
                    measurement = await self.host.calmest(name, partial(self._measure, side, name))
                self.figures.add(name, side.name, measurement)
        for side in self._sides[1:]:
            self.figures.highest_rss[side.name] = side.memory_bytes("VmHWM")
            if self._silent_streams and _concerns(None, side):
                progress(f"{self._silent_streams} silent streams, {side.name}")
                with side.awake():
                    await self._hold(side)
        for side in self._sides:
            if side.settings is not None:
                progress(f"rows of {side.name}")
                with side.awake():
                    await self._count(side)

    async def _closed(self, side: Side, measure: Measure, seconds: float) -> LoadResult:
        each = max(1, measure.connections // len(side.targets))
        loads = (closed_loop(one, measure.kind, each, seconds, measure.spread_s) for one in side.targets)
        return merged(await asyncio.gather(*loads))

    async def _measure(self, side: Side, name: str) -> Measurement:
        measure, before = MEASURES[name], start.tally(self._upstream)
        began_cpu_s = side.cpu_s()
        with side.database_blocked():
            busy = asyncio.ensure_future(self._busy(side, measure.spread_s))
            if measure.connections:
                took = await self._closed(side, measure, self._seconds)
            else:
                took = await open_loop(side.target, measure.kind, RATE, self._seconds)
            share, rss, in_journal_cpu_s = await busy, side.memory_bytes(), side.cpu_s()
        written_s = side.wait_written() if side.settings is not None else 0.0
        cpu_s = (in_journal_cpu_s if side.form == SQL_OFF else side.cpu_s()) - began_cpu_s
        after = start.tally(self._upstream)
        opened = after["accepted"] - before["accepted"] - 1  # the connection that reads the tally
        self._note(side, name, took)
        if _ours(side):
            most, came = 2 * (measure.connections or OPEN_CONNECTIONS) + 16, after["requests"] - before["requests"]
            if opened > most:
                self.faults.append(f"{side.name}, {name}: {opened} connections upstream, {most} may be")
            if came != took.sent:
                self.faults.append(f"{side.name}, {name}: {took.sent} requests, {came} came to the upstream")
        return Measurement(took, cpu_s, share, rss, opened, written_s)

    async def _busy(self, side: Side, after_s: float) -> float:
        """Return its share of the core, once all connections have started."""
        await asyncio.sleep(after_s)
        began_s, cpu_s = time.perf_counter(), side.cpu_s()
        await asyncio.sleep(self._seconds * 0.95)
        return (side.cpu_s() - cpu_s) / (time.perf_counter() - began_s) / side.cores

    def _note(self, side: Side, what: str, took: LoadResult) -> None:
        self._sent[side.name] += took.sent
        own = _ours(side)
        lines = self.faults if own else self.notes
        lines += [f"{side.name}, {what}: {fault}" for fault in took.faults[:3]]
        if own and took.lost:
            lines.append(f"{side.name}, {what}: {took.lost} requests were not answered in time")

    async def _hold(self, side: Side) -> None:
        before = side.memory_bytes()
        async with silent_streams(side.target, self._silent_streams) as took:
            await asyncio.sleep(HOLD_S)
            # Streams that broke off meanwhile are faults.
            begun = self._silent_streams - took.lost
            self.figures.silent_streams[side.name] = (begun, (side.memory_bytes() - before) / max(1, begun))
            self._note(side, "silent streams", took)

        async def left() -> bool:
            return start.tally(self._upstream)["open_streams"] == 0

        if not await until(left, QUIET_S) and side.form is not None:
            self.faults.append(f"{side.name}: streams continue upstream without a client")

    async def _count(self, side: Side) -> None:
        """Check that SQL has every request, each once."""
        sent = self._sent[side.name]

        async def right() -> bool:
            return side.rows() == (sent, sent)

        if not await until(right, QUIET_S):
            rows, calls = side.rows()
            self.faults.append(f"{side.name}: {sent} requests, SQL has {rows} rows of {calls} calls")


def _ours(side: Side) -> bool:
    """Return whether its errors are faults; a peer's are only notes."""
    return side.form is not None or side.name == DIRECT


def _concerns(name: str | None, side: Side) -> bool:
    """Return whether a measurement (None: the silent streams) is made of a side."""
    if len(side.targets) > 1:
        return name == BOTH_WORKERS
    return side.form in (None, "whetstone") or (name is not None and MEASURES[name].of_all)


def main() -> int:
    """Run the benchmark."""
    args = _arguments()
    console = Console(width=160)
    cores = sorted(os.sched_getaffinity(0))
    own = [{core} for core in cores[: 2 if len(cores) > 3 else 1]]
    load = set(cores) - set().union(*own) or set(cores)
    console.print(report.where(own, load), highlight=False)
    binaries = {"nginx": args.nginx, "litellm": args.litellm, "rllm": args.rllm}
    peers = {name: replace(start.PEERS[name], binary=binary) for name, binary in binaries.items() if binary}
    peers |= {name: start.Peer(command) for name, command in (one.split("=", 1) for one in args.peer)}
    with (
        tempfile.TemporaryDirectory(prefix="bench-") as temporary,
        on_cores(load),
        start.started(args.forms, peers, Path(temporary), own) as sides,
        Progress(TextColumn("{task.description}"), console=console, transient=True, auto_refresh=False) as progress,
    ):
        bench = Bench(sides, args.seconds, args.silent_streams, args.tries)
        names = [name for name in MEASURES if name in args.only]
        task = progress.add_task("starts")
        uvloop.run(bench.go(names, args.rounds, lambda text: progress.update(task, description=text, refresh=True)))
    judged = [] if args.short else bars(bench.figures)
    report.show(console, bench.figures, judged, bench.host.notes() + bench.notes)
    if args.json:
        machine = {"cores": len(cores), "side": [*map(list, own)], "load": sorted(load), "seconds": args.seconds}
        machine["stolen"] = bench.host.shares()
        args.json.write_text(json.dumps(as_json(bench.figures, machine), indent=1) + "\n")
    faults = bench.faults
    if args.check:
        faults += worse(bench.figures.ratios(), json.loads(args.baseline.read_text())["ratios"])
    for fault in faults[:30]:
        console.print(f"FAULT {fault}", markup=False, highlight=False)
    holds, line = report.verdict(faults, judged)
    console.print(line, markup=False, highlight=False, soft_wrap=True)
    return 0 if holds else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement of each side in each round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tries", type=int, default=3, help="of each, at most, where the machine's host takes cores")
    parser.add_argument("--only", help=f"measurements, by comma: {', '.join(MEASURES)}")
    parser.add_argument("--forms", help=f"of the proxy, by comma: {', '.join(start.FORMS)}")
    parser.add_argument(
        "--held", dest="silent_streams", type=int, metavar="N", default=SILENT_STREAMS, help="silent streams; 0: none"
    )
    parser.add_argument("--nginx", default=shutil.which("nginx"), help="its binary; without it the one on PATH")
    parser.add_argument("--litellm", help="its binary, of an environment with litellm[proxy]")
    parser.add_argument("--rllm", help="rLLM's, of an environment with rllm-model-gateway")
    parser.add_argument(
        "--peer", action="append", default=[], metavar="NAME=COMMAND", help="another proxy; {port}, {upstream}"
    )
    parser.add_argument("--json", type=Path, help="a file for all figures")
    parser.add_argument("--baseline", type=Path, default=BASELINE, help="figures of an earlier run")
    parser.add_argument("--check", action="store_true", help="compare the ratios with the baseline's")
    parser.add_argument("--short", action="store_true", help="seconds: the proxy and the upstream alone, once each")
    args = parser.parse_args()
    if args.short:
        args.seconds, args.rounds, args.tries, args.silent_streams = 0.5, 1, 1, 200
        args.nginx = args.litellm = args.rllm = None
    args.only = _names(args.only, SHORT if args.short else tuple(MEASURES), tuple(MEASURES), parser)
    forms = tuple(start.FORMS)
    args.forms = _names(args.forms, forms[:1] if args.short else forms, forms, parser)
    return args


def _names(
    given: str | None, usual: tuple[str, ...], known: tuple[str, ...], parser: argparse.ArgumentParser
) -> list[str]:
    names = list(usual) if given is None else [name.strip() for name in given.split(",")]
    if strangers := [name for name in names if name not in known]:
        parser.error(f"{strangers[0]!r} is unknown; there are: {', '.join(known)}")
    return names


if __name__ == "__main__":
    sys.exit(main())
