"""The data folder is lost after a backup that was made under load: it is restored, and a new proxy serves from it.

What apps had received before the backup began must be there once the proxy has read the journal's copy; what came later
is there once, or not at all.
"""

import argparse
import asyncio
import shutil
from pathlib import Path

from benchmarks.faults.apps import AppLedger, app_session, read_ledger
from benchmarks.faults.operating.scene import START_S, Report, all_written, model_server, settings_of, under_load
from benchmarks.kit.harness import prepared, present
from benchmarks.kit.process import ready, running_proxy, until
from whetstone.backup.create import create
from whetstone.backup.restore import check, restore
from whetstone.config.settings import Settings
from whetstone.database.engine import connect

BEFORE_S, AFTER_S = 6.0, 3.0


def run(data: Path, args: argparse.Namespace) -> Report:
    """Make the whole run."""
    seen, file = Report(), data / "backup.tar"
    with model_server() as vllm_url:
        settings = settings_of(data / "data", None, vllm_url)
        settings.data.mkdir()
        with prepared(settings), running_proxy(settings, data / "proxy.log") as (url, _):
            before = asyncio.run(_play(seen, settings, url, file, args))
        shutil.rmtree(settings.data)
        seen.faults += [f"restore --check: {fault}" for fault in check(file, settings).faults]
        seen.faults += restore(file, settings).faults
        restored_files = sorted(path.name for path in (settings.data / "journal").iterdir())
        with running_proxy(settings, data / "restored.log") as (url, _):
            asyncio.run(_serve(seen, url))
        engine = connect(settings.database_url)
        ledger = read_ledger(engine)
        engine.dispose()
    later = len(seen.run.received.completions) - len(before.completions)
    seen.run.received = before
    seen.lost_or_twice(ledger)
    seen.figures["received after the backup began"] = f"{later} answers"
    seen.figures["journal's copy"] = f"{len(restored_files)} files"
    seen.faults += present(
        {"no answer was received before the backup, or none after it": not before.completions or not later}
    )
    return seen


async def _play(seen: Report, settings: Settings, url: str, file: Path, args: argparse.Namespace) -> AppLedger:
    """Back up under load. Return what apps had received when it began."""
    load = under_load(seen, [url], connections=args.connections, rate=args.rate, seed=args.seed)
    async with load:
        await asyncio.sleep(BEFORE_S)
        received = seen.run.received
        before = AppLedger(dict(received.completions), dict(received.feedback))
        began = asyncio.get_running_loop().time()
        made = await asyncio.to_thread(create, settings, file, None, secrets=False)
        took_s = asyncio.get_running_loop().time() - began
        seen.figures["backup"] = f"{made.bytes / 2**20:.1f} MiB in {took_s:.2f} s"
        await asyncio.sleep(AFTER_S)
    return before


async def _serve(seen: Report, url: str) -> None:
    """Wait until a proxy on the restored folder serves, and has written what the journal's copy has."""
    async with app_session(120) as session:
        if not await until(lambda: ready(session, url), START_S):
            raise SystemExit("the proxy did not start on the restored folder")
        await all_written(seen, session, url)
