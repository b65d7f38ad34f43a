"""Check that retention blocks no writer: half of 2,000,000 completions are deleted while others are written.

Fills a database of its own, then deletes what is older than its middle, as the judging worker does where
`privacy.keep_days` is set. Meanwhile a proxy's writer continues with new conversations. Exit 0 only if no transaction
of the deletion takes long, no write waits long, everything due is deleted, and the roll-ups match what is left.
"""

import argparse
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from rich.console import Console
from rich.table import Table
from sqlalchemy import Connection, Engine, func, select, text

from benchmarks.kit.check import data_folder, verdict
from benchmarks.kit.postgres import database_url
from benchmarks.scale.__main__ import BLOCK_ROWS, filled
from benchmarks.scale.pages import percentile
from benchmarks.scale.rows import PROJECT, write_conversation
from judge.maintenance.rollups import roll_up
from migrations import schema
from whetstone.database.engine import giving_way
from whetstone.privacy.eraser import erasing
from whetstone.privacy.store import Target

MOST_TRANSACTION_S, MOST_WAIT_S = 1.0, 2.0
"""Longest time of one transaction of the deletion, and of a write beside it."""
EVERY_S = 0.02
"""Time between two writes of the proxy."""
ADD_UP_EVERY = 50
"""After this many transactions of the deletion its changes are rolled up, as the judging worker does every few seconds.
"""
_LEFT = text("SELECT coalesce(sum(completions), 0) FROM admin_completion_hours WHERE project = :project")


@dataclass
class Ran:
    """The results of a run."""

    deleted: int = 0
    """Trajectories deleted."""
    seconds: float = 0.0
    transactions_s: list[float] = field(default_factory=list)
    alone_s: list[float] = field(default_factory=list)
    """Writes before the deletion."""
    beside_s: list[float] = field(default_factory=list)
    """Writes while it ran."""
    faults: list[str] = field(default_factory=list)


@contextmanager
def timed(took_s: list[float], engine: Engine) -> Iterator[Connection]:
    """Yield a transaction, and record its time."""
    began = time.perf_counter()
    with engine.begin() as connection:
        yield connection
    took_s.append(time.perf_counter() - began)


def write_until(over: threading.Event, engine: Engine, took_s: list[float]) -> None:
    """Write as a proxy's writer does, a call now and then, each in a transaction; record how long each took."""
    while not over.wait(EVERY_S):
        with timed(took_s, engine) as connection:
            write_conversation(connection, len(took_s))


def prove(engine: Engine, before: datetime, now: datetime) -> Ran:
    """Delete what is older than `before`, and write beside it."""
    ran, over = Ran(), threading.Event()
    took_s: list[float] = []
    with ThreadPoolExecutor(1) as threads:
        writer = threads.submit(write_until, over, engine, took_s)
        try:
            time.sleep(50 * EVERY_S)
            ran.alone_s = list(took_s)
            began = time.perf_counter()
            row = _delete(engine, Target(PROJECT, "age", before.isoformat()), now, ran)
            ran.seconds, ran.deleted = time.perf_counter() - began, int(row["trajectories"])
        finally:
            over.set()
    ran.beside_s = took_s[len(ran.alone_s) :]
    if error := writer.exception():
        ran.faults.append(f"a write failed: {error!r}")
    roll_up(engine)
    ran.faults += _wrong(engine, before, ran)
    return ran


def _delete(engine: Engine, target: Target, now: datetime, ran: Ran) -> Any:
    """Delete like `whetstone.privacy.eraser.run`, with its transactions timed."""
    transactions, result = erasing(target, now), None
    while True:
        try:
            work = transactions.send(result)
        except StopIteration as end:
            return end.value
        with giving_way(engine), timed(ran.transactions_s, engine) as connection:
            result = work(connection)
        if len(ran.transactions_s) % ADD_UP_EVERY == 0:
            roll_up(engine)


def _wrong(engine: Engine, before: datetime, ran: Ran) -> list[str]:
    t, c = schema.trajectories.c, schema.completions.c
    with engine.connect() as connection:
        old = connection.scalar(select(func.count()).where(t.last_seen_at < before))
        left = connection.scalar(select(func.count()).where(c.project == PROJECT))
        counted = connection.scalar(_LEFT, {"project": PROJECT})
    faults = [f"{old} trajectories are still there"] if old else []
    if counted != left:
        faults.append(f"the roll-ups say {counted} completions, there are {left}")
    if not ran.deleted:
        faults.append("nothing was deleted")
    longest = (
        ("a transaction of the deletion", max(ran.transactions_s, default=0.0), MOST_TRANSACTION_S),
        ("a write beside it", max(ran.beside_s, default=0.0), MOST_WAIT_S),
    )
    return faults + [f"{what} took {took_s:.2f} s" for what, took_s, most_s in longest if took_s > most_s]


def show(ran: Ran, title: str, console: Console) -> None:
    """Print the results."""
    table = Table("what", "count", "median ms", "p99 ms", "longest ms", title=title)
    for what, took_s in (
        ("transactions of the deletion", ran.transactions_s),
        ("writes before it", ran.alone_s),
        ("writes beside it", ran.beside_s),
    ):
        took_ms = [1000 * one for one in took_s] or [float("nan")]
        figures = (statistics.median(took_ms), percentile(took_ms, 0.99), max(took_ms))
        table.add_row(what, f"{len(took_s):,}", *(f"{figure:.1f}" for figure in figures))
    console.print(table)
    rate = ran.deleted / ran.seconds if ran.seconds else 0
    console.print(f"{ran.deleted:,} trajectories in {ran.seconds:.0f} s, {rate:.0f} a second", highlight=False)


def main() -> int:
    """Run the check."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--completions", type=int, default=2_000_000)
    parser.add_argument("--database", choices=("sqlite", "postgresql"), default="sqlite")
    args = parser.parse_args()
    console, blocks = Console(width=120), max(2, args.completions // BLOCK_ROWS)
    with (
        data_folder("retention", None) as data,
        database_url(args.database) as url,
        filled(url, data / "data", blocks, console) as engine,
    ):
        now = datetime.now(UTC)
        ran = prove(engine, now - timedelta(hours=blocks / 2), now)
    show(ran, f"{args.database}, {blocks * BLOCK_ROWS:,} completions, the older half goes", console)
    return verdict(ran.faults, console)


if __name__ == "__main__":
    sys.exit(main())
