"""Measure what the dashboard's live page costs the proxy, and whether it shows what comes.

Requests/s over 16 connections, in turns without anybody at `/ui/live` and with browsers there that poll as
`static/follow.js` does. Then requests at a steady rate, and one browser: each call must be counted once, and
as many are listed as fit. Exits 1 if the proxy loses more than 3 % of its requests/s, a call is counted twice or not at
all, or a page takes 300 ms.
"""

import argparse
import asyncio
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import uvloop
from rich.console import Console

from benchmarks.bench import report, start
from benchmarks.bench.load import closed_loop, open_loop
from benchmarks.bench.sides import Side, on_cores
from benchmarks.kit.check import figures_table, verdict
from benchmarks.kit.process import running_broker

MOST_LOST = 0.03
"""Most that the proxy may lose of its requests/s."""
MOST_MS = 300.0
"""Most server time of the page."""
EVERY_S = 2.0
"""As in `static/follow.js`."""
CONNECTIONS = 16
_CALL, _CURSOR = re.compile(r'data-call="([^"]+)"'), re.compile(r'data-follow="(\d+)" data-ended="(\d+)"')
_TOTAL = re.compile(r"total;dur=([0-9.]+)")


@dataclass
class Browser:
    """A visitor of the live page."""

    shown: set[str] = field(default_factory=set)
    counted: int = 0
    """Calls that ended, listed or not."""
    took_ms: list[float] = field(default_factory=list)
    """Server time of each look, but the first: that loads the whole page."""
    faults: list[str] = field(default_factory=list)
    _after: str | None = None

    async def look(self, session: aiohttp.ClientSession) -> None:
        """Request the page once, with what came since the last time."""
        parameters = {} if self._after is None else {"after": self._after}
        async with session.get("/ui/live", params=parameters) as response:
            page = await response.text()
        cursor = _CURSOR.search(page)
        if response.status != 200 or cursor is None:
            self.faults.append(f"/ui/live: {response.status} {page[:200]}")
            return
        if self._after is not None:
            self.shown |= set(_CALL.findall(page))
            self.counted += int(cursor[2])
            if match := _TOTAL.search(response.headers.get("server-timing", "")):
                self.took_ms.append(float(match[1]))
        self._after = cursor[1]

    async def watch(self, session: aiohttp.ClientSession) -> None:
        """Look again and again, until cancelled."""
        while True:
            await asyncio.sleep(EVERY_S)
            await self.look(session)


@asynccontextmanager
async def watching(side: Side, count: int) -> AsyncIterator[list[Browser]]:
    """Run browsers on the live page, which have loaded it once."""
    browsers = [Browser() for _ in range(count)]
    headers = {"authorization": f"Bearer {start.KEY}"}
    async with aiohttp.ClientSession(side.target.url, headers=headers) as session:
        for browser in browsers:
            await browser.look(session)
        tasks = [asyncio.create_task(browser.watch(session)) for browser in browsers]
        try:
            yield browsers
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def rates(
    side: Side, rounds: int, seconds: float, count: int
) -> tuple[list[tuple[float, float]], list[Browser], list[str]]:
    """Return the requests/s without and with browsers, round by round; the browsers; and what was wrong."""
    pairs, looked, faults = [], [], []
    for place in range(-1, rounds):  # the first is to warm up
        measured: dict[int, float] = {}
        for browsers in (0, count) if place % 2 else (count, 0):
            async with watching(side, browsers) as own:
                took = await closed_loop(side.target, "plain", CONNECTIONS, seconds)
            side.wait_written()
            measured[browsers] = len(took.ms) / took.seconds
            looked += own
            faults += took.faults
        if place >= 0:
            pairs.append((measured[0], measured[count]))
    return pairs, looked, faults


async def shown(side: Side, rate: float, seconds: float) -> tuple[int, Browser, list[str]]:
    """Send requests at a steady rate before one browser; return how many, the browser, and what was wrong."""
    await asyncio.sleep(EVERY_S)  # the first look begins a second before now
    async with watching(side, 1) as (browser,):
        took = await open_loop(side.target, "plain", rate, seconds)
        side.wait_written()
        await asyncio.sleep(2 * EVERY_S)
    return took.sent, browser, took.faults


def lost(pairs: Sequence[tuple[float, float]]) -> float:
    """Return the share of its requests/s that the proxy loses to browsers: the median over the rounds."""
    return 1 - statistics.median(watched / alone for alone, watched in pairs)


def main() -> int:
    """Run the check."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=8.0, help="of each measurement")
    parser.add_argument("--browsers", type=int, default=1, help="at the live page at once")
    parser.add_argument("--rate", type=float, default=200.0, help="calls per second that are to be shown")
    parser.add_argument("--short", action="store_true", help="seconds: too short for the bar, which is not checked")
    args = parser.parse_args()
    if args.short:
        args.rounds, args.seconds = 1, 3.0
    console, cores = Console(width=120), sorted(os.sched_getaffinity(0))
    own, load = [{cores[0]}], set(cores[1:]) or set(cores)
    console.print(report.where(own, load), highlight=False)
    with (
        tempfile.TemporaryDirectory(prefix="watched-") as temporary,
        on_cores(load),
        running_broker() as broker,
        start.upstream() as direct,
        start.proxy("whetstone", direct.target.url, broker, Path(temporary) / "data", own) as side,
    ):
        began_s = time.perf_counter()
        pairs, looked, faults = uvloop.run(rates(side, args.rounds, args.seconds, args.browsers))
        sent, browser, of_steady = uvloop.run(shown(side, args.rate, max(args.seconds, 3 * EVERY_S)))
        took_s = time.perf_counter() - began_s
    faults += of_steady
    looked.append(browser)
    times = sorted(ms for one in looked for ms in one.took_ms)
    faults += [fault for one in looked for fault in one.faults]
    faults += [f"{sent} calls, {browser.counted} were counted"] if browser.counted != sent else []
    faults += [] if times else ["no browser looked twice"]
    if not args.short and lost(pairs) > MOST_LOST:
        faults.append(f"the proxy loses {lost(pairs):.1%} of its requests/s; {MOST_LOST:.0%} may be")
    if times and times[-1] > MOST_MS:
        faults.append(f"the page takes {times[-1]:.0f} ms")
    ratios = sorted(watched / alone for alone, watched in pairs)
    figures = {
        "requests/s without browsers": f"{statistics.median(alone for alone, _ in pairs):.0f}",
        f"with {args.browsers}": f"{statistics.median(watched for _, watched in pairs):.0f}",
        "ratio": f"{1 - lost(pairs):.3f}, {ratios[0]:.3f} to {ratios[-1]:.3f} in {len(pairs)} rounds",
        "a look": f"{statistics.median(times):.1f} ms, at most {times[-1]:.1f}, of {len(times)}" if times else "none",
        f"calls at {args.rate:g}/s": f"{sent} sent, {browser.counted} counted, {len(browser.shown)} of them listed",
        "took": f"{took_s:.0f} s",
    }
    console.print(figures_table(figures))
    return verdict(faults, console)


if __name__ == "__main__":
    sys.exit(main())
