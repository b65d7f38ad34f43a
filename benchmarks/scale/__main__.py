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
from migrations.run import upgrade
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


class Queries:
    """The queries, on a database with this many blocks."""

    def __init__(self, engine: Engine, blocks: int, seed: int, loop: asyncio.Runner) -> None:
        self._engine, self._blocks, self._loop = engine, blocks, loop
        self._reader = engine.execution_options(isolation_level="AUTOCOMMIT")
        self._dice = random.Random(seed)
        self._store = Store(engine)
        self._threads = ThreadTables(engine, PROJECT)
        self._since_s = (datetime.now(UTC) - 24 * HOUR).timestamp()

    def all(self) -> dict[str, Callable[[], object]]:
        """Return the queries by name."""
        run = self._loop.run
        return {
            "claim of a step": self._claim,
            "thread, by conversation": lambda: run(self._threads.heads([self._history()], None, self._since_s)),
            "thread, by name": lambda: run(self._threads.trail(self._trajectory(), self._since_s)),
            "thread, by unknown name": lambda: run(self._threads.trail("nobody", self._since_s)),
            "retry of a call": lambda: run(self._threads.unanswered("nothing", None, self._since_s)),
            "trajectory, by id": lambda: require(self._store.trajectory(PROJECT, self._trajectory())),
            "completion, by the app's id": lambda: require(self._ask(_BY_APPS_ID, id=self._apps_id())),
            "group, by id": lambda: require(self._store.group(PROJECT, self._group())),
            "members of a group": lambda: require(self._store.group_members(PROJECT, self._group())),
            "feedback, by id": lambda: require(self._store.feedback(PROJECT, f"{self._trajectory()}-f")),
            "last 50 completions": lambda: self._ask(_LAST),
            "last 50 steps": lambda: self._ask(_ROLL_UP),
            "whether the judge has work": lambda: judge_store.look(self._engine, datetime.now(UTC), self._idle()),
            "idle trajectories": self._idle_trajectories,
        }

    def _claim(self) -> None:
        """Claim a step, and roll back."""
        with self._engine.connect() as connection:
            settings = TrainerSettings(groups_per_step=8, max_groups_per_step=16, max_staleness=1000)
            claim = Claims(connection, PROJECT, settings, datetime.now(UTC)).next(POLICY)
            connection.rollback()
        require(claim)

    def _idle_trajectories(self) -> None:
        with self._reader.connect() as connection:
            judge_store.idle(connection, self._idle(), 500)

    def _idle(self) -> datetime:
        return datetime.now(UTC) - 48 * HOUR

    def _ask(self, query: TextClause, **values: str) -> object:
        with self._reader.connect() as connection:
            return connection.execute(query, {"project": PROJECT, **values}).all()

    def _block(self) -> str:
        return block_name(self._dice.randrange(self._blocks))

    def _group(self) -> str:
        return f"{self._block()}-g{self._dice.randrange(GROUPS)}"

    def _trajectory(self) -> str:
        return f"{self._block()}-t{self._dice.randrange(GROUPS)}-{self._dice.randrange(MEMBERS)}"

    def _apps_id(self) -> str:
        trajectory_id = self._trajectory()
        return f"{trajectory_id[: len(BLOCK)]}-chatcmpl-{BLOCK}{trajectory_id[len(BLOCK) :]}-c0"

    def _history(self) -> bytes:
        return history_of(f"{BLOCK}{self._trajectory()[len(BLOCK) :]}-c{self._dice.randrange(TURNS)}")


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
    upgrade(settings.database_url)
    engine = connect(settings.database_url)
    try:
        CommandLineStore(engine).prepare(settings)
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
            sides[side] = Queries(engine, count, args.seed, loop).all()
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
