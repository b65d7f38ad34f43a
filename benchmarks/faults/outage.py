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
from collections import defaultdict
from collections.abc import Awaitable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.faults.apps import Answer, AppLedger, Client, SqlLedger, app_session, read_ledger, words_of, wrong_with
from benchmarks.kit.check import verdict
from benchmarks.kit.harness import opened, prepared, present
from benchmarks.kit.options import parser_of
from benchmarks.kit.postgres import Postgres
from benchmarks.kit.process import ROOT, ready, running_proxy, state, until
from whetstone.config.settings import load
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
    took_ms: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """Of the right answers, by kind of request, and whether the database was away."""
    reported_away: int = 0
    """How often `/readyz` reported, with 200, that the database is away while it was."""
    most_unwritten: int = 0
    caught_up_s: float | None = None
    """Time from the database's return until everything was written; None: it was not."""


def faults_of(run: Run, ledger: SqlLedger) -> list[str]:
    """Return what does not hold."""
    return [
        *run.failed,
        *wrong_with(run.received, ledger),
        *present(
            {
                **{
                    f"no {what} was answered while the database was away": f"{what}, database away" not in run.took_ms
                    for what in ("answer", "feedback")
                },
                "/readyz never reported that the database is away": not run.reported_away,
                f"not everything was in SQL {CAUGHT_UP_S:g} s after the database's return": run.caught_up_s is None
                or run.caught_up_s > CAUGHT_UP_S,
            }
        ),
    ]


class Load:
    """Apps that send requests through a proxy, one after the other on each connection."""

    def __init__(self, run: Run, client: Client, seed: int, rate: float, first_number: int = 0) -> None:
        """`first_number`: of its requests, where several loads share a run."""
        self._run, self._client, self._seed, self._rate = run, client, seed, rate
        self._numbers, self._first_number = itertools.count(first_number), first_number
        self._began = time.perf_counter()
        self.over = False

    async def app(self) -> None:
        """Run one app, until `over`."""
        talk: list[dict[str, str]] = []
        while not self.over:
            number = next(self._numbers)
            await asyncio.sleep(self._began + (number - self._first_number) / self._rate - time.perf_counter())
            dice = random.Random(f"{self._seed}/{number}")
            headers = {"x-trajectory-id": f"t{number // 3}"} if dice.random() < 0.3 else {}
            talk = [*(talk if len(talk) < 6 else []), {"role": "user", "content": words_of(number)}]
            stream = dice.random() < 0.5
            body: dict[str, Any] = {"model": "bench", "messages": talk} | ({"stream": True} if stream else {})
            answer = await self._timed(f"request {number}", "answer", self._client.ask(number, body, headers))
            if not answer.right:
                talk = []
                continue
            talk.append({"role": "assistant", "content": _text(answer.body, stream)})
            if dice.random() < FEEDBACK_SHARE:
                key = f"k{number}" if dice.random() < KEYED_SHARE else None
                body = {"completion_id": answer.completion_id, "reward": dice.random(), "idempotency_key": key}
                await self._timed(f"feedback {number}", "feedback", self._say(number, body))

    async def _say(self, number: int, body: dict[str, Any]) -> Answer:
        answer = await self._client.say(number, body)
        answer.right = answer.right and json.loads(answer.body)["state"] == "waiting"
        return answer

    async def _timed(self, name: str, kind: str, sent: Awaitable[Answer]) -> Answer:
        """Await an answer, and record it as of this kind or, if it is wrong, as a fault of the request of this name."""
        away, began = self._run.away, time.perf_counter()
        answer = await sent
        if answer.right:
            there = "away" if away and self._run.away else "there"
            self._run.took_ms[f"{kind}, database {there}"].append((time.perf_counter() - began) * 1000)
        else:
            there = "away" if away else "there"
            self._run.failed.append(f"{name}, sent with the database {there}: {answer.fault}")
        return answer


def _text(answer: bytes, stream: bool) -> str:
    if not stream:
        return str(json.loads(answer)["choices"][0]["message"]["content"])
    events = [json.loads(line[6:]) for line in answer.split(b"\n") if line.startswith(b"data: {")]
    return "".join(choice["delta"].get("content") or "" for event in events for choice in event["choices"])


async def drive(run: Run, url: str, postgres: Postgres, args: argparse.Namespace) -> None:
    """Send requests; stop the database and start it again; wait until everything is written."""
    async with app_session(WAITS_S) as session:
        load = Load(run, Client(session, url, run.received), args.seed, args.rate)
        if not await until(lambda: ready(session, url), START_S):
            raise SystemExit("the proxy did not start")
        apps = [asyncio.ensure_future(load.app()) for _ in range(args.connections)]
        await asyncio.sleep(BEFORE_S)
        await asyncio.to_thread(postgres.stop)
        run.away = True
        back_at = time.monotonic() + args.seconds
        while time.monotonic() < back_at:
            await asyncio.sleep(min(1.0, args.seconds / 10))
            reported = await state(session, url)
            if reported.get("status") == "ok":
                run.reported_away += not reported["database"]
                run.most_unwritten = max(run.most_unwritten, reported["unwritten"])
        run.away = False
        await asyncio.to_thread(postgres.start)
        returned = time.monotonic()
        await asyncio.sleep(AFTER_S)
        load.over = True
        await asyncio.gather(*apps)
        left_s = returned + CAUGHT_UP_S - time.monotonic()
        if await until(lambda: ready(session, url, database=True, unwritten=0), left_s):
            run.caught_up_s = time.monotonic() - returned


def prove(data: Path, args: argparse.Namespace) -> tuple[Run, list[str]]:
    """Make the whole run. Return what was seen, and what does not hold."""
    run = Run()
    (port,) = free_ports(1)
    upstream = [sys.executable, "-m", "benchmarks.bench.upstream", "--port", str(port)]
    with closing(Postgres()) as postgres, subprocess.Popen(upstream, cwd=ROOT) as model:
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
            with prepared(settings) as engine:
                with running_proxy(settings, data / "proxy.log") as (url, _):
                    asyncio.run(drive(run, url, postgres, args))
                return run, faults_of(run, read_ledger(engine))
        finally:
            model.terminate()


def main() -> int:
    """Run the check."""
    parser = parser_of(
        "Whether an app feels that the database is away.",
        {
            "--seconds": {"type": float, "default": 60, "help": "how long PostgreSQL is stopped"},
            "--connections": {"type": int, "default": 16},
            "--rate": {"type": float, "default": 100, "help": "requests a second, all connections together"},
            "--seed": {"type": int, "default": 0, "help": "of what the apps do"},
            "--data": {"type": Path, "help": "an empty folder for journal and log, which then stay"},
            "--short": {"action": "store_true", "help": "as make test runs it: 4 s, 40 requests a second"},
        },
    )
    args = parser.parse_args()
    if args.short:
        args.seconds, args.rate = 4.0, 40.0
    with opened("outage", args.data) as (data, console):
        run, faults = prove(data, args)
    table = Table("", "answered", "median ms", "longest ms", title=f"PostgreSQL away for {args.seconds:g} s")
    for kind, took in sorted(run.took_ms.items()):
        table.add_row(kind, str(len(took)), f"{sorted(took)[len(took) // 2]:.1f}", f"{max(took):.0f}")
    console.print(table)
    caught_up = "never" if run.caught_up_s is None else f"{run.caught_up_s:.1f} s after its return"
    console.print(f"at most {run.most_unwritten} records waited; all in SQL {caught_up}", highlight=False)
    return verdict(faults, console)


if __name__ == "__main__":
    sys.exit(main())
