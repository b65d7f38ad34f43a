"""PostgreSQL hangs: its processes are stopped (SIGSTOP), so connections stay open and nothing is answered.

It is continued once. The second time it is killed and started again: the remedy that `whetstone status` prints.
"""

import argparse
import asyncio
from contextlib import closing
from pathlib import Path

import aiohttp

from benchmarks.faults.apps import read_ledger
from benchmarks.faults.operating.scene import (
    Report,
    check_alert,
    model_server,
    note_status,
    recovered,
    settings_of,
    status,
    under_load,
    write_addresses,
)
from benchmarks.kit.harness import prepared, present
from benchmarks.kit.postgres import Postgres
from benchmarks.kit.process import running_proxy, state
from whetstone.config.settings import Settings

ALERT = "WhetstoneDatabaseAway"
BEFORE_S = 3.0
LONG_S, SHORT_S = 50.0, 15.0
"""The alert fires from 30 s on; it is evaluated every 15 s."""


def run(data: Path, args: argparse.Namespace) -> Report:
    """Make the whole run."""
    seen = Report()
    with closing(Postgres()) as postgres, model_server() as vllm_url:
        settings = settings_of(data, postgres.url, vllm_url, proxy__durability=args.durability)
        with prepared(settings) as engine, running_proxy(settings, data / "proxy.log") as (url, process):
            write_addresses(settings, url, {"proxy": process.pid})
            try:
                asyncio.run(_play(seen, settings, url, postgres, args))
            finally:
                postgres.thaw()
            seen.lost_or_twice(read_ledger(engine))
    return seen


async def _play(seen: Report, settings: Settings, url: str, postgres: Postgres, args: argparse.Namespace) -> None:
    load = under_load(seen, [url], connections=args.connections, rate=args.rate, seed=args.seed)
    async with load as (session, watch):
        await asyncio.sleep(BEFORE_S)
        postgres.freeze()
        seen.run.away = True
        reported = await _reports(session, url, LONG_S, settings, seen)
        fired_at_s = watch.now_s
        postgres.thaw()
        seen.run.away = False
        await recovered(seen, session, url, "SIGCONT")
        postgres.freeze()
        seen.run.away = True
        await asyncio.sleep(SHORT_S)
        await asyncio.to_thread(postgres.kill)
        await asyncio.to_thread(postgres.start)
        seen.run.away = False
        await recovered(seen, session, url, "the restart of PostgreSQL")
        await asyncio.sleep(BEFORE_S)
    seen.figures["readyz"] = f"database away in {reported} of its answers, one a second for {LONG_S:g} s"
    seen.figures["scrapes"] = f"{len(watch.scrapes)}, {watch.failed} without an answer within 10 s"
    answered = {kind: len(took) for kind, took in sorted(seen.run.took_ms.items())}
    seen.figures["answered"] = ", ".join(f"{kind}: {count}" for kind, count in answered.items())
    seen.faults += present(
        {
            "no answer was given while the database hung": not answered.get("answer, database away"),
            "/readyz never reported that the database is away": not reported,
            "/metrics gave no answer while the database hung": watch.failed,
        }
    )
    await check_alert(seen, watch, ALERT, fired_at_s)


async def _reports(session: aiohttp.ClientSession, url: str, seconds: float, settings: Settings, seen: Report) -> int:
    """Look at the proxy once a second; return how often it reported that the database is away."""
    times, asking = 0, None
    for second in range(int(seconds)):
        if second == int(seconds / 2):
            asking = asyncio.ensure_future(status(settings))
        began = asyncio.get_running_loop().time()
        times += (await state(session, url)).get("database") is False
        await asyncio.sleep(max(0.0, began + 1 - asyncio.get_running_loop().time()))
    if asking is not None:
        note_status(seen, await asking, "database away")
    return times
