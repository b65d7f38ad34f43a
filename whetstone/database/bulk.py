"""Write many rows with one statement, bypassing SQLAlchemy's work for each row.

SQLAlchemy makes a dict of every row and calls every column's type for its value, which takes longer than the database
itself. Here a statement is built once per table, and rows go to the driver in its own form: to SQLite as tuples; to
PostgreSQL, whose driver binds row by row, as one JSON array that the server unpacks.

Values in rows: JSON and lists of numbers as JSON in UTF-8 (`as_json_bytes`), instants with their time zone, and the
types that both databases have: text, numbers, booleans, bytes. All rows of a statement have the same columns in the
same order.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any

import msgspec
from msgspec.structs import asdict, astuple
from sqlalchemy import (
    ARRAY,
    Column,
    ColumnElement,
    Connection,
    LargeBinary,
    Table,
    Text,
    any_,
    bindparam,
    func,
    select,
)

from whetstone.database.bulk_sqlite import Plan, all_as_sqlite_takes, as_sqlite_takes, check_zone
from whetstone.database.engine import read_sqlite, run_sqlite
from whetstone.database.types import Utc, as_json, is_json

Pause = Callable[[], None]
"""Lets other writers run. Called between SQLite statements, which then have few rows; PostgreSQL does not need it."""
Row = Mapping[str, Any] | msgspec.Struct
"""Columns and their values. Structs are built and unpacked in a third of the time of dicts."""
ROWS_AT_ONCE = (1, 2, 5, 10, 25, 50)
"""Row capacities of SQLite's insert statements. There are few sizes because SQLite caches prepared statements. Unused
capacity costs a fifth of an additional statement, before which SQLite copies each page that it will modify."""
ROWS_AT_EASE = 10
"""Rows of one SQLite statement when other writers may run in between (`pause`): half a millisecond of work."""
_PRESENT = {"sqlite": ("IN (SELECT value FROM json_each(?))", "?"), "postgresql": ("= ANY(%s)", "%s")}
"""Each database's SQL for "the id is in a list", and for a parameter."""

_encode = msgspec.json.Encoder().encode


raw_ids: Callable[[Sequence[int]], bytes] = _encode
"""Encode whole numbers as rows contain them."""


def insert_many(
    connection: Connection, table: Table, rows: Sequence[Row], on: tuple[str, ...] = (), pause: Pause | None = None
) -> None:
    """Insert the rows that violate no unique constraint (on the columns `on`; if empty, on any). `pause`: see Pause."""
    if not rows:
        return
    if connection.dialect.name == "sqlite":
        _insert_sqlite(connection, table, rows, on, pause)
    else:
        connection.exec_driver_sql(f"{_insert(table, _names(rows[0]))} {_nothing(on)}", _array(table, rows))


def _insert_sqlite(
    connection: Connection, table: Table, rows: Sequence[Row], on: tuple[str, ...], pause: Pause | None
) -> range:
    """Insert rows and return the rowids that SQLite assigned to the new ones."""
    names = _names(rows[0])
    plan, same, left = as_sqlite_takes(table, names, list(_values(rows, names)))
    inserted, last, most = 0, 0, ROWS_AT_EASE if pause else ROWS_AT_ONCE[-1]
    for start in range(0, len(left), most):
        if pause and start:
            pause()
        some = left[start : start + most]
        room = ROWS_AT_ONCE[bisect_left(ROWS_AT_ONCE, len(some))]
        values: tuple[Any, ...] = same + some[0]
        if room > 1:
            # Fill the unused capacity with numbers, which are never read: nothing binds faster.
            values = (*same, *chain.from_iterable(some), *((0,) * ((room - len(some)) * len(some[0]))), len(some))
        sql = plan.statements.get((on, room))
        if sql is None:
            sql = plan.statements[on, room] = _of_rows(table, plan, on, room)
        cursor = run_sqlite(connection, sql, values)
        if cursor.rowcount:
            inserted, last = inserted + cursor.rowcount, cursor.lastrowid or 0
    # SQLite gives each new row the number after the largest one.
    return range(last - inserted + 1, last + 1)


def insert_absent(
    connection: Connection, table: Table, rows: Sequence[Row], pause: Pause | None = None
) -> set[tuple[Any, ...]]:
    """Insert rows, most of which are expected to be new; return the keys of those inserted. `pause`: see Pause."""
    if not rows:
        return set()
    keys = tuple(column.name for column in table.primary_key)
    if connection.dialect.name == "sqlite":
        numbers = _insert_sqlite(connection, table, rows, keys, pause)
        if len(numbers) == len(rows):
            return set(_values(rows, keys))
        new_keys = f"SELECT {', '.join(keys)} FROM {table.name} WHERE rowid BETWEEN ? AND ?"
        return set(read_sqlite(connection, new_keys, (numbers.start, numbers.stop - 1)))
    sql = f"{_insert(table, _names(rows[0]))} {_nothing(())} RETURNING {', '.join(keys)}"
    return set(map(tuple, connection.exec_driver_sql(sql, _array(table, rows))))


def update_many(connection: Connection, table: Table, rows: Sequence[Row], only_null: str | None = None) -> None:
    """Update the table's rows with the same primary keys as `rows`; no two of `rows` may share a key.

    `only_null`: a column; rows in which it is not NULL are not updated.
    """
    if not rows:
        return
    keys = tuple(column.name for column in table.primary_key)
    changed = tuple(name for name in _names(rows[0]) if name not in keys)
    sql = _update(connection.dialect.name, table, changed, keys, only_null)
    if connection.dialect.name == "sqlite":
        values = all_as_sqlite_takes(table, changed + keys, _values(rows, changed + keys))
        run_sqlite(connection, sql, values, many=True)
    else:
        connection.exec_driver_sql(sql, _array(table, rows))


def among(dialect: str, column: Column[Any], ids: str = "ids") -> ColumnElement[bool]:
    """Return the condition that a column is in a list, the parameter `ids` (`listed`): one statement for any length."""
    if dialect == "postgresql":
        return column == any_(bindparam(ids, type_=ARRAY(Text)))
    return column.in_(select(func.json_each(bindparam(ids, type_=Text)).table_valued("value").c.value))


def present(connection: Connection, table: Table, project: str, ids: Sequence[str]) -> list[tuple[str, str]]:
    """Return the primary keys (project, id) of those ids that exist in the table."""
    dialect = connection.dialect.name
    among_them, here = _PRESENT[dialect]
    sql = f"SELECT project, id FROM {table.name} WHERE project = {here} AND id {among_them}"
    values = (project, listed(dialect, ids))
    if dialect == "sqlite":
        return read_sqlite(connection, sql, values)
    return [(row[0], row[1]) for row in connection.exec_driver_sql(sql, values)]


def listed(dialect: str, ids: Iterable[str]) -> Any:
    """Return the value of the parameter of `among`."""
    return list(ids) if dialect == "postgresql" else as_json(list(ids))


@cache
def _insert(table: Table, columns: tuple[str, ...]) -> str:
    """Return PostgreSQL's INSERT statement."""
    names = ", ".join(columns)
    return f"INSERT INTO {table.name} ({names}) SELECT {names} FROM {_rows_of(table)} AS n"


def _of_rows(table: Table, plan: Plan, on: tuple[str, ...], room: int) -> str:
    """Return SQLite's INSERT with capacity for `room` rows. Its parameters: the shared values, then the rows, then, if
    `room` is above 1, the number of rows."""
    marks = f"({', '.join('?' * len(plan.varying))})"
    if room > 1:
        rows = f"SELECT {'?, ' * len(plan.same)}* FROM (VALUES {', '.join([marks] * room)}) LIMIT ?"
    else:
        rows = f"VALUES ({', '.join('?' * len(plan.same + plan.varying))})"
    return f"INSERT INTO {table.name} ({', '.join(plan.same + plan.varying)}) {rows} {_nothing(on)}"


def _nothing(on: tuple[str, ...]) -> str:
    return f"ON CONFLICT ({', '.join(on)}) DO NOTHING" if on else "ON CONFLICT DO NOTHING"


@cache
def _update(dialect: str, table: Table, changed: tuple[str, ...], keys: tuple[str, ...], only_null: str | None) -> str:
    and_null = f" AND {table.name}.{only_null} IS NULL" if only_null else ""
    if dialect == "sqlite":
        changes, here = ", ".join(f"{one} = ?" for one in changed), " AND ".join(f"{one} = ?" for one in keys)
        return f"UPDATE {table.name} SET {changes} WHERE {here}{and_null}"
    changes = ", ".join(f"{one} = n.{one}" for one in changed)
    here = " AND ".join(f"{table.name}.{one} = n.{one}" for one in keys)
    return f"UPDATE {table.name} SET {changes} FROM {_rows_of(table)} AS n WHERE {here}{and_null}"


def _rows_of(table: Table) -> str:
    return f"json_populate_recordset(NULL::{table.name}, %s::json)"


def _names(row: Row) -> tuple[str, ...]:
    return row.__struct_fields__ if isinstance(row, msgspec.Struct) else tuple(row)


def _values(rows: Sequence[Row], names: tuple[str, ...]) -> Iterable[Any]:
    """Return the columns `names` of the rows, in that order: tuples, or the values of a single column."""
    picked: Callable[[Any], Any] = itemgetter(*names)
    if isinstance(rows[0], msgspec.Struct):
        picked = astuple if names == rows[0].__struct_fields__ else attrgetter(*names)
    return map(picked, rows)


def _array(table: Table, rows: Sequence[Row]) -> tuple[str]:
    """Return the rows in the form that PostgreSQL's `json_populate_recordset` takes."""
    instants, binary, documents = _to_look_at(table, _names(rows[0]))
    for column in instants:
        for instant in _values(rows, (column,)):
            check_zone(instant)
    documents = [column for column in documents if any(_values(rows, (column,)))]
    encodable = [_as_json(row, binary, documents) for row in rows] if binary or documents else rows
    return (_encode(encodable).decode(),)


@cache
def _to_look_at(table: Table, names: tuple[str, ...]) -> tuple[list[str], list[str], list[str]]:
    """Return the columns with instants, those with bytes, and those with JSON."""
    columns = [(name, table.c[name].type) for name in names]
    return (
        [name for name, kind in columns if isinstance(kind, Utc)],
        [name for name, kind in columns if isinstance(kind, LargeBinary)],
        [name for name, kind in columns if is_json(kind)],
    )


def _as_json(row: Row, binary: Sequence[str], documents: Sequence[str]) -> Mapping[str, Any]:
    values = asdict(row) if isinstance(row, msgspec.Struct) else dict(row)
    for column in binary:
        if values[column] is not None:
            values[column] = f"\\x{values[column].hex()}"
    for column in documents:
        if values[column] is not None:
            values[column] = msgspec.Raw(values[column])
    return values
