"""The disk of the data folder returns errors: no file of the proxy can grow (EFBIG), neither journal nor SQLite.

The limit is the kernel's own (RLIMIT_FSIZE), set from outside on the process that runs, so no right of root is needed.
Apps are refused with 503 once the journal has no room; what was acknowledged stays. The remedy is room: the proxy goes
on by itself.
"""

import argparse
import asyncio
import resource
from pathlib import Path

from benchmarks.faults.apps import read_ledger
from benchmarks.faults.operating.scene import (
    RESOLVED_S,
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
from benchmarks.kit.process import running_proxy, state
from whetstone.config.settings import Settings

ALERTS = ("WhetstoneJournalFull", "WhetstoneDatabaseAway")
BEFORE_S, BROKEN_S = 5.0, 50.0
MOST_BYTES = 64 * 2**10
"""Largest file while the disk is broken: the database is larger already, and so is the journal."""


def run(data: Path, args: argparse.Namespace) -> Report:
    """Make the whole run."""
    seen = Report()
    with model_server() as vllm_url:
        settings = settings_of(data, None, vllm_url)
        with prepared(settings) as engine, running_proxy(settings, data / "proxy.log") as (url, proxy):
            write_addresses(settings, url, {"proxy": proxy.pid})
            asyncio.run(_play(seen, settings, url, proxy.pid, args))
            allow_refusals(seen)
            seen.lost_or_twice(read_ledger(engine))
    return seen


async def _play(seen: Report, settings: Settings, url: str, pid: int, args: argparse.Namespace) -> None:
    load = under_load(seen, [url], connections=args.connections, rate=args.rate, seed=args.seed)
    async with load as (session, watch):
        await asyncio.sleep(BEFORE_S)
        seen.run.away = True
        _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (MOST_BYTES, hard))
        await asyncio.sleep(BROKEN_S / 2)
        problems = await status(settings)
        note_status(seen, problems, "journal full")
        note_status(seen, problems, "database away", "status, too")
        reported = await state(session, url)
        await asyncio.sleep(BROKEN_S / 2)
        broken_at_s = watch.now_s
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard, hard))
        await recovered(seen, session, url, "the disk's return")
        seen.run.away = False
        await asyncio.sleep(RESOLVED_S)
    seen.figures["readyz"] = str({name: reported.get(name) for name in ("database", "journal_full", "unwritten")})
    seen.faults += present({"/readyz did not report the full journal": not reported.get("journal_full")})
    for alert in ALERTS:
        await check_alert(seen, watch, alert, broken_at_s)


def allow_refusals(seen: Report) -> None:
    """Count refusals while the disk was broken, which is what has to happen, and leave other faults.

    A stream that had begun ends in the error.
    """
    refused = [fault for fault in seen.run.failed if "database away" in fault and "not_recorded" in fault]
    seen.figures["refused meanwhile (503, or a stream's end)"] = str(len(refused))
    seen.run.failed = [fault for fault in seen.run.failed if fault not in refused]
    seen.faults += present({"no request was refused, so the disk's errors met nothing": not refused})
