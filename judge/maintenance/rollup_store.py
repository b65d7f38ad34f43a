"""The judge's SQL of roll-ups: take notes of changes out, add their sums to the hours.

Notes are taken in the order of their numbers and by one worker at a time. So a note that reverses another is never
taken before it, and an hour's row whose counts are all 0 can be deleted.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from sqlalchemy import Connection, Delete, Float, Table, bindparam, select
from sqlalchemy.dialects import postgresql, sqlite

from migrations import schema

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


@dataclass(frozen=True, slots=True)
class Note:
    """One change."""

    key: Key
    amounts: Amounts


def take(connection: Connection, what: str, limit: int) -> list[Note]:
    """Take the oldest notes, at most `limit`; this transaction deletes them."""
    hours, changes = PAIRS[what]
    keys, measures = _keys(hours), _measures(hours)
    columns = [changes.c.id, *(changes.c[name] for name in (*keys, *measures))]
    # Not SKIP LOCKED: a second worker waits, and takes the notes that follow.
    query = select(*columns).order_by(changes.c.id).limit(limit).with_for_update()
    rows = connection.execute(query).all()
    if rows:
        connection.execute(changes.delete().where(changes.c.id.in_([row.id for row in rows])))
    return [Note(tuple(row[1 : 1 + len(keys)]), tuple(row[1 + len(keys) :])) for row in rows]


def add(connection: Connection, what: str, sums: Mapping[Key, Amounts]) -> None:
    """Add the sums to the hours."""
    hours, _ = PAIRS[what]
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
