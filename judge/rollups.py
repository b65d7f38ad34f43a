"""Roll-ups, what dashboards read: notes of what changed are added to the hours they belong to. No SQL, no Celery.

What this costs grows with what changed since it was last done, whenever that was. A worker that dies has added a
chunk whole or not at all: taking its notes and adding them is one transaction.
"""

import math
from collections import defaultdict
from collections.abc import Iterable

from sqlalchemy import Engine

from judge import store_rollups as store
from judge.store_rollups import Amounts, Key, Note
from migrations.database import giving_way

AT_ONCE = 2_000
"""Notes of one transaction: some 30 ms, for which SQLite lets nobody else write."""


def roll_up(engine: Engine, at_once: int = AT_ONCE) -> int:
    """Add all notes that there are; how many those were.

    Raises:
        sqlalchemy.exc.DBAPIError: the database is away. Each chunk before that stands.
    """
    return sum(_roll_up(engine, what, at_once) for what in store.PAIRS)


def _roll_up(engine: Engine, what: str, at_once: int) -> int:
    total = 0
    while True:
        with giving_way(engine), engine.begin() as connection:
            notes = store.take(connection, what, at_once)
            store.add(connection, what, together(notes))
        total += len(notes)
        if len(notes) < at_once:
            return total


def together(notes: Iterable[Note]) -> dict[Key, Amounts]:
    """The sums of the notes of each hour's row, in any order the same; without those that come to nothing."""
    several: dict[Key, list[Amounts]] = defaultdict(list)
    for note in notes:
        several[note.key].append(note.amounts)
    sums = {key: tuple(_sum(values) for values in zip(*amounts, strict=True)) for key, amounts in several.items()}
    return {key: amounts for key, amounts in sums.items() if any(amounts)}


def _sum(values: tuple[float, ...]) -> float:
    return sum(values) if all(isinstance(value, int) for value in values) else math.fsum(values)
