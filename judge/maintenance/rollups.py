"""Roll up notes of changes into the hours that dashboards read.

The cost grows with the number of changes since the last run, not with the time since then. If a worker dies, a chunk is
added completely or not at all: taking its notes and adding them is one transaction.

Notes are taken in the order of their numbers and by one worker at a time. So a note that reverses another is never
taken before it, and an hour's row whose counts are all 0 can be deleted.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import cache

from sqlalchemy import Connection, Delete, Engine, Float, Table, bindparam, select
from sqlalchemy.dialects import postgresql, sqlite

from migrations import schema
from whetstone.database.engine import giving_way

AT_ONCE = 2_000
"""Notes of one transaction: about 30 ms, during which SQLite allows no other writer."""
PAIRS: dict[str, tuple[Table, Table]] = {
    "trajectories": (schema.trajectory_hours, schema.trajectory_changes),
    "completions": (schema.completion_hours, schema.completion_changes),
    "feedback": (schema.feedback_hours, schema.feedback_changes),
}
"""What is counted -> its table of hours, and its table of changes."""

Key = tuple[str | int, ...]
"""Primary key of a row of the hours."""
Amounts = tuple[float, ...]
"""The amounts to add to its measures, in their order."""


Note = tuple[Key, Amounts]
"""One change."""


def roll_up(engine: Engine, at_once: int = AT_ONCE) -> int:
    """Add all notes that exist; return their number.

    Raises:
        sqlalchemy.exc.DBAPIError: the database is unreachable. Each earlier chunk stays.
    """
    return sum(_roll_up(engine, hours, changes, at_once) for hours, changes in PAIRS.values())


def _roll_up(engine: Engine, hours: Table, changes: Table, at_once: int) -> int:
    total = 0
    while True:
        with giving_way(engine), engine.begin() as connection:
            notes = take(connection, hours, changes, at_once)
            add(connection, hours, together(notes))
        total += len(notes)
        if len(notes) < at_once:
            return total


def take(connection: Connection, hours: Table, changes: Table, limit: int) -> list[Note]:
    """Take the oldest notes, at most `limit`; this transaction deletes them."""
    keys, measures = _keys(hours), _measures(hours)
    # Not SKIP LOCKED: a second worker waits, and takes the notes that follow.
    query = select(changes.c.id, *(changes.c[name] for name in (*keys, *measures))).order_by(changes.c.id)
    rows = connection.execute(query.limit(limit).with_for_update()).all()
    if rows:
        connection.execute(changes.delete().where(changes.c.id.in_([row.id for row in rows])))
    return [(tuple(row[1 : 1 + len(keys)]), tuple(row[1 + len(keys) :])) for row in rows]


def together(notes: Iterable[Note]) -> dict[Key, Amounts]:
    """Return the sums of the notes of each hour's row, independent of their order; without sums that are 0."""
    several: dict[Key, list[Amounts]] = defaultdict(list)
    for key, amounts in notes:
        several[key].append(amounts)
    sums = {key: tuple(map(_sum, zip(*amounts, strict=True))) for key, amounts in several.items()}
    return {key: amounts for key, amounts in sums.items() if any(amounts)}


def _sum(values: tuple[float, ...]) -> float:
    return sum(values) if all(isinstance(value, int) for value in values) else math.fsum(values)


def add(connection: Connection, hours: Table, sums: Mapping[Key, Amounts]) -> None:
    """Add the sums to the hours."""
    if not sums:
        return
    keys, measures = _keys(hours), _measures(hours)
    # In a fixed order, so that writers of several rows cannot deadlock.
    ordered = sorted(sums.items())
    rows = [dict(zip((*keys, *measures), key + amounts, strict=True)) for key, amounts in ordered]
    connection.execute(_adding(connection.dialect.name, hours), rows)
    its_keys = [f"its_{name}" for name in keys]
    if less := [dict(zip(its_keys, key, strict=True)) for key, amounts in ordered if amounts[0] <= 0]:
        connection.execute(_clearing(hours), less)


def _keys(hours: Table) -> list[str]:
    return [column.name for column in hours.primary_key]


def _measures(hours: Table) -> list[str]:
    return [column.name for column in hours.c if not column.primary_key]


@cache
def _adding(dialect: str, hours: Table) -> postgresql.Insert | sqlite.Insert:
    new = (postgresql.insert if dialect == "postgresql" else sqlite.insert)(hours)
    sums = {name: hours.c[name] + new.excluded[name] for name in _measures(hours)}
    return new.on_conflict_do_update(index_elements=_keys(hours), set_=sums)


@cache
def _clearing(hours: Table) -> Delete:
    """Delete rows whose counts are 0; what is left in their sums is rounding error."""
    is_it = [hours.c[name] == bindparam(f"its_{name}") for name in _keys(hours)]
    counts = [hours.c[name] for name in _measures(hours) if not isinstance(hours.c[name].type, Float)]
    return hours.delete().where(*is_it, *(column == 0 for column in counts))
