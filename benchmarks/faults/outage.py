"""Check that apps notice nothing when the database is away: PostgreSQL is stopped under load, and comes back.

Starts PostgreSQL, an instant upstream and a proxy of its own; apps send requests at a steady rate, give feedback and
continue conversations. Exit 0 only if no request and no feedback failed for that reason, all feedback was meanwhile
answered 202 `waiting`, `/readyz` reported it, and everything is in SQL, once, within 60 s of the database's return.
Loopback only.
"""

import argparse
import asyncio
import itertools
import json
import random
import subprocess
import sys
import time
from collections import Counter
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console
from rich.table import Table

from benchmarks.faults.chaos.records import AppLedger, SqlLedger, read_ledger, words_of, wrong_with
from benchmarks.kit.check import data_folder, verdict
from benchmarks.kit.postgres import Postgres
from benchmarks.kit.process import ROOT, ready, running_proxy, until
from migrations.run import upgrade
from whetstone.config.settings import load
from whetstone.database.engine import connect
from whetstone.registry.projects import Store
from whetstone.stack.stack import free_ports

BEFORE_S, AFTER_S = 3.0, 5.0
"""Length of the load before the database stops, and after its return."""
CAUGHT_UP_S = 60.0
START_S = 60.0
FEEDBACK_SHARE, KEYED_SHARE = 0.5, 0.5
"""Share of the answers that get feedback, and share of this feedback that has an idempotency key."""
WAITS_S = 120.0
"""Timeout of an app."""


@dataclass
class Run:
    """What the apps and the clock saw."""

    received: AppLedger = field(default_factory=AppLedger)
    failed: list[str] = field(default_factory=list)
    """Answers that were wrong."""
    away: bool = False
    counts: Counter[str] = field(default_factory=Counter)
    took_ms: dict[str, list[float]] = field(default_factory=dict)
    """By kind of request, and whether the database was away."""
    reported_away: int = 0
    """How often `/readyz` reported, with 200, that the database is away while it was."""
    most_unwritten: int = 0
    caught_up_s: float | None = None
    """Time from the database's return until everything was written; None: it was not."""

    def note(self, what: str, away: bool, began: float) -> None:
        """Record a right answer."""
        kind = f"{what}, database {'away' if away else 'there'}"
        self.counts[kind] += 1
        self.took_ms.setdefault(kind, []).append((time.perf_counter() - began) * 1000)


def faults_of(run: Run, ledger: SqlLedger) -> list[str]:
    """Return what does not hold."""
    faults = [*run.failed, *wrong_with(run.received, ledger)]
    faults += [
        f"no {what} was answered while the database was away" for what in ("answer", "feedback") if not _away(run, what)
    ]
    if not run.reported_away:
        faults.append("/readyz never reported that the database is away")
    if run.caught_up_s is None or run.caught_up_s > CAUGHT_UP_S:
        faults.append(f"not everything was in SQL {CAUGHT_UP_S:g} s after the database's return")
    return faults


def _away(run: Run, what: str) -> int:
    return run.counts[f"{what}, database away"]


class Load:
    """Apps that send requests through a proxy, one after the other on each connection."""

    def __init__(self, run: Run, url: str, seed: int, rate: float) -> None:
        self._run, self._url, self._seed, self._rate = run, url, seed, rate
        self._numbers = itertools.count()
        self._began = time.perf_counter()
        self.over = False

    async def app(self, session: aiohttp.ClientSession) -> None:
        """Run one app, until `over`."""
        talk: list[dict[str, str]] = []
        while not self.over:
            number = next(self._numbers)
            await asyncio.sleep(self._began + number / self._rate - time.perf_counter())
            dice = random.Random(f"{self._seed}/{number}")
            headers = {"x-trajectory-id": f"t{number // 3}"} if dice.random() < 0.3 else {}
            talk = (
                [*talk, {"role": "user", "content": words_of(number)}]
                if len(talk) < 6
                else [{"role": "user", "content": words_of(number)}]
            )
            answer = await self._ask(session, number, talk, headers, stream=dice.random() < 0.5)
            if answer is None:
                talk = []
                continue
            talk.append({"role": "assistant", "content": answer[1]})
            if dice.random() < FEEDBACK_SHARE:
                key = f"k{number}" if dice.random() < KEYED_SHARE else None
                await self._say(session, number, answer[0], key, dice.random())

    async def _ask(
        self,
        session: aiohttp.ClientSession,
        number: int,
        talk: list[dict[str, str]],
        headers: dict[str, str],
        stream: bool,
    ) -> tuple[str, str] | None:
        body: dict[str, Any] = {"model": "bench", "messages": talk} | ({"stream": True} if stream else {})
        data = json.dumps(body, separators=(",", ":")).encode()
        away, began = self._run.away, time.perf_counter()
        try:
            async with session.post(
                f"{self._url}/v1/chat/completions", data=data, headers=headers | {"content-type": "application/json"}
            ) as response:
                answer = await response.read()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            self._run.failed.append(f"request {number}, {_when(away)}: {error!r}")
            return None
        if response.status != 200 or (stream and not answer.endswith(b"data: [DONE]\n\n")):
            self._run.failed.append(f"request {number}, {_when(away)}: {response.status} {answer[-200:]!r}")
            return None
        self._run.note("answer", away and self._run.away, began)
        completion_id = response.headers["x-completion-id"]
        self._run.received.completions[completion_id] = number
        return completion_id, _text(answer, stream)

    async def _say(
        self, session: aiohttp.ClientSession, number: int, completion_id: str, key: str | None, reward: float
    ) -> None:
        body = {"completion_id": completion_id, "reward": reward, "comment": words_of(number), "idempotency_key": key}
        away, began = self._run.away, time.perf_counter()
        try:
            async with session.post(f"{self._url}/v1/feedback", json=body) as response:
                answer = await response.json()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            self._run.failed.append(f"feedback {number}, {_when(away)}: {error!r}")
            return
        if response.status != 202 or answer["state"] != "waiting":
            self._run.failed.append(f"feedback {number}, {_when(away)}: {response.status} {answer}")
            return
        self._run.note("feedback", away and self._run.away, began)
        self._run.received.feedback[answer["id"]] = number


def _when(away: bool) -> str:
    return f"sent with the database {'away' if away else 'there'}"


def _text(answer: bytes, stream: bool) -> str:
    if not stream:
        return str(json.loads(answer)["choices"][0]["message"]["content"])
    events = [json.loads(line[6:]) for line in answer.split(b"\n") if line.startswith(b"data: {")]
    return "".join(choice["delta"].get("content") or "" for event in events for choice in event["choices"])


async def drive(
    run: Run, url: str, postgres: Postgres, *, seconds: float, connections: int, rate: float, seed: int
) -> None:
    """Send requests; stop the database and start it again; wait until everything is written."""
    load = Load(run, url, seed, rate)
    timeout = aiohttp.ClientTimeout(total=WAITS_S)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        if not await until(lambda: ready(session, url), START_S):
            raise SystemExit("the proxy did not start")
        apps = [asyncio.ensure_future(load.app(session)) for _ in range(connections)]
        await asyncio.sleep(BEFORE_S)
        await asyncio.to_thread(postgres.stop)
        run.away = True
        back_at = time.monotonic() + seconds
        while time.monotonic() < back_at:
            await asyncio.sleep(min(1.0, seconds / 10))
            state = await _ready(session, url)
            run.reported_away += state is not None and state["database"] is False
            run.most_unwritten = max(run.most_unwritten, 0 if state is None else state["unwritten"])
        run.away = False
        await asyncio.to_thread(postgres.start)
        returned = time.monotonic()
        await asyncio.sleep(AFTER_S)
        load.over = True
        await asyncio.gather(*apps)
        while time.monotonic() < returned + CAUGHT_UP_S:
            state = await _ready(session, url)
            if state is not None and state["database"] and not state["unwritten"]:
                run.caught_up_s = time.monotonic() - returned
                return
            await asyncio.sleep(0.1)


async def _ready(session: aiohttp.ClientSession, url: str) -> dict[str, Any] | None:
    """Return the proxy's own report of its state; None where it is not ready."""
    try:
        async with session.get(f"{url}/readyz") as response:
            state: dict[str, Any] = await response.json()
            return state if response.status == 200 else None
    except aiohttp.ClientError:
        return None


def prove(data: Path, *, seconds: float, connections: int, rate: float, seed: int) -> tuple[Run, list[str]]:
    """Make the whole run. Return what was seen, and what does not hold."""
    run = Run()
    (port,) = free_ports(1)
    upstream = [sys.executable, "-m", "benchmarks.bench.upstream", "--port", str(port)]
    with (
        closing(Postgres()) as postgres,
        subprocess.Popen(upstream, cwd=ROOT) as model,
    ):
        # There is no broker: hints are lost, which does not matter here.
        settings = load(
            environment={},
            data=data,
            policy="bench",
            database=postgres.url,
            broker="redis://127.0.0.1:1/0",
            vllm__urls=(f"http://127.0.0.1:{port}",),
        )
        try:
            upgrade(settings.database_url)
            engine = connect(settings.database_url)
            Store(engine).prepare(settings)
            with running_proxy(settings, data / "proxy.log") as (url, _):
                load_of = {"seconds": seconds, "connections": connections, "rate": rate, "seed": seed}
                asyncio.run(drive(run, url, postgres, **load_of))  # type: ignore[arg-type]
            ledger = read_ledger(engine)
            engine.dispose()
        finally:
            model.terminate()
    return run, faults_of(run, ledger)


def _show(run: Run, seconds: float, console: Console) -> None:
    table = Table("", "answered", "median ms", "longest ms", title=f"PostgreSQL away for {seconds:g} s")
    for kind, took in sorted(run.took_ms.items()):
        table.add_row(kind, str(len(took)), f"{sorted(took)[len(took) // 2]:.1f}", f"{max(took):.0f}")
    console.print(table)
    caught_up = "never" if run.caught_up_s is None else f"{run.caught_up_s:.1f} s after its return"
    console.print(f"at most {run.most_unwritten} records waited; all in SQL {caught_up}", highlight=False)


def main() -> int:
    """Run the check."""
    parser = argparse.ArgumentParser(description="Whether an app feels that the database is away.")
    parser.add_argument("--seconds", type=float, default=60, help="how long PostgreSQL is stopped")
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--rate", type=float, default=100, help="requests a second, all connections together")
    parser.add_argument("--seed", type=int, default=0, help="of what the apps do")
    parser.add_argument("--data", type=Path, help="an empty folder for journal and log, which then stay")
    parser.add_argument("--short", action="store_true", help="as make test runs it: 4 s, 40 requests a second")
    args = parser.parse_args()
    seconds, rate = (4.0, 40.0) if args.short else (args.seconds, args.rate)
    console = Console(width=120)
    with data_folder("outage", args.data) as data:
        run, faults = prove(data, seconds=seconds, connections=args.connections, rate=rate, seed=args.seed)
    _show(run, seconds, console)
    return verdict(faults, console)


if __name__ == "__main__":
    sys.exit(main())
