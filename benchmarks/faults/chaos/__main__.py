"""Check that nothing is lost, doubled or trained twice while every process is killed repeatedly: 20,000 completions.

Starts the programs as `whetstone up` does (proxy, judging worker, training worker, Redis, and PostgreSQL where it is
the database) in front of a model server that answers at once, and lets apps send requests and feedback all the time.
One program after the other is killed with SIGKILL at a random moment and restarted. Exit 0 only if every answer whose
last byte reached an app is in SQL once, every acknowledged feedback is there once, and no trajectory is in two steps.
Loopback only; Linux, for /proc.
"""

import argparse
import asyncio
import itertools
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from sqlalchemy import Engine, select

from benchmarks.faults.apps import Answer, AppLedger, Client, SqlLedger, app_session, read_ledger, words_of, wrong_with
from benchmarks.faults.chaos.parts import Database, Part, programs
from benchmarks.kit.check import counted, figures_table, verdict
from benchmarks.kit.harness import evenly, opened, prepared, present
from benchmarks.kit.options import parser_of
from benchmarks.kit.postgres import Postgres
from benchmarks.kit.process import ready, running_adapter_vllm, running_vllms, until
from migrations import schema
from whetstone.config.settings import Settings, as_environment, load
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
    return list(zip(evenly(parts, kills, rng), sorted(rng.random() for _ in range(kills)), strict=True))


def faults_of(run: Run, ledger: SqlLedger, kills: int, requests: int) -> list[str]:
    """Return what does not hold, including too few events for a conclusion."""
    made, answered = run.kills.total(), len(run.received.completions)
    faults = {
        f"records were still unwritten {SETTLED_S:g} s after the last request": run.settled_s is None,
        f"the journal was left with {', '.join(run.left_behind)}": run.left_behind,
        f"only {made} of {kills} kills met a process that lived": made < kills,
        f"only {answered} of {requests} answers came": answered < requests,
        "no feedback was acknowledged": not run.received.feedback,
        f"no step was promoted: {dict(ledger.steps)}": not ledger.steps["promoted"],
    }
    return [*wrong_with(run.received, ledger), *present(faults)]


class Apps:
    """Apps that send requests on each connection one after the other, and feedback on each answer."""

    def __init__(self, run: Run, client: Client, seed: int, requests: int) -> None:
        self._run, self._client, self._seed, self._requests = run, client, seed, requests
        self._numbers = itertools.count()
        self.killed = asyncio.Event()
        """Set when all kills are done."""

    @property
    def share(self) -> float:
        """The share of the requests that are answered."""
        return len(self._run.received.completions) / self._requests

    async def app(self) -> None:
        """Run one app."""
        while self.share < 1 or not self.killed.is_set():
            number = next(self._numbers)
            dice = random.Random(f"{self._seed}/{number}")
            body: dict[str, Any] = {"model": "starter", "messages": [{"role": "user", "content": words_of(number)}]}
            body |= {"temperature": 1, "max_tokens": MOST_TOKENS} | ({"stream": True} if dice.random() < 0.5 else {})
            headers = {"x-trajectory-id": f"t{number}", "x-group-id": f"g{number // GROUP_SIZE}"}
            if await self._is_right("request", await self._client.ask(number, body, headers)):
                keyed = dice.random() < KEYED_SHARE
                await self._say(number, dice.random(), f"k{number}" if keyed else None)

    async def _say(self, number: int, reward: float, key: str | None) -> None:
        """Post feedback; with a key, retry until it is accepted."""
        body = {"trajectory_id": f"t{number}", "reward": reward, "idempotency_key": key}
        deadline = time.monotonic() + PATIENCE_S
        while not await self._is_right("feedback", await self._client.say(number, body)):
            if key is None or time.monotonic() > deadline:
                return

    async def _is_right(self, what: str, answer: Answer) -> bool:
        """Count an answer; return whether it is right, and if not, a moment later."""
        self._run.answers[f"{what}: {answer.kind}"] += 1
        if not answer.right:
            await asyncio.sleep(0.1)
        return answer.right


async def _kill(
    run: Run, parts: Sequence[Part], plan: Sequence[tuple[str, float]], apps: Apps, rng: random.Random, console: Console
) -> None:
    """Make all kills of the plan; start again what they met."""
    by_name = {part.name: part for part in parts}
    began = time.monotonic()
    for number, (name, share) in enumerate(plan, start=1):
        while apps.share < share:
            await asyncio.sleep(0.02)
        part = by_name[name]
        await until(partial(asyncio.to_thread, part.look), READY_S)
        await asyncio.sleep(rng.random())  # to hit it at any point
        run.kills[name] += await asyncio.to_thread(part.kill)
        at = f"{time.monotonic() - began:5.1f} s, {len(run.received.completions)} answers"
        console.print(f"kill {number:2}: {name} ({at})", highlight=False)
        await asyncio.sleep(rng.random() * MOST_AWAY_S)
        await asyncio.to_thread(part.start)
    apps.killed.set()


async def _watch(parts: Sequence[Part]) -> None:
    """Restart, for ever, what has ended by itself: mostly a proxy without its database."""
    while True:
        for part in parts:
            await asyncio.to_thread(part.look)
        await asyncio.sleep(0.5)


def settings_of(data: Path, seed: int, database: str | None, broker: str, vllm_url: str, port: int) -> Settings:
    """Return settings of a policy that trains in steps of few groups, with a short lease."""
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
        trainer={
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
        },
    )


async def _drive(
    run: Run, url: str, parts: Sequence[Part], engine: Engine, args: argparse.Namespace, console: Console
) -> None:
    """Send requests and kill, then wait until everything is written and a step was promoted.

    Raises:
        TimeoutError: a part does not start.
    """
    for part in parts:
        if not await until(partial(asyncio.to_thread, part.look), START_S):
            raise TimeoutError(f"{part.name} was not ready after {START_S:g} s")
    plan = moments([part.name for part in parts], args.kills, random.Random(args.seed))
    async with app_session(timeout_s=90) as session:
        apps = Apps(run, Client(session, url, run.received), args.seed, args.requests)
        watching = asyncio.ensure_future(_watch(parts))
        began = time.monotonic()
        killing = _kill(run, parts, plan, apps, random.Random(args.seed), console)
        await asyncio.gather(killing, *(apps.app() for _ in range(args.connections)))
        ended = time.monotonic()
        run.took_s = ended - began
        if await until(lambda: ready(session, url, database=True, unwritten=0), SETTLED_S):
            run.settled_s = time.monotonic() - ended
        watching.cancel()

    async def is_promoted() -> bool:
        s = schema.steps.c
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            return connection.execute(select(s.number).where(s.state == "promoted").limit(1)).first() is not None

    await until(is_promoted, TRAINED_S)


def prove(data: Path, args: argparse.Namespace, console: Console) -> tuple[Run, SqlLedger, list[str]]:
    """Make the whole run. Return what was seen, what SQL has, and what does not hold."""
    run = Run()
    with ExitStack() as stack:
        socket = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="whetstone-"))) / "redis.sock"
        postgres = stack.enter_context(closing(Postgres())) if args.database == "postgresql" else None
        without_vllm = settings_of(data, args.seed, None, "memory://", "http://127.0.0.1:1", 0)
        if args.vllm:
            (vllm_url,) = stack.enter_context(running_vllms(data, {"vllm": without_vllm}))
        else:
            vllm_url = stack.enter_context(running_adapter_vllm(without_vllm))
        database = None if postgres is None else postgres.url
        (port,) = free_ports(1)
        settings = settings_of(data, args.seed, database, f"redis+socket://{socket}", vllm_url, port)
        engine = stack.enter_context(prepared(settings))
        Store(engine).set_policy_state(settings.project, settings.policy, "training")
        environment = {**os.environ, **as_environment(settings, config=Path(os.devnull))}
        url = f"http://127.0.0.1:{port}"
        parts: list[Part] = [*programs(url, socket, environment, data)]
        for part in parts:
            part.start()
            stack.callback(part.stop)
        if postgres is not None:
            parts.append(Database(postgres))
        asyncio.run(_drive(run, url, parts, engine, args, console))
        for part in reversed(parts):
            part.stop()
        run.left_behind = sorted(path.name for path in (data / "journal").iterdir())
        ledger = read_ledger(engine)
    return run, ledger, faults_of(run, ledger, args.kills, args.requests)


def main() -> int:
    """Run the check."""
    parser = parser_of(
        "Whether kill -9 of any process loses or doubles anything.",
        {
            "--requests": {"type": int, "help": "that are answered; 20,000, with --vllm 2,000"},
            "--vllm": {"action": "store_true", "help": "a real vLLM answers"},
            "--connections": {"type": int, "default": 32},
            "--kills": {"type": int, "default": 40},
            "--database": {"choices": ("postgresql", "sqlite"), "default": "postgresql"},
            "--seed": {"type": int, "default": 0, "help": "of what apps do, of the kills and their moments"},
            "--data": {"type": Path, "help": "an empty folder for databases, journal and logs, which then stay"},
            "--short": {"action": "store_true", "help": "as make test runs it: 600 requests, 6 kills"},
        },
    )
    args = parser.parse_args()
    args.requests = args.requests or (2_000 if args.vllm else 20_000)
    if args.short:
        args.requests, args.connections, args.kills = 600, 8, 6
    with opened("chaos", args.data) as (data, console):
        run, ledger, faults = prove(data, args, console)
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
    return verdict(faults, console)


if __name__ == "__main__":
    sys.exit(main())
