"""Check that nothing is lost, doubled or trained twice while every process is killed repeatedly: 20,000 completions.

Starts the programs as `whetstone up` does (proxy, judging worker, training worker, Redis, and PostgreSQL where it is
the database) in front of a model server that answers at once, and lets apps send requests and feedback all the time.
One program after the other is killed with SIGKILL at a random moment and restarted. Exit 0 only if every answer whose
last byte reached an app is in SQL once, every acknowledged feedback is there once, and no trajectory is in two steps.
Loopback only; Linux, for /proc.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console
from sqlalchemy import Engine, select

from benchmarks.faults.chaos import parts as chaos_parts
from benchmarks.faults.chaos.parts import Part
from benchmarks.faults.chaos.records import AppLedger, SqlLedger, read_ledger, words_of, wrong_with
from benchmarks.kit.check import counted, data_folder, end_on_sigterm, figures_table, verdict
from benchmarks.kit.postgres import Postgres
from benchmarks.kit.process import running_adapter_vllm, running_vllms
from migrations import schema
from migrations.run import upgrade
from whetstone.config.settings import Settings, as_environment, load
from whetstone.database.engine import connect
from whetstone.registry.projects import Store
from whetstone.stack.stack import free_ports

GROUP_SIZE = 4
MOST_TOKENS = 8
"""Length of each answer of a real vLLM."""
START_S, SETTLED_S, TRAINED_S = 180.0, 300.0, 180.0
MOST_AWAY_S = 2.0
"""Longest time that a killed program stays away."""
READY_S = 60.0
"""How long a kill waits until its target runs again."""
PATIENCE_S = 60.0
"""How long an app retries keyed feedback."""
KEYED_SHARE = 0.5


@dataclass
class Run:
    """What apps and killer saw."""

    received: AppLedger = field(default_factory=AppLedger)
    answers: Counter[str] = field(default_factory=Counter)
    """Results of requests and feedback."""
    kills: Counter[str] = field(default_factory=Counter)
    """Kills of running processes, by part."""
    settled_s: float | None = None
    """Time from the last request until everything was written; None: it was not."""
    took_s: float = 0.0
    left_behind: list[str] = field(default_factory=list)
    """Files in the journal after the proxy had ended normally."""


def moments(parts: Sequence[str], kills: int, rng: random.Random) -> list[tuple[str, float]]:
    """Return the target of each kill, and at what share of the requests: every part equally often, in random order."""
    targets = [parts[number % len(parts)] for number in range(kills)]
    rng.shuffle(targets)
    return list(zip(targets, sorted(rng.random() for _ in range(kills)), strict=True))


def faults_of(run: Run, ledger: SqlLedger, kills: int, requests: int) -> list[str]:
    """Return what does not hold, including too few events for a conclusion."""
    faults = wrong_with(run.received, ledger)
    if run.settled_s is None:
        faults.append(f"records were still unwritten {SETTLED_S:g} s after the last request")
    if run.left_behind:
        faults.append(f"the journal was left with {', '.join(run.left_behind)}")
    if run.kills.total() < kills:
        faults.append(f"only {run.kills.total()} of {kills} kills met a process that lived")
    if len(run.received.completions) < requests:
        faults.append(f"only {len(run.received.completions)} of {requests} answers came")
    if not run.received.feedback:
        faults.append("no feedback was acknowledged")
    if not ledger.steps["promoted"]:
        faults.append(f"no step was promoted: {dict(ledger.steps)}")
    return faults


class Apps:
    """Apps that send requests on each connection one after the other, and feedback on each answer."""

    def __init__(self, run: Run, url: str, seed: int, requests: int) -> None:
        self._run, self._url, self._seed, self._requests = run, url, seed, requests
        self._numbers = itertools.count()
        self.killed = asyncio.Event()
        """Set when all kills are done."""

    @property
    def share(self) -> float:
        """The share of the requests that are answered."""
        return len(self._run.received.completions) / self._requests

    async def app(self, session: aiohttp.ClientSession) -> None:
        """Run one app."""
        while self.share < 1 or not self.killed.is_set():
            number = next(self._numbers)
            dice = random.Random(f"{self._seed}/{number}")
            completion_id = await self._ask(session, number, stream=dice.random() < 0.5)
            if completion_id is not None:
                keyed = dice.random() < KEYED_SHARE
                await self._say(session, number, completion_id, dice.random(), f"k{number}" if keyed else None)

    async def _ask(self, session: aiohttp.ClientSession, number: int, *, stream: bool) -> str | None:
        body: dict[str, Any] = {"model": "starter", "messages": [{"role": "user", "content": words_of(number)}]}
        body |= {"temperature": 1, "max_tokens": MOST_TOKENS} | ({"stream": True} if stream else {})
        headers = {"x-trajectory-id": f"t{number}", "x-group-id": f"g{number // GROUP_SIZE}"}
        try:
            async with session.post(f"{self._url}/v1/chat/completions", json=body, headers=headers) as response:
                answer = await response.read()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            return await self._failed("request", type(error).__name__)
        if response.status != 200 or (stream and not answer.endswith(b"data: [DONE]\n\n")):
            return await self._failed("request", str(response.status))
        self._run.answers["request: 200"] += 1
        completion_id = response.headers["x-completion-id"]
        self._run.received.completions[completion_id] = number
        return completion_id

    async def _say(
        self, session: aiohttp.ClientSession, number: int, completion_id: str, reward: float, key: str | None
    ) -> None:
        """Post feedback; with a key, retry until it is accepted."""
        body = {"trajectory_id": f"t{number}", "reward": reward, "comment": words_of(number), "idempotency_key": key}
        until = time.monotonic() + PATIENCE_S
        while True:
            try:
                async with session.post(f"{self._url}/v1/feedback", json=body) as response:
                    answer = json.loads(await response.read())
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                await self._failed("feedback", type(error).__name__)
            else:
                if response.status == 202:
                    self._run.answers["feedback: 202"] += 1
                    self._run.received.feedback[answer["id"]] = number
                    return
                await self._failed("feedback", str(response.status))
            if key is None or time.monotonic() > until:
                return

    async def _failed(self, what: str, how: str) -> None:
        self._run.answers[f"{what}: {how}"] += 1
        await asyncio.sleep(0.1)


class Killer:
    """Kills part after part, and restarts what was killed or has ended by itself."""

    def __init__(self, parts: Sequence[Part], run: Run, console: Console) -> None:
        self._parts = {part.name: part for part in parts}
        self._run, self._console = run, console

    async def kill(self, plan: Sequence[tuple[str, float]], apps: Apps, rng: random.Random) -> None:
        """Make all kills of the plan."""
        began = time.monotonic()
        for number, (name, share) in enumerate(plan, start=1):
            while apps.share < share:
                await asyncio.sleep(0.02)
            part = self._parts[name]
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(READY_S):
                    while not await asyncio.to_thread(part.look):
                        await asyncio.sleep(0.1)
            await asyncio.sleep(rng.random())  # to hit it at any point
            self._run.kills[name] += await asyncio.to_thread(part.kill)
            at = f"{time.monotonic() - began:5.1f} s, {len(self._run.received.completions)} answers"
            self._console.print(f"kill {number:2}: {name} ({at})", highlight=False)
            await asyncio.sleep(rng.random() * MOST_AWAY_S)
            await asyncio.to_thread(part.start)
        apps.killed.set()

    async def watch(self) -> None:
        """Restart, for ever, what has ended by itself: mostly a proxy without its database."""
        while True:
            for part in self._parts.values():
                await asyncio.to_thread(part.look)
            await asyncio.sleep(0.5)


def settings_of(data: Path, seed: int, database: str | None, broker: str, vllm_url: str, port: int) -> Settings:
    """Return settings of a policy that trains in steps of few groups, with a short lease."""
    trainer = {
        "groups_per_step": 3,
        "max_groups_per_step": 6,
        "min_groups_per_step": 3,
        "max_staleness": 10_000,
        "micro_batch_tokens": 512,
        "lora_rank": 8,
        "lora_alpha": 16,
        "threads": 1,
        "device": "cpu",
        "lease_s": 5.0,
        "max_attempts": 1000,
    }
    return load(
        environment={},
        data=data,
        seed=seed,
        sweep_s=0.5,
        database=database,
        broker=broker,
        vllm__urls=(vllm_url,),
        proxy__port=port,
        groups__target_size=GROUP_SIZE,
        groups__prompt_window_s=0,
        trainer=trainer,
    )


async def _drive(
    run: Run, url: str, parts: list[Part], plan: list[tuple[str, float]], args: argparse.Namespace, console: Console
) -> None:
    """Send requests and kill, then wait until everything is written."""
    killer, apps = Killer(parts, run, console), Apps(run, url, args.seed, args.requests)
    timeout = aiohttp.ClientTimeout(total=90)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        watching = asyncio.ensure_future(killer.watch())
        began = time.monotonic()
        asking = [apps.app(session) for _ in range(args.connections)]
        await asyncio.gather(killer.kill(plan, apps, random.Random(args.seed)), *asking)
        run.took_s, ended = time.monotonic() - began, time.monotonic()
        while run.settled_s is None and time.monotonic() < ended + SETTLED_S:
            with contextlib.suppress(aiohttp.ClientError, ValueError):
                async with session.get(f"{url}/readyz") as response:
                    state = await response.json()
                if response.status == 200 and state["database"] and not state["unwritten"]:
                    run.settled_s = time.monotonic() - ended
            await asyncio.sleep(0.2)
        watching.cancel()


def _await_step(engine: Engine) -> None:
    """Wait until a step was promoted, at most TRAINED_S."""
    s, until = schema.steps.c, time.monotonic() + TRAINED_S
    promoted = select(s.number).where(s.state == "promoted").limit(1)
    while time.monotonic() < until:
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            if connection.execute(promoted).first():
                return
        time.sleep(0.5)


def prove(data: Path, args: argparse.Namespace, console: Console) -> tuple[Run, SqlLedger, list[str]]:
    """Make the whole run. Return what was seen, what SQL has, and what does not hold."""
    run = Run()
    with contextlib.ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="whetstone-")))
        socket = folder / "redis.sock"
        postgres = opened.enter_context(contextlib.closing(Postgres())) if args.database == "postgresql" else None
        without_vllm = settings_of(data, args.seed, None, "memory://", "http://127.0.0.1:1", 0)
        if args.vllm:
            (vllm_url,) = opened.enter_context(running_vllms(data, {"vllm": without_vllm}))
        else:
            vllm_url = opened.enter_context(running_adapter_vllm(without_vllm))
        database = None if postgres is None else postgres.url
        (port,) = free_ports(1)
        settings = settings_of(data, args.seed, database, f"redis+socket://{socket}", vllm_url, port)
        upgrade(settings.database_url)
        engine = connect(settings.database_url)
        opened.callback(engine.dispose)
        Store(engine).prepare(settings)
        Store(engine).set_policy_state(settings.project, settings.policy, "training")
        environment = {**os.environ, **as_environment(settings, config=Path(os.devnull))}
        url = f"http://127.0.0.1:{settings.proxy.port}"
        parts: list[Part] = [
            chaos_parts.broker(socket, data),
            chaos_parts.proxy(url, environment, data),
            chaos_parts.judge(environment, data),
            chaos_parts.trainer(environment, data),
        ]
        for part in parts:
            part.start()
            opened.callback(part.stop)
        chaos_parts.await_ready(parts, START_S)
        if postgres is not None:
            parts.append(chaos_parts.Database(postgres))
        plan = moments([part.name for part in parts], args.kills, random.Random(args.seed))
        asyncio.run(_drive(run, url, parts, plan, args, console))
        _await_step(engine)
        for part in reversed(parts):
            part.stop()
        run.left_behind = sorted(path.name for path in (data / "journal").iterdir())
        ledger = read_ledger(engine)
    return run, ledger, faults_of(run, ledger, args.kills, args.requests)


def _show(run: Run, ledger: SqlLedger, console: Console) -> None:
    settled = "never" if run.settled_s is None else f"{run.settled_s:.1f} s after the last request"
    figures = {
        "kills": counted(run.kills),
        "answers": counted(run.answers),
        "apps hold": f"{len(run.received.completions)} completions, {len(run.received.feedback)} feedback",
        "SQL has": f"{len(ledger.completions)} completions, {len(ledger.feedback)} feedback; all written {settled}",
        "steps": counted(ledger.steps),
        "trained on": f"{len(ledger.taught)} trajectories",
        "took": f"{run.took_s:.0f} s",
    }
    console.print(figures_table(figures))


def main() -> int:
    """Run the check."""
    parser = argparse.ArgumentParser(description="Whether kill -9 of any process loses or doubles anything.")
    parser.add_argument("--requests", type=int, help="that are answered; 20,000, with --vllm 2,000")
    parser.add_argument("--vllm", action="store_true", help="a real vLLM answers")
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--database", choices=("postgresql", "sqlite"), default="postgresql")
    parser.add_argument("--seed", type=int, default=0, help="of what apps do, of the kills and their moments")
    parser.add_argument("--data", type=Path, help="an empty folder for databases, journal and logs, which then stay")
    parser.add_argument("--short", action="store_true", help="as make test runs it: 600 requests, 6 kills")
    args = parser.parse_args()
    args.requests = args.requests or (2_000 if args.vllm else 20_000)
    if args.short:
        args.requests, args.connections, args.kills = 600, 8, 6
    end_on_sigterm()
    console = Console(width=120)
    with data_folder("chaos", args.data) as data:
        run, ledger, faults = prove(data, args, console)
    _show(run, ledger, console)
    return verdict(faults, console)


if __name__ == "__main__":
    sys.exit(main())
