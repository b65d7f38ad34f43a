"""Many rows in one statement, past SQLAlchemy's work for each of them. Knows both drivers; no table of ours.

SQLAlchemy makes a dict of every row and asks every column's type about its value, which takes longer than the database
does. Here a statement is made once from the table, and rows go to the driver in its own form: to SQLite as tuples, to
PostgreSQL, whose driver binds row by row, as one JSON array that the server takes apart.

Values in rows: JSON and lists of numbers as `msgspec.Raw` (`raw_json`), instants with their zone, and what both
databases have: text, numbers, truth, bytes. All rows of a statement have the same columns in the same order.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from itertools import chain
from operator import itemgetter
from typing import Any

import msgspec
from sqlalchemy import ARRAY, BindParameter, ColumnElement, Connection, LargeBinary, Table, Text, any_, bindparam, func
from sqlalchemy import select as select_
from sqlalchemy.schema import Column

from migrations.types import Utc, as_json, as_json_bytes, is_json

Row = Mapping[str, Any]
ROWS_AT_ONCE = (50, 10)
"""Rows in one statement of SQLite, as long as there are so many; the rest goes one by one. Few sizes, for it keeps what
it has prepared; and a row that is a step of its own has Python's lock given up and taken again."""
ROWS = "$rows"

_encode = msgspec.json.Encoder().encode


def raw_json(value: Any) -> msgspec.Raw:
    """JSON as rows hold it.

    Raises:
        ValueError, TypeError: as `as_json`.
    """
    return msgspec.Raw(as_json_bytes(value))


def insert_many(connection: Connection, table: Table, rows: Sequence[Row], on: tuple[str, ...] = ()) -> None:
    """Insert those rows that no unique key (of the columns `on`; none: any) forbids."""
    if not rows:
        return
    statement = _insert(connection.dialect.name, table, tuple(rows[0]), on)
    if connection.dialect.name != "sqlite":
        connection.exec_driver_sql(statement.sql, statement.fill(rows))
        return
    left = statement.fill(rows)
    for count in ROWS_AT_ONCE:
        while len(left) >= count:
            values = tuple(chain.from_iterable(left[:count]))
            connection.exec_driver_sql(_of_rows(statement.sql, len(rows[0]), count), values)
            left = left[count:]
    if left:
        connection.exec_driver_sql(_of_rows(statement.sql, len(rows[0]), 1), left)


def insert_absent(connection: Connection, table: Table, rows: Sequence[Row]) -> set[tuple[Any, ...]]:
    """Insert rows that were not there when this transaction looked; the primary keys of those that it inserted.

    On SQLite nobody else can have written meanwhile; on PostgreSQL somebody may have.
    """
    if not rows:
        return set()
    keys = tuple(column.name for column in table.primary_key)
    if connection.dialect.name == "sqlite":
        insert_many(connection, table, rows, keys)
        return set(map(itemgetter(*keys), rows))
    statement = _insert("postgresql", table, tuple(rows[0]), ())
    inserted = connection.exec_driver_sql(f"{statement.sql} RETURNING {', '.join(keys)}", statement.fill(rows))
    return {tuple(row) for row in inserted}


def update_many(connection: Connection, table: Table, rows: Sequence[Row], only_null: str | None = None) -> None:
    """Set what each row says of the one with its primary key, which no other row of them has.

    `only_null`: a column; where the table has it filled, nothing is set.
    """
    if rows:
        statement = _update(connection.dialect.name, table, tuple(rows[0]), only_null)
        connection.exec_driver_sql(statement.sql, statement.fill(rows))


def among(dialect: str, column: Column[Any], ids: str = "ids") -> ColumnElement[bool]:
    """Whether a column is one of a list, which is the parameter `ids` (`listed`): one statement for any length."""
    if dialect == "postgresql":
        told: BindParameter[Any] = bindparam(ids, type_=ARRAY(Text))
        return column == any_(told)
    return column.in_(select_(func.json_each(bindparam(ids, type_=Text)).table_valued("value").c.value))


def listed(dialect: str, ids: Iterable[str]) -> Any:
    """The parameter of `among`."""
    return list(ids) if dialect == "postgresql" else as_json(list(ids))


@dataclass(frozen=True)
class _Statement:
    sql: str
    fill: Callable[[Sequence[Row]], Any]
    """The driver's parameters of rows."""


@cache
def _insert(dialect: str, table: Table, columns: tuple[str, ...], on: tuple[str, ...]) -> _Statement:
    names, unique = ", ".join(columns), f"({', '.join(on)}) " if on else ""
    conflict = f"ON CONFLICT {unique}DO NOTHING"
    if dialect == "sqlite":
        return _Statement(f"INSERT INTO {table.name} ({names}) VALUES {ROWS} {conflict}", _tuples(table, columns))
    source = f"SELECT {names} FROM {_rows_of(table)} AS n"
    return _Statement(f"INSERT INTO {table.name} ({names}) {source} {conflict}", _array(table, columns))


@cache
def _of_rows(sql: str, columns: int, count: int) -> str:
    """An insert of so many rows."""
    marks = f"({', '.join('?' * columns)})"
    return sql.replace(ROWS, ", ".join([marks] * count))


@cache
def _update(dialect: str, table: Table, columns: tuple[str, ...], only_null: str | None) -> _Statement:
    keys = tuple(column.name for column in table.primary_key)
    told = tuple(column for column in columns if column not in keys)
    and_null = f" AND {table.name}.{only_null} IS NULL" if only_null else ""
    if dialect == "sqlite":
        changes, here = ", ".join(f"{one} = ?" for one in told), " AND ".join(f"{one} = ?" for one in keys)
        sql = f"UPDATE {table.name} SET {changes} WHERE {here}{and_null}"
        return _Statement(sql, _tuples(table, told + keys))
    changes = ", ".join(f"{one} = n.{one}" for one in told)
    here = " AND ".join(f"{table.name}.{one} = n.{one}" for one in keys)
    sql = f"UPDATE {table.name} SET {changes} FROM {_rows_of(table)} AS n WHERE {here}{and_null}"
    return _Statement(sql, _array(table, columns))


def _rows_of(table: Table) -> str:
    return f"json_populate_recordset(NULL::{table.name}, %s::json)"


def _tuples(table: Table, columns: tuple[str, ...]) -> Callable[[Sequence[Row]], list[tuple[Any, ...]]]:
    """Rows as sqlite3 takes them."""
    picked = itemgetter(*columns)
    types = [table.c[column].type for column in columns]
    instants = [place for place, kind in enumerate(types) if isinstance(kind, Utc)]
    # Whatever both databases have is bound as it is; all else must have come as JSON.
    pieces = [place for place, kind in enumerate(types) if is_json(kind)]

    def fill(rows: Sequence[Row]) -> list[tuple[Any, ...]]:
        filled = []
        last, text = None, ""
        for row in rows:
            values = list(picked(row))
            for place in instants:
                if (instant := values[place]) is not None:
                    if instant is not last:  # most rows have theirs several times
                        last, text = instant, _utc_text(instant)
                    values[place] = text
            for place in pieces:
                if (piece := values[place]) is not None:
                    values[place] = bytes(piece).decode()
            filled.append(tuple(values))
        return filled

    return fill


def _array(table: Table, columns: tuple[str, ...]) -> Callable[[Sequence[Row]], tuple[str]]:
    """Rows as PostgreSQL's `json_populate_recordset` takes them."""
    binary = [column for column in columns if isinstance(table.c[column].type, LargeBinary)]
    instants = [column for column in columns if isinstance(table.c[column].type, Utc)]

    def fill(rows: Sequence[Row]) -> tuple[str]:
        for row in rows:
            for column in instants:
                _check_zone(row[column])
        told = [_hex(row, binary) for row in rows] if binary else rows
        return (_encode(told).decode(),)

    return fill


def _hex(row: Row, binary: Sequence[str]) -> Row:
    return {**row, **{column: f"\\x{row[column].hex()}" for column in binary if row[column] is not None}}


def _check_zone(instant: datetime | None) -> None:
    if instant is not None and instant.tzinfo is None:
        raise ValueError(f"{instant!r} has no time zone")


def _utc_text(instant: datetime) -> str:
    """As SQLAlchemy stores it on SQLite.

    Raises:
        ValueError: it has no zone.
    """
    if instant.tzinfo is not UTC:
        _check_zone(instant)
        instant = instant.astimezone(UTC)
    return instant.isoformat(" ", "microseconds")[:26]
