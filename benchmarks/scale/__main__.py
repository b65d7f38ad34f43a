"""Check that the store stays fast as it grows: our queries on 20,000 completions and on 2,000,000.

Fills a database of its own, runs each query repeatedly with different ids, lets the database grow a hundredfold, and
runs them again. Exit 0 only if no query takes more than twice as long. SQLite, or a PostgreSQL of its own; nothing is
served.
"""

import argparse
import asyncio
import contextlib
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table
from sqlalchemy import Connection, Engine, TextClause, text

from benchmarks.kit.check import data_folder, verdict
from benchmarks.kit.postgres import database_url
from benchmarks.kit.process import prepare
from benchmarks.scale.rows import (
    BLOCK,
    GROUPS,
    HOUR,
    MEMBERS,
    POLICY,
    PROJECT,
    TURNS,
    block_name,
    copy,
    fill,
    history_of,
)
from judge.maintenance.rollups import roll_up
from judge.store import unit_of_work as judge_store
from proxy.recording.store import Store
from proxy.trajectories.store import ThreadTables
from trainer.store.claims import Claims
from whetstone.config.settings import load
from whetstone.config.trainer import TrainerSettings
from whetstone.database.engine import connect
from whetstone.registry.projects import Store as CommandLineStore

BLOCK_ROWS = GROUPS * MEMBERS * TURNS
"""Completions of a block."""
RUNS, WARM = 60, 10
"""How often a query runs, and how often before it counts."""
MOST_TIMES = 2.0
"""Most time of a query on the large database, as a multiple of its time on the small one."""
SAME_MS = 0.2
"""Medians that differ by less count as equal."""
_BY_APPS_ID = text("SELECT id FROM completions WHERE project = :project AND upstream_id = :id")
_LAST = text("SELECT * FROM admin_completions WHERE project = :project ORDER BY created_at DESC LIMIT 50")
_ROLL_UP = text("SELECT * FROM admin_steps WHERE project = :project ORDER BY step DESC LIMIT 50")


def queries_of(engine: Engine, blocks: int, seed: int, loop: asyncio.Runner) -> dict[str, Callable[[], object]]:
    """Return the queries by name, on a database with this many blocks."""
    reader = engine.execution_options(isolation_level="AUTOCOMMIT")
    dice, run = random.Random(seed), loop.run
    store, threads = Store(engine), ThreadTables(engine, PROJECT)
    since_s = (datetime.now(UTC) - 24 * HOUR).timestamp()

    def claim() -> None:
        """Claim a step, and roll back."""
        settings = TrainerSettings(groups_per_step=8, max_groups_per_step=16, max_staleness=1000)
        with engine.connect() as connection:
            require(Claims(connection, PROJECT, settings, datetime.now(UTC)).next(POLICY))
            connection.rollback()

    def idle_trajectories() -> None:
        with reader.connect() as connection:
            judge_store.idle(connection, idle_since(), 500)

    def idle_since() -> datetime:
        return datetime.now(UTC) - 48 * HOUR

    def ask(query: TextClause, **values: str) -> object:
        with reader.connect() as connection:
            return connection.execute(query, {"project": PROJECT, **values}).all()

    def group() -> str:
        return f"{block_name(dice.randrange(blocks))}-g{dice.randrange(GROUPS)}"

    def trajectory() -> str:
        return f"{block_name(dice.randrange(blocks))}-t{dice.randrange(GROUPS)}-{dice.randrange(MEMBERS)}"

    def apps_id() -> str:
        name = trajectory()
        return f"{name[: len(BLOCK)]}-chatcmpl-{BLOCK}{name[len(BLOCK) :]}-c0"

    def history() -> bytes:
        return history_of(f"{BLOCK}{trajectory()[len(BLOCK) :]}-c{dice.randrange(TURNS)}")

    return {
        "claim of a step": claim,
        "thread, by conversation": lambda: run(threads.heads([history()], None, since_s)),
        "thread, by name": lambda: run(threads.trail(trajectory(), since_s)),
        "thread, by unknown name": lambda: run(threads.trail("nobody", since_s)),
        "retry of a call": lambda: run(threads.unanswered("nothing", None, since_s)),
        "trajectory, by id": lambda: require(store.trajectory(PROJECT, trajectory())),
        "completion, by the app's id": lambda: require(ask(_BY_APPS_ID, id=apps_id())),
        "group, by id": lambda: require(store.group(PROJECT, group())),
        "members of a group": lambda: require(store.group_members(PROJECT, group())),
        "feedback, by id": lambda: require(store.feedback(PROJECT, f"{trajectory()}-f")),
        "last 50 completions": lambda: ask(_LAST),
        "last 50 steps": lambda: ask(_ROLL_UP),
        "whether the judge has work": lambda: judge_store.look(engine, datetime.now(UTC), idle_since()),
        "idle trajectories": idle_trajectories,
    }


def require(row: object) -> None:
    assert row, "the requested row does not exist"


def timed(sides: dict[str, dict[str, Callable[[], object]]]) -> dict[str, dict[str, float]]:
    """Return the median milliseconds of each query on each side; the sides take turns."""
    took: dict[str, dict[str, list[float]]] = {side: {name: [] for name in queries} for side, queries in sides.items()}
    for _ in range(WARM + RUNS):
        for side, queries in sides.items():
            for name, ask in queries.items():
                began = time.perf_counter()
                ask()
                took[side][name].append((time.perf_counter() - began) * 1000)
    return {side: {name: statistics.median(ms[WARM:]) for name, ms in of.items()} for side, of in took.items()}


def slower(small: dict[str, float], large: dict[str, float]) -> list[str]:
    """Return the queries that take too long on the large database."""
    return [name for name, took in large.items() if took > MOST_TIMES * small[name] and took - small[name] > SAME_MS]


@contextlib.contextmanager
def filled(
    url: str | None,
    data: Path,
    blocks: int,
    console: Console,
    dress: Callable[[Connection], None] = lambda _: None,
) -> Iterator[Engine]:
    """Yield a database with this many blocks and up-to-date statistics. `dress`: adds to the first block."""
    data.mkdir()
    settings = load(environment={}, data=data, policy=POLICY, broker="memory://", database=url)
    prepare(settings)
    engine = connect(settings.database_url)
    try:
        CommandLineStore(engine).set_policy_state(PROJECT, POLICY, "training")
        with engine.begin() as connection:
            fill(connection, datetime.now(UTC))
            dress(connection)
        for number in track(range(1, blocks), description=f"growing to {blocks} blocks", console=console):
            with engine.begin() as connection:
                copy(connection, number)
            roll_up(engine)
        with engine.execution_options(isolation_level="AUTOCOMMIT").connect() as connection:
            connection.execute(text("ANALYZE"))
        yield engine
    finally:
        engine.dispose()


def main() -> int:
    """Run the check."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--completions", type=int, default=2_000_000, help="of the large database")
    parser.add_argument("--database", choices=("sqlite", "postgresql"), default="sqlite")
    parser.add_argument("--seed", type=int, default=0, help="which ids are requested")
    args = parser.parse_args()
    console, blocks = Console(width=120), {"small": 1, "large": max(2, args.completions // BLOCK_ROWS)}
    with data_folder("scale", None) as data, asyncio.Runner() as loop, contextlib.ExitStack() as opened:
        sides = {}
        for side, count in blocks.items():
            url = opened.enter_context(database_url(args.database))
            engine = opened.enter_context(filled(url, data / side, count, console))
            sides[side] = queries_of(engine, count, args.seed, loop)
        small, large = timed(sides).values()
    title = f"median ms on {args.database}: {BLOCK_ROWS:,} and {blocks['large'] * BLOCK_ROWS:,} completions"
    table = Table("query", "small", "large", "times", title=title)
    for name, took in large.items():
        table.add_row(name, f"{small[name]:.2f}", f"{took:.2f}", f"{took / small[name]:.2f}")
    console.print(table)
    faults = [f"{name} takes {large[name] / small[name]:.1f} times as long" for name in slower(small, large)]
    return verdict(faults, console)


if __name__ == "__main__":
    sys.exit(main())
