"""Check that every dashboard page takes below 300 ms of server time on 1,000,000 completions, under load too.

Fills a database of its own, starts the proxy on it, and requests each page, in every form that its links lead to, and
the routes that apps and scripts read: first alone, then while 16 connections request completions. Exit 0 only if the
slowest hundredth of every page stays below 300 ms; a page fails only if it is slow three times in a row.
"""

import argparse
import asyncio
import random
import re
import secrets
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from html import unescape
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

import aiohttp
from rich.console import Console
from rich.table import Table
from sqlalchemy import Engine

from benchmarks.fakes.instant_vllm import Instant
from benchmarks.kit.check import data_folder, verdict
from benchmarks.kit.postgres import database_url
from benchmarks.kit.process import START_S, ready, running_broker, running_proxy, unhandled, until
from benchmarks.scale.__main__ import BLOCK_ROWS, filled
from benchmarks.scale.page_rows import add_history, dress, ids
from benchmarks.scale.rows import POLICY
from judge.maintenance.rollups import roll_up
from proxy.dashboard.pages.registry import PAGES
from whetstone.config.settings import BOOTSTRAP_VARIABLE, load

MOST_MS = 300.0
"""Most server time of a page."""
CONNECTIONS = 16
READS = (
    "/v1/trajectories/{trajectory_id}", "/v1/groups/{group_id}", "/v1/feedback/{feedback_id}", "/v1/reviews",
    "/metrics", "/admin/policies", "/admin/policies/{policy}/versions", "/admin/policies/{policy}/decisions",
    "/admin/keys",
)  # fmt: skip
"""Routes in addition to the pages; their time is the client's."""
FORMS = (
    "/ui/trajectories?task=nobody", "/ui/trajectories?policy=nobody", "/ui/trajectories?user=nobody",
    "/ui/trajectories?metadata=customer%3Dnobody", "/ui/trajectories?metadata=customer%3Dacme",
    "/ui/trajectories?version=3", "/ui/trajectories?from=2", "/ui/trajectories?until=2020-01-01",
    "/ui/trajectories?id=nobody", "/ui/trajectories?text=nobody+said+this", "/ui/trajectories?text=answer+3",
    "/ui/groups?policy=nobody", "/ui/groups?state=discarded", "/ui/feedback?source=judge", "/ui/feedback?state=failed",
    "/ui/funnel?window=all", "/ui/keys?window=all", "/ui/live?after=0", "/ui/live?task=nobody", "/ui/live?min=900",
    "/ui/live?policy=nobody&version=1&state=error&key=nobody", "/ui/live?after=0&task=nobody&min=900",
)  # fmt: skip
"""Form queries that no link makes: most of them match nothing, or old rows."""
SAMPLES = 8
"""Most addresses of a kind."""
AGAIN = 2
"""How often slow pages are requested again."""
DEPTH = 3
"""Number of links to follow from a page that no link leads to."""
ADD_UP_EVERY_S = 5.0
"""Interval of the roll-ups, as in the judging worker."""
KEY = f"pages-{secrets.token_hex(32)}"
"""An admin's API key."""
_LINK = re.compile(r'(?:href|hx-get|data-[a-z]+)="(/ui[^"#]*)"')
_TOTAL = re.compile(r"total;dur=([0-9.]+)")


@dataclass
class PageTimes:
    """The results of the requests."""

    took_ms: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """Times of all answers, by kind of address."""
    slowest: dict[str, tuple[float, str]] = field(default_factory=dict)
    """By kind, with its address."""
    faults: list[str] = field(default_factory=list)

    def note(self, kind: str, url: str, status: int, took_ms: float, body: str) -> None:
        """Record one answer."""
        if status == 200:
            self.took_ms[kind].append(took_ms)
            self.slowest[kind] = max(self.slowest.get(kind, (0.0, "")), (took_ms, url))
        else:
            self.faults.append(f"{url}: {status} {body[:200]}")

    def slow(self) -> dict[str, float]:
        """Return the kinds whose slowest hundredth takes too long, and how long."""
        slowest = {kind: percentile(took, 0.99) for kind, took in self.took_ms.items()}
        return {kind: took for kind, took in slowest.items() if took > MOST_MS}


def percentile(values: Iterable[float], share: float) -> float:
    """Return the value below which at most that share of them lies; of a few values the largest."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def kind_of(url: str, patterns: Mapping[str, re.Pattern[str]]) -> str | None:
    """Return the page's path with placeholders, and the names of its query; None if it is no page."""
    parts = urlsplit(url)
    names = sorted({name for name, value in parse_qsl(parts.query) if value})
    query = f"?{'&'.join(names)}" if names else ""
    return next((path + query for path, pattern in patterns.items() if pattern.fullmatch(parts.path)), None)


def patterns_of(paths: Iterable[str]) -> dict[str, re.Pattern[str]]:
    """Return a pattern by path, those without placeholders first."""
    ordered = sorted(paths, key=lambda path: path.count("{"))
    return {path: re.compile(re.sub(r"\\\{\w+\\\}", "[^/]+", re.escape(path))) for path in ordered}


async def visit(session: aiohttp.ClientSession, address: str, kind: str, times: PageTimes) -> str:
    """Request one address; return its content."""
    began = time.perf_counter()
    async with session.get(address, allow_redirects=False) as response:
        body = await response.text()
    took_ms = (time.perf_counter() - began) * 1000
    match = _TOTAL.search(response.headers.get("server-timing", ""))
    times.note(kind, address, response.status, float(match[1]) if match else took_ms, body)
    return body


async def explore(
    session: aiohttp.ClientSession, things: Mapping[str, list[str]], dice: random.Random, times: PageTimes
) -> dict[str, list[str]]:
    """Return addresses of every kind: pages of these things, and the targets of their links."""
    patterns = patterns_of([page.path for page in PAGES])
    visited: dict[str, list[str]] = defaultdict(list)
    fresh = [address for page in PAGES for address in filled_in(page.path, things)]
    for _ in range(DEPTH):
        links: list[str] = []
        for address in fresh:
            kind = kind_of(address, patterns)
            if kind is not None and address not in visited[kind] and len(visited[kind]) < SAMPLES:
                visited[kind].append(address)
                links += [unescape(one) for one in _LINK.findall(await visit(session, address, kind, times))]
        fresh = sorted(set(links))
        dice.shuffle(fresh)
    return visited


def filled_in(path: str, things: Mapping[str, list[str]]) -> list[str]:
    """Return the path's addresses: one, or one for each thing in its placeholders."""
    holes = re.findall(r"\{(\w+)\}", path)
    count = max((len(things[hole]) for hole in holes), default=1)
    return [
        path.format(**{hole: things[hole][place % len(things[hole])] for hole in holes})
        for place in range(min(count, SAMPLES))
    ]


async def until_quick(
    session: aiohttp.ClientSession, addresses: Mapping[str, list[str]], count: int, times: PageTimes
) -> None:
    """Request everything `count` times, in turns. Request slow pages again: one that is slow each time is not slow by
    chance.
    """
    for _ in range(1 + AGAIN):
        for kind in addresses:
            times.took_ms.pop(kind, None)
            times.slowest.pop(kind, None)
        for turn in range(count):
            for kind, several in addresses.items():
                await visit(session, several[turn % len(several)], kind, times)
        addresses = {kind: addresses[kind] for kind in times.slow()}


@dataclass
class Load:
    """Apps that request completions without a pause, until it is over."""

    answered: int = 0
    over: bool = False

    async def app(self, session: aiohttp.ClientSession, number: int) -> None:
        """Run one app: conversations of four turns, with feedback on each."""
        while not self.over:
            talk: list[dict[str, str]] = []
            for turn in range(4):
                talk.append({"role": "user", "content": f"question {turn} of {number} after {self.answered}"})
                body = {"model": POLICY, "messages": talk}
                async with session.post("/v1/chat/completions", json=body) as response:
                    answer = await response.json()
                    assert response.status == 200, answer
                    trajectory_id = response.headers["x-trajectory-id"]
                talk.append(answer["choices"][0]["message"] | {"role": "assistant"})
                self.answered += 1
            feedback = {"trajectory_id": trajectory_id, "reward": number % 2}
            async with session.post("/v1/feedback", json=feedback) as response:
                await response.read()


async def add_up(engine: Engine) -> None:
    """Roll up as the judging worker does, until cancelled."""
    while True:
        await asyncio.sleep(ADD_UP_EVERY_S)
        await asyncio.to_thread(roll_up, engine)


async def measure(engine: Engine, url: str, blocks: int, count: int, seed: int) -> tuple[PageTimes, PageTimes, float]:
    """Measure alone and under load; also return the load in completions per second."""
    dice = random.Random(seed)
    with engine.connect() as connection:
        things = ids(connection, SAMPLES, dice, blocks)
    headers, unlimited = {"authorization": f"Bearer {KEY}"}, aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, headers=headers, connector=unlimited) as session:
        if not await until(lambda: ready(session, url), START_S):
            raise SystemExit("the proxy did not start")
        alone, loaded = PageTimes(), PageTimes()
        # The first request of an address can be a fault, but its time does not count: it is forgotten.
        addresses = await explore(session, things, dice, alone)
        addresses |= {path: filled_in(path, things) for path in READS} | {address: [address] for address in FORMS}
        await until_quick(session, addresses, count, alone)
        load = Load()
        began = time.perf_counter()
        apps = [asyncio.create_task(load.app(session, number)) for number in range(CONNECTIONS)]
        adding = asyncio.create_task(add_up(engine))
        await until_quick(session, addresses, count, loaded)
        load.over = True
        await asyncio.gather(*apps)
        rate = load.answered / (time.perf_counter() - began)
        adding.cancel()
    return alone, loaded, rate


async def prove(
    data: Path, database: str | None, blocks: int, count: int, seed: int, console: Console
) -> tuple[PageTimes, PageTimes, float, list[str]]:
    """Fill, start, measure; return the results alone and under load, the load, and what does not hold."""
    began, log = time.monotonic(), data / "proxy.log"
    with filled(database, data / "data", blocks, console, lambda connection: dress(connection, blocks)) as engine:
        with engine.begin() as connection:
            add_history(connection, blocks, datetime.now(UTC), random.Random(seed))
        console.print(f"{blocks * BLOCK_ROWS:,} completions in {time.monotonic() - began:.0f} s", highlight=False)
        with running_broker() as broker:
            settings = load(
                environment={}, data=data / "data", policy=POLICY, broker=broker, database=database,
                vllm__urls=(await Instant((f"{POLICY}@v0",)).start(),), log__level="warning",
            )  # fmt: skip
            with running_proxy(settings, log, **{BOOTSTRAP_VARIABLE: KEY}) as (url, _):
                alone, loaded, rate = await measure(engine, url, blocks, count, seed)
    faults = [*alone.faults, *loaded.faults, *unhandled(log.read_text(errors="replace"))]
    missing = {page.path for page in PAGES} - {kind.partition("?")[0] for kind in alone.took_ms}
    faults += [f"{path} was never requested" for path in sorted(missing)]
    return alone, loaded, rate, faults + too_slow(alone, "alone") + too_slow(loaded, "under load")


def too_slow(times: PageTimes, when: str) -> list[str]:
    """Return the kinds of pages that take too long."""
    return [f"{kind} takes {took_ms:.0f} ms {when}: {times.slowest[kind][1]}" for kind, took_ms in times.slow().items()]


def show(alone: PageTimes, loaded: PageTimes, title: str, console: Console) -> None:
    """Print a line for each kind of page."""
    table = Table("page", "p50 ms", "p99 ms", "under load: p50", "p99", title=title)
    for kind in sorted(alone.took_ms, key=lambda kind: (not kind.startswith("/ui"), kind)):
        cells = []
        for times in (alone, loaded):
            took = times.took_ms.get(kind) or [float("nan")]
            cells += [f"{statistics.median(took):.1f}", f"{percentile(took, 0.99):.1f}"]
        table.add_row(kind, *cells)
    console.print(table)


def main() -> int:
    """Run the check."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--completions", type=int, default=1_000_000)
    parser.add_argument("--database", choices=("sqlite", "postgresql"), default="sqlite")
    parser.add_argument("--rounds", type=int, default=40, help="how often each kind of page is requested")
    parser.add_argument("--data", type=Path, help="an empty folder for database and log, which stay")
    parser.add_argument("--seed", type=int, default=0, help="which things are looked at")
    args = parser.parse_args()
    console, blocks = Console(width=140), max(2, args.completions // BLOCK_ROWS)
    with data_folder("pages", args.data) as data, database_url(args.database) as url:
        alone, loaded, rate, faults = asyncio.run(prove(data, url, blocks, args.rounds, args.seed, console))
    title = f"{args.database}, {blocks * BLOCK_ROWS:,} completions; load: {rate:.0f} completions/s"
    show(alone, loaded, title, console)
    return verdict(faults, console)


if __name__ == "__main__":
    sys.exit(main())
