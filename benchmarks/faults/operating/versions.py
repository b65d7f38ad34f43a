"""Two proxies of different versions on one database: an upgrade under load, and both serve beside each other.

The older program is that of an earlier commit (`--old`), in a git worktree of its own, with this environment's
packages. It makes its database; this version migrates it under load; then both proxies serve.
"""

import argparse
import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from sqlalchemy import Engine, text

from benchmarks.faults.apps import read_ledger
from benchmarks.faults.operating.alerts import Scrape, fires, parse
from benchmarks.faults.operating.scene import Report, model_server, settings_of, under_load
from benchmarks.kit.harness import present
from benchmarks.kit.postgres import Postgres
from benchmarks.kit.process import ROOT, running_proxy
from migrations.run import upgrade
from whetstone import __version__
from whetstone.config.settings import Settings
from whetstone.database.engine import connect
from whetstone.registry.projects import Store
from whetstone.stack.stack import free_ports

ALERT, INFO = "WhetstoneVersionsDiffer", "whetstone_info"
OLD_S, BOTH_S = 8.0, 12.0
STAYS_S = 3700
"""The alert fires after an hour."""


def run(data: Path, args: argparse.Namespace) -> Report:
    """Make the whole run."""
    seen = Report()
    with ExitStack() as stack:
        old = stack.enter_context(worktree(args.old or before_the_last_migration(), data / "old"))
        postgres = stack.enter_context(closing(Postgres()))
        vllm_url = stack.enter_context(model_server())
        settings = settings_of(data, postgres.url, vllm_url)
        old_url = stack.enter_context(_old_proxy(old, settings, data))
        engine = connect(settings.database_url)
        stack.callback(engine.dispose)
        before = _revision(engine)
        asyncio.run(_play(seen, settings, engine, old_url, data, args))
        seen.figures["schema"] = f"revision {before} -> {_revision(engine)}"
        seen.lost_or_twice(read_ledger(engine))
        seen.faults += present({"the older version's schema is this version's": before == _revision(engine)})
    return seen


def before_the_last_migration() -> str:
    """Return the commit before the one that added the newest revision.

    Raises:
        SystemExit: this is no git repository with history.
    """
    newest = sorted((ROOT / "migrations" / "versions").glob("0*.py"))[-1]
    log = ["git", "log", "--diff-filter=A", "--format=%H", "--", str(newest.relative_to(ROOT))]
    commits = subprocess.run(log, cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    if not commits:
        raise SystemExit("the commit before the newest migration is not here: name an older version with --old COMMIT")
    return f"{commits[-1]}^"


@contextmanager
def worktree(commit: str, folder: Path) -> Iterator[Path]:
    """Check out a commit beside this one; remove it at the end."""
    subprocess.run(["git", "worktree", "add", "--quiet", "--detach", str(folder), commit], cwd=ROOT, check=True)
    try:
        # Until the next release both have the same name.
        about = folder / "whetstone" / "__init__.py"
        about.write_text(about.read_text().replace(f'"{__version__}"', f'"{__version__}+old"'))
        yield folder
    finally:
        subprocess.run(["git", "worktree", "remove", "--force", str(folder)], cwd=ROOT, check=True)


@contextmanager
def _old_proxy(old: Path, settings: Settings, data: Path) -> Iterator[str]:
    """Make the older version's database, and run its proxy."""
    (port,) = free_ports(1)
    ours = {name: value for name, value in os.environ.items() if not name.startswith("WHETSTONE_")}
    # Only what both versions know.
    environment = ours | {
        "PYTHONPATH": str(old),
        "WHETSTONE_DATA": str(data / "old-data"),
        "WHETSTONE_POLICY": settings.policy,
        "WHETSTONE_DATABASE": settings.database_url,
        "WHETSTONE_BROKER": settings.broker or "",
        "WHETSTONE_VLLM__URLS": f'["{settings.vllm.urls[0]}"]',
        "WHETSTONE_PROXY__PORT": str(port),
    }
    migrate = [sys.executable, "-m", "whetstone.cli.main", "migrate"]
    subprocess.run(migrate, cwd=old, env=environment, check=True, stdout=subprocess.DEVNULL)
    with (data / "old-proxy.log").open("wb") as log:
        command = [sys.executable, "-m", "proxy"]
        with subprocess.Popen(command, cwd=old, env=environment, stdout=log, stderr=log) as process:
            try:
                yield f"http://127.0.0.1:{port}"
            finally:
                process.kill()


async def _play(
    seen: Report, settings: Settings, engine: Engine, old_url: str, data: Path, args: argparse.Namespace
) -> None:
    load = {"connections": args.connections, "rate": args.rate, "seed": args.seed}
    async with under_load(seen, [old_url], **load):
        await asyncio.sleep(OLD_S / 2)
        await asyncio.to_thread(_upgrade, settings, engine)
        await asyncio.sleep(OLD_S / 2)
    with running_proxy(settings, data / "proxy.log") as (url, _):
        async with under_load(seen, [url, old_url], first_number=10**7, **load) as (session, watch):
            await asyncio.sleep(BOTH_S)
            async with session.get(f"{old_url}/metrics") as response:
                of_old = parse(await response.text())
            await _check_alert(seen, watch.scrapes[-1].series, of_old)


async def _check_alert(seen: Report, of_new: Mapping[str, float], of_old: Mapping[str, float]) -> None:
    """Note whether the alert fires."""
    versions = {name: value for of_one in (of_new, of_old) for name, value in of_one.items() if INFO in name}
    seen.figures["versions"] = ", ".join(sorted(versions))
    fired = await asyncio.to_thread(fires, [Scrape(0.0, versions)], ALERT, 0.0, STAYS_S)
    seen.figures[f"alert {ALERT}"] = "fires after an hour of the same" if fired else "does not fire"
    seen.faults += present({f"{ALERT} does not fire": not fired})


def _upgrade(settings: Settings, engine: Engine) -> None:
    """Do what `whetstone migrate` does."""
    upgrade(settings.database_url)
    Store(engine).prepare(settings)


def _revision(engine: Engine) -> str:
    with engine.connect() as connection:
        return str(connection.execute(text("SELECT version_num FROM alembic_version")).scalar_one())
