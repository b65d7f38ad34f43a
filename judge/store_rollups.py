"""The judge's SQL of roll-ups: notes of what changed out, their sums in. Knows pairs of tables, no column's meaning.

Notes are taken in the order of their numbers and by one worker at a time. So none that takes another one back is taken
before it, and an hour's row that has come to nothing is nothing: it goes.
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
"""What is counted: its table of hours, and that of what changed."""

Key = tuple[str | int, ...]
"""Which row of the hours: the values of its primary key."""
Amounts = tuple[float, ...]
"""What is added to its measures, in their order."""


@dataclass(frozen=True, slots=True)
class Note:
    """One change."""

    key: Key
    amounts: Amounts


def take(connection: Connection, what: str, limit: int) -> list[Note]:
    """The oldest notes, at most so many; they are gone with this transaction."""
    hours, changes = PAIRS[what]
    keys, measures = _keys(hours), _measures(hours)
    columns = [changes.c.id, *(changes.c[name] for name in (*keys, *measures))]
    # Not SKIP LOCKED: who comes second waits, and takes what follows.
    query = select(*columns).order_by(changes.c.id).limit(limit).with_for_update()
    rows = connection.execute(query).all()
    if rows:
        connection.execute(changes.delete().where(changes.c.id.in_([row.id for row in rows])))
    return [Note(tuple(row[1 : 1 + len(keys)]), tuple(row[1 + len(keys) :])) for row in rows]


def add(connection: Connection, what: str, sums: Mapping[Key, Amounts]) -> None:
    """Add them to the hours."""
    hours, _ = PAIRS[what]
    if not sums:
        return
    keys, measures = _keys(hours), _measures(hours)
    # In one order, whoever adds to several.
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
    """What counts nothing goes; a rest of its sums is what arithmetic left."""
    is_it = [hours.c[name] == bindparam(f"its_{name}") for name in _keys(hours)]
    counts = [hours.c[name] for name in _measures(hours) if not isinstance(hours.c[name].type, Float)]
    return hours.delete().where(*is_it, *(column == 0 for column in counts))
