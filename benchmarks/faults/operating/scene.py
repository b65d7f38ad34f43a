"""A proxy with a database and a model server under load, and what an operator sees of it: status, metrics, alerts."""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.faults.apps import Client, SqlLedger, app_session, wrong_with
from benchmarks.faults.operating.alerts import EVALUATED_EVERY_S, NoPromtool, Scrape, fires, parse
from benchmarks.faults.outage import Load, Run
from benchmarks.kit.harness import present
from benchmarks.kit.process import ROOT, ready, state, until
from whetstone.config.settings import Settings, as_environment, load
from whetstone.stack.stack import free_ports

START_S, CAUGHT_UP_S = 90.0, 120.0
APP_WAITS_S = 120.0
RESOLVED_S = EVALUATED_EVERY_S + 2.0
"""How long after a fault its alert is still shown, at most."""
SCRAPE_TIMEOUT_S = 10.0
"""Prometheus' default."""
STATUS_TIMEOUT_S = 90.0


@dataclass
class Report:
    """What apps and operator saw."""

    run: Run = field(default_factory=Run)
    figures: dict[str, str] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    def expect(self, **faults: object) -> None:
        """Note what is wrong: the fault's words, with _ for blanks -> whether it is there."""
        self.faults += present({name.replace("_", " "): is_there for name, is_there in faults.items()})

    def lost_or_twice(self, ledger: SqlLedger) -> None:
        """Compare what apps received with what SQL has."""
        self.faults += [*self.run.failed, *wrong_with(self.run.received, ledger)]
        received = self.run.received
        self.figures["apps received"] = f"{len(received.completions)} answers, {len(received.feedback)} feedback"
        self.figures["SQL has"] = f"{len(ledger.completions)} completions, {len(ledger.feedback)} feedback"
        if times_ms := [took for kind in self.run.took_ms.values() for took in kind]:
            self.figures["longest answer"] = f"{max(times_ms):.0f} ms"


class Watch:
    """Scrapes a proxy once a second, as Prometheus does."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._began_s = time.monotonic()
        self.scrapes: list[Scrape] = []

    @property
    def now_s(self) -> float:
        """Return the time since the first scrape."""
        return time.monotonic() - self._began_s

    async def run(self) -> None:
        """Scrape until cancelled."""
        timeout = aiohttp.ClientTimeout(total=SCRAPE_TIMEOUT_S)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            while True:
                at_s = self.now_s
                try:
                    async with session.get(f"{self._url}/metrics") as response:
                        series = parse(await response.text()) if response.status == 200 else {}
                except (aiohttp.ClientError, OSError, TimeoutError):
                    series = {}
                self.scrapes.append(Scrape(at_s, series))
                await asyncio.sleep(max(0.0, at_s + 1 - self.now_s))

    @property
    def failed(self) -> int:
        """Return how many scrapes got nothing."""
        return sum(not one.series for one in self.scrapes)

    def most(self, name: str) -> float:
        """Return the largest value of a series."""
        return max((one.series.get(name, 0.0) for one in self.scrapes), default=0.0)


async def check_alert(seen: Report, watch: Watch, alert: str, at_s: float, **stays: Any) -> None:
    """Note whether an alert fires at that time, and that it does not at the end."""
    scrapes = list(watch.scrapes)
    try:
        fired = await asyncio.to_thread(fires, scrapes, alert, at_s, **stays)
        still = await asyncio.to_thread(fires, scrapes, alert, scrapes[-1].at_s)
    except NoPromtool as error:
        seen.faults.append(str(error))
        return
    words = ["fires" if fired else "does not fire", *(["after minutes of the same"] if stays.get("stays_s") else [])]
    seen.figures[f"alert {alert}"] = f"{' '.join(words)}; {'still fires' if still else 'silent'} at the end"
    seen.faults += present({f"{alert} does not fire": not fired, f"{alert} still fires at the end": still})


async def status(settings: Settings) -> list[dict[str, str]]:
    """Return the problems of `whetstone status`, each with its remedy."""
    command = [sys.executable, "-m", "whetstone.cli.main", "status", "--json", "--data", str(settings.data)]
    environment = {**os.environ, **as_environment(settings, config=Path(os.devnull))}

    def ask() -> list[dict[str, str]]:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=STATUS_TIMEOUT_S, check=False
        )
        return json.loads(done.stdout)["problems"]  # type: ignore[no-any-return]

    try:
        return await asyncio.to_thread(ask)
    except (subprocess.TimeoutExpired, ValueError) as error:
        return [{"what": f"whetstone status gave no answer: {type(error).__name__}", "do": ""}]


def note_status(seen: Report, problems: Sequence[Mapping[str, str]], words: str, when: str = "status") -> None:
    """Note the problem with these words and its remedy, and that it is missing if it is."""
    shown = [f"{one['what']} -> {one['do']}" for one in problems if words in one["what"]]
    seen.figures[when] = shown[0] if shown else f"no problem with the words {words!r}: {problems}"
    seen.faults += present({f"whetstone status does not name {words!r}": not shown})


def write_addresses(settings: Settings, url: str, pids: Mapping[str, int]) -> None:
    """Write what `whetstone up` writes for the command line."""
    fields = {
        "proxy": url,
        "replicas": settings.vllm.urls,
        "database": settings.database_url,
        "policy": settings.policy,
        "pids": pids,
    }
    (settings.data / "up.json").write_text(json.dumps(fields), encoding="utf-8")


@contextmanager
def model_server() -> Iterator[str]:
    """Run a model server that answers at once; yield its address."""
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "benchmarks.bench.upstream", "--port", str(port)]
    with subprocess.Popen(command, cwd=ROOT) as process:
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


def settings_of(data: Path, database: str | None, vllm_url: str, broker: str | None = None, **more: Any) -> Settings:
    """Return the settings of a policy `bench`. Without a broker hints are lost, which matters to no proxy."""
    return load(
        environment={},
        data=data,
        policy="bench",
        database=database,
        broker=broker or "redis://127.0.0.1:1/0",
        vllm__urls=(vllm_url,),
        **more,
    )


@asynccontextmanager
async def under_load(
    seen: Report, urls: Sequence[str], *, connections: int, rate: float, seed: int, first_number: int = 0
) -> AsyncIterator[tuple[aiohttp.ClientSession, Watch]]:
    """Send requests and feedback to these proxies meanwhile, and watch the first of them.

    At the end, wait until everything is in SQL.
    """
    async with app_session(APP_WAITS_S) as session:
        for url in urls:
            if not await until(lambda url=url: ready(session, url), START_S):  # type: ignore[misc]
                raise SystemExit(f"the proxy at {url} did not start")
        loads = [
            Load(
                seen.run,
                Client(session, url, seen.run.received),
                seed + place,
                rate / len(urls),
                first_number + 10**6 * place,
            )
            for place, url in enumerate(urls)
        ]
        apps = [asyncio.ensure_future(one.app()) for one in loads for _ in range(connections // len(urls))]
        watch = Watch(urls[0])
        watching = asyncio.ensure_future(watch.run())
        try:
            yield session, watch
            for one in loads:
                one.over = True
            await asyncio.gather(*apps)
            began = time.monotonic()
            for url in urls:
                await all_written(seen, session, url)
            seen.figures["all in SQL"] = f"{time.monotonic() - began:.1f} s after the last request"
            await asyncio.sleep(2)  # for a last scrape
        finally:
            for task in (watching, *apps):
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task


async def recovered(seen: Report, session: aiohttp.ClientSession, url: str, what: str) -> None:
    """Wait until the proxy brings records to the database again, and note how long that took."""
    began = time.monotonic()
    is_back = await until(lambda: _takes_records(session, url), CAUGHT_UP_S)
    seen.figures[f"records are taken after {what}"] = f"{time.monotonic() - began:.1f} s" if is_back else "never"
    seen.faults += present({f"no record was taken for {CAUGHT_UP_S:g} s after {what}": not is_back})


async def all_written(seen: Report, session: aiohttp.ClientSession, url: str) -> None:
    """Wait until a proxy has written every record."""
    if not await until(lambda: ready(session, url, database=True, unwritten=0), CAUGHT_UP_S):
        seen.faults.append(f"not everything was in SQL {CAUGHT_UP_S:g} s after the last request to {url}")


async def _takes_records(session: aiohttp.ClientSession, url: str) -> bool:
    reported = await state(session, url)
    return reported.get("database") is True and not reported["journal_full"]
