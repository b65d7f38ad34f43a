"""The broker lies: messages get lost, come twice, late and out of order; then none arrives at all.

The remedy is that of the alert: the broker is started again, empty. What waits is in the database.
"""

import argparse
import asyncio
import os
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path

from sqlalchemy import Engine

from benchmarks.faults.apps import app_session, read_ledger
from benchmarks.faults.chaos.parts import Program
from benchmarks.faults.operating.judged_rewards import GROUP_SIZE, GroupedApps, unsettled
from benchmarks.faults.operating.lying_broker import Lies, LyingBroker
from benchmarks.faults.operating.scene import (
    Report,
    Watch,
    check_alert,
    model_server,
    note_status,
    settings_of,
    write_addresses,
)
from benchmarks.kit.check import counted
from benchmarks.kit.harness import prepared, present, worker_command
from benchmarks.kit.process import ready, running_proxy, until
from benchmarks.kit.redis_server import Redis
from whetstone.cli.commands.status import examine
from whetstone.cli.tables.status.problems import LATE
from whetstone.config.settings import Settings, as_environment
from whetstone.messaging.task_names import JUDGE_QUEUE, TRAINER_QUEUE
from whetstone.registry.projects import Store

ALERT = "WhetstoneJudgingStands"
LAG = "whetstone_assembly_lag_seconds"
LYING = Lies(lost=0.3, twice=0.3, late=0.3)
LYING_S, SILENT_S = 20.0, 25.0
START_S, SETTLED_S = 120.0, 90.0
STAYS_S = 700
"""The alert fires after 300 s without judging, and 5 minutes more."""


def run(data: Path, args: argparse.Namespace) -> Report:
    """Make the whole run."""
    seen = Report()
    with closing(Redis()) as redis, model_server() as vllm_url:
        socket = redis.folder / "liar.sock"
        broker = LyingBroker(socket, redis.socket, (JUDGE_QUEUE, TRAINER_QUEUE), args.seed)
        settings = settings_of(
            data, None, vllm_url, f"redis+socket://{socket}", groups__target_size=GROUP_SIZE,
            groups__prompt_window_s=0, sweep_s=0.5,
        )  # fmt: skip
        with prepared(settings) as engine, _judge(settings, data) as judge:
            Store(engine).set_policy_state(settings.project, settings.policy, "training")
            broker.start()
            with running_proxy(settings, data / "proxy.log") as (url, process):
                write_addresses(settings, url, {"proxy": process.pid})
                asyncio.run(_play(seen, settings, url, engine, broker, redis, judge, args))
            broker.stop()
            seen.lost_or_twice(read_ledger(engine))
    seen.figures["messages"] = counted(broker.counts)
    return seen


@contextmanager
def _judge(settings: Settings, data: Path) -> Iterator[Program]:
    command = worker_command("judge", JUDGE_QUEUE, "--pool", "threads", "--concurrency", "3")
    environment = {**os.environ, **as_environment(settings, config=Path(os.devnull))}
    judge = Program("judge", command, environment, data, lambda log: b" ready." in log)
    try:
        yield judge
    finally:
        if hasattr(judge, "_process"):
            judge.stop()


async def _play(
    seen: Report,
    settings: Settings,
    url: str,
    engine: Engine,
    broker: LyingBroker,
    redis: Redis,
    judge: Program,
    args: argparse.Namespace,
) -> None:
    judge.start()
    async with app_session(120) as session:
        if not await until(lambda: ready(session, url), START_S) or not await until(
            lambda: asyncio.to_thread(judge.look), START_S
        ):
            raise SystemExit("the proxy or the judge did not start")
        watch = Watch(url)
        watching = asyncio.ensure_future(watch.run())
        apps = GroupedApps(session, url, seen.run.received, args.seed, args.rate)
        running = [asyncio.ensure_future(apps.app()) for _ in range(args.connections)]
        broker.lies = LYING
        await asyncio.sleep(LYING_S)
        seen.figures["judging behind, at most, while it lied"] = f"{watch.most(LAG):.1f} s"
        broker.lies = Lies(lost=1.0)
        await asyncio.sleep(SILENT_S)
        silent_at_s = watch.now_s
        # As `whetstone status` shows it if nothing arrives until then.
        later = datetime.now(UTC) + LATE
        note_status(
            seen, (await asyncio.to_thread(examine, settings, later))["problems"], "wait for the judging worker"
        )
        seen.figures["judging behind, while nothing arrived"] = f"{watch.scrapes[-1].series.get(LAG, 0.0):.1f} s"
        broker.lies = Lies()
        await asyncio.to_thread(redis.restart)
        apps.over = True
        await asyncio.gather(*running)
        began = time.monotonic()
        await until(lambda: _settled(engine, apps), SETTLED_S)
        seen.figures["all settled"] = f"{time.monotonic() - began:.1f} s after the broker's restart"
        await asyncio.sleep(3)
        watching.cancel()
    seen.run.failed += apps.failed
    seen.faults += await asyncio.to_thread(unsettled, engine, apps.rewards)
    seen.figures["rewarded"] = f"{len(apps.rewards)} attempts in groups of {GROUP_SIZE}"
    seen.faults += present({"no message met a lie": not broker.counts["lost"], "no reward was given": not apps.rewards})
    # What waits is older by a second each second.
    await check_alert(seen, watch, ALERT, silent_at_s, stays_s=STAYS_S, growth={LAG: 1.0})


async def _settled(engine: Engine, apps: GroupedApps) -> bool:
    return not await asyncio.to_thread(unsettled, engine, apps.rewards)
