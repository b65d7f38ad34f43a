"""The clock jumps an hour ahead, and later back, for the proxy and the judging worker. The machine's clock stays.

A small library that both processes preload adds the jump (`clock_shift.c`; needs a C compiler). Conversations then
count as idle, which ends them; nothing else may change. The remedy is the clock set right again.
"""

import argparse
import asyncio
import os
import struct
import subprocess
from collections import Counter
from contextlib import closing
from pathlib import Path

from sqlalchemy import Engine, func, select

from benchmarks.faults.apps import read_ledger
from benchmarks.faults.chaos.parts import Program
from benchmarks.faults.operating.scene import (
    RESOLVED_S,
    Report,
    check_alert,
    model_server,
    note_status,
    settings_of,
    status,
    under_load,
    write_addresses,
)
from benchmarks.kit.check import counted
from benchmarks.kit.harness import prepared, present, worker_command
from benchmarks.kit.process import running_proxy, until
from benchmarks.kit.redis_server import Redis
from migrations import schema
from whetstone.config.settings import Settings, as_environment
from whetstone.messaging.task_names import JUDGE_QUEUE

ALERT = "WhetstoneClockJumped"
HOUR_S = 3600
BEFORE_S, AHEAD_S, AFTER_S = 5.0, 25.0, RESOLVED_S
START_S, SETTLED_S = 120.0, 90.0
f = schema.feedback.c


class Clock:
    """The clock of the processes that get `environment`."""

    def __init__(self, folder: Path) -> None:
        self._file, library = folder / "clock", folder / "clock_shift.so"
        self.set(0)
        source = Path(__file__).with_name("clock_shift.c")
        subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
        self.environment = {"LD_PRELOAD": str(library), "CLOCK_SHIFT_FILE": str(self._file)}

    def set(self, shift_s: int) -> None:
        """Let it be this far ahead, from now on."""
        with self._file.open("r+b" if self._file.exists() else "wb") as file:
            file.write(struct.pack("l", shift_s))


def run(data: Path, args: argparse.Namespace) -> Report:
    """Make the whole run."""
    seen, clock = Report(), Clock(data)
    with model_server() as vllm_url, closing(Redis()) as redis:
        settings = settings_of(data, None, vllm_url, redis.url, sweep_s=0.5)
        with (
            prepared(settings) as engine,
            running_proxy(settings, data / "proxy.log", **clock.environment) as (url, proxy),
        ):
            command = worker_command("judge", JUDGE_QUEUE, "--pool", "threads", "--concurrency", "3")
            environment = {**os.environ, **as_environment(settings, config=Path(os.devnull)), **clock.environment}
            judge = Program("judge", command, environment, data, lambda log: b" ready." in log)
            judge.start()
            try:
                write_addresses(settings, url, {"proxy": proxy.pid})
                asyncio.run(_play(seen, settings, url, engine, clock, judge, args))
            finally:
                judge.stop()
            seen.lost_or_twice(read_ledger(engine))
    return seen


async def _play(
    seen: Report, settings: Settings, url: str, engine: Engine, clock: Clock, judge: Program, args: argparse.Namespace
) -> None:
    if not await until(lambda: asyncio.to_thread(judge.look), START_S):
        raise SystemExit("the judge did not start")
    load = under_load(seen, [url], connections=args.connections, rate=args.rate, seed=args.seed)
    async with load as (_, watch):
        await asyncio.sleep(BEFORE_S)
        clock.set(HOUR_S)
        await asyncio.sleep(AHEAD_S / 2)
        note_status(seen, await status(settings), "clock jumped")
        await asyncio.sleep(AHEAD_S / 2)
        ahead_at_s = watch.now_s
        clock.set(0)
        await asyncio.sleep(AFTER_S)
    if not await until(lambda: _applied(engine), SETTLED_S):
        seen.faults.append(f"feedback was not applied {SETTLED_S:g} s after the clock was right again")
    with engine.connect() as connection:
        counts = select(f.state, func.count().label("count")).group_by(f.state)
        states = {row.state: row.count for row in connection.execute(counts)}
        trajectories = connection.execute(select(func.count()).select_from(schema.trajectories)).scalar_one()
    seen.figures["feedback"] = counted(Counter(states))
    seen.figures["trajectories"] = str(trajectories)
    seen.faults += present({"feedback failed": states.get("failed")})
    await check_alert(seen, watch, ALERT, ahead_at_s)


async def _applied(engine: Engine) -> bool:
    def none_waits() -> bool:
        with engine.connect() as connection:
            return connection.execute(select(func.count()).where(f.state == "waiting")).scalar_one() == 0

    return await asyncio.to_thread(none_waits)
