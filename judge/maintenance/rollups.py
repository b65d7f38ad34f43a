"""Roll up notes of changes into the hours that dashboards read.

The cost grows with the number of changes since the last run, not with the time since then. If a worker dies, a chunk is
added completely or not at all: taking its notes and adding them is one transaction.
"""

import math
from collections import defaultdict
from collections.abc import Iterable

from sqlalchemy import Engine

from judge.maintenance import rollup_store as store
from judge.maintenance.rollup_store import Amounts, Key, Note
from whetstone.database.engine import giving_way

AT_ONCE = 2_000
"""Notes of one transaction: about 30 ms, during which SQLite allows no other writer."""


def roll_up(engine: Engine, at_once: int = AT_ONCE) -> int:
    """Add all notes that exist; return their number.

    Raises:
        sqlalchemy.exc.DBAPIError: the database is unreachable. Each earlier chunk stays.
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
    """Return the sums of the notes of each hour's row, independent of their order; without sums that are 0."""
    several: dict[Key, list[Amounts]] = defaultdict(list)
    for note in notes:
        several[note.key].append(note.amounts)
    sums = {key: tuple(_sum(values) for values in zip(*amounts, strict=True)) for key, amounts in several.items()}
    return {key: amounts for key, amounts in sums.items() if any(amounts)}


def _sum(values: tuple[float, ...]) -> float:
    return sum(values) if all(isinstance(value, int) for value in values) else math.fsum(values)
