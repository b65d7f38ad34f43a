"""The skeleton that checks with a stack share: folder and console, database, workers, kills, what does not hold."""

import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from sqlalchemy import Engine

from benchmarks.kit.check import data_folder, end_on_sigterm
from migrations.run import upgrade
from whetstone.config.settings import Settings
from whetstone.database.engine import connect
from whetstone.registry.projects import Store


@contextmanager
def opened(check: str, given: Path | None, width: int | None = 120) -> Iterator[tuple[Path, Console]]:
    """Yield the folder and the console of a check. From now on SIGTERM ends it as SIGINT does."""
    end_on_sigterm()
    with data_folder(check, given) as data:
        yield data, Console(width=width)


@contextmanager
def prepared(settings: Settings) -> Iterator[Engine]:
    """Create the tables, and the rows of the settings' project and policies; yield an engine for them."""
    upgrade(settings.database_url)
    engine = connect(settings.database_url)
    try:
        Store(engine).prepare(settings)
        yield engine
    finally:
        engine.dispose()


def worker_command(name: str, queue: str, *pool: str, program: Sequence[str] = ()) -> list[str]:
    """Return the command of the worker `judge` or `trainer`, on the pool that these options of Celery choose.

    `program` starts its Celery in another environment.
    """
    start = program or (sys.executable, "-m", "celery", "-A", f"{name}.tasks")
    return [
        *start,
        "worker",
        "--queues",
        queue,
        *pool,
        "--hostname",
        f"{name}@%h",
        "--loglevel",
        "INFO",
        "--without-gossip",
        "--without-mingle",
    ]


def evenly(targets: Sequence[str], count: int, rng: random.Random) -> list[str]:
    """Return `count` targets in random order, each as often as the others."""
    chosen = [targets[number % len(targets)] for number in range(count)]
    rng.shuffle(chosen)
    return chosen


def present(faults: Mapping[str, object]) -> list[str]:
    """Return the faults whose condition is true."""
    return [fault for fault, is_present in faults.items() if is_present]


def first(faults: Mapping[str, object]) -> str | None:
    """Return the first fault whose condition is true; None where there is none."""
    return next(iter(present(faults)), None)
