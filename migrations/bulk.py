"""Many rows in one statement, past SQLAlchemy's work for each of them. Knows both drivers; no table of ours.

SQLAlchemy makes a dict of every row and asks every column's type about its value, which takes longer than the database
does. Here a statement is made once from the table, and rows go to the driver in its own form: to SQLite as tuples, to
PostgreSQL, whose driver binds row by row, as one JSON array that the server takes apart.

Values in rows: JSON and lists of numbers as `msgspec.Raw` (`raw_json`), instants with their zone, and what both
databases have: text, numbers, truth, bytes. All rows of a statement have the same columns in the same order.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import cache, lru_cache
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any

import msgspec
from msgspec.structs import asdict, astuple
from sqlalchemy import (
    ARRAY,
    BindParameter,
    Boolean,
    ColumnElement,
    Connection,
    LargeBinary,
    Table,
    Text,
    any_,
    bindparam,
    func,
)
from sqlalchemy import select as select_
from sqlalchemy.schema import Column

from migrations.database import run_sqlite
from migrations.types import Utc, as_json, as_json_bytes, is_json

Row = Mapping[str, Any] | msgspec.Struct
"""Columns and their values. Structs are made and taken apart in a third of the time."""
ROWS_AT_ONCE = (1, 2, 5, 10, 25, 50)
"""Rows that one statement of SQLite has room for. Few sizes, for it keeps what it has prepared; and room that stays
empty costs a fifth of what another statement does, before which SQLite copies each page that it is going to touch."""
ROWS = "$rows"
_PRESENT = {"sqlite": ("IN (SELECT value FROM json_each(?))", "?"), "postgresql": ("= ANY(%s)", "%s")}
"""Each database's words for whether an id is one of a list, and for a parameter."""

_filled: dict[Table, set[str]] = {}
"""Columns of SQLite's tables that were once not NULL in a whole batch: they are told from then on, or each set of them
would be a statement of its own, and sqlite3 keeps what it last bound to each."""
_EPOCH, _EPOCH_TEXT = datetime(1970, 1, 1, tzinfo=UTC), "1970-01-01 00:00:00"
_encode = msgspec.json.Encoder().encode


def raw_json(value: Any) -> msgspec.Raw:
    """JSON as rows hold it.

    Raises:
        ValueError, TypeError: as `as_json`.
    """
    return msgspec.Raw(as_json_bytes(value))


def raw_ids(ids: Sequence[int]) -> msgspec.Raw:
    """Whole numbers as rows hold them."""
    return msgspec.Raw(_encode(ids))


def utc_text(instant: datetime) -> str:
    """An instant as SQLite has it.

    Raises:
        ValueError: it has no zone.
    """
    return str(_utc_texts([instant])[0])


def insert_many(connection: Connection, table: Table, rows: Sequence[Row], on: tuple[str, ...] = ()) -> None:
    """Insert those rows that no unique key (of the columns `on`; none: any) forbids."""
    if not rows:
        return
    if connection.dialect.name != "sqlite":
        connection.exec_driver_sql(_insert("postgresql", table, _names(rows[0]), on), _array(table, rows))
        return
    told = _columns(table, _names(rows[0]), rows)
    sql = _insert("sqlite", table, tuple(told), on)
    left = list(zip(*told.values(), strict=True))
    most = ROWS_AT_ONCE[-1]
    for start in range(0, len(left), most):
        some = left[start : start + most]
        room = ROWS_AT_ONCE[bisect_left(ROWS_AT_ONCE, len(some))]
        values: tuple[Any, ...] = some[0]
        if room > 1:
            # Behind the last row are numbers, which nobody reads: nothing takes less time to bind.
            values = (*chain.from_iterable(some), *((0,) * ((room - len(some)) * len(told))), len(some))
        run_sqlite(connection, _of_rows(sql, len(told), room), values)


def insert_absent(connection: Connection, table: Table, rows: Sequence[Row]) -> set[tuple[Any, ...]]:
    """Insert rows that were not there when this transaction looked; the primary keys of those that it inserted.

    On SQLite nobody else can have written meanwhile; on PostgreSQL somebody may have.
    """
    if not rows:
        return set()
    keys = tuple(column.name for column in table.primary_key)
    if connection.dialect.name == "sqlite":
        insert_many(connection, table, rows, keys)
        return set(_values(rows, keys))
    sql = _insert("postgresql", table, _names(rows[0]), ())
    inserted = connection.exec_driver_sql(f"{sql} RETURNING {', '.join(keys)}", _array(table, rows))
    return {tuple(row) for row in inserted}


def update_many(connection: Connection, table: Table, rows: Sequence[Row], only_null: str | None = None) -> None:
    """Set what each row says of the one with its primary key, which no other row of them has.

    `only_null`: a column; where the table has it filled, nothing is set.
    """
    if not rows:
        return
    keys = tuple(column.name for column in table.primary_key)
    told = tuple(name for name in _names(rows[0]) if name not in keys)
    sql = _update(connection.dialect.name, table, told, keys, only_null)
    if connection.dialect.name == "sqlite":
        columns = _columns(table, told + keys, rows, all_null=True)
        run_sqlite(connection, sql, list(zip(*columns.values(), strict=True)), many=True)
    else:
        connection.exec_driver_sql(sql, _array(table, rows))


def among(dialect: str, column: Column[Any], ids: str = "ids") -> ColumnElement[bool]:
    """Whether a column is one of a list, which is the parameter `ids` (`listed`): one statement for any length."""
    if dialect == "postgresql":
        told: BindParameter[Any] = bindparam(ids, type_=ARRAY(Text))
        return column == any_(told)
    return column.in_(select_(func.json_each(bindparam(ids, type_=Text)).table_valued("value").c.value))


def present(connection: Connection, table: Table, project: str, ids: Sequence[str]) -> list[tuple[str, str]]:
    """The primary keys, project and id, of those rows that are there."""
    dialect = connection.dialect.name
    among_them, here = _PRESENT[dialect]
    sql = f"SELECT project, id FROM {table.name} WHERE project = {here} AND id {among_them}"
    values = (project, listed(dialect, ids))
    if dialect == "sqlite":
        return run_sqlite(connection, sql, values).fetchall()
    return [(row[0], row[1]) for row in connection.exec_driver_sql(sql, values)]


def listed(dialect: str, ids: Iterable[str]) -> Any:
    """The parameter of `among`."""
    return list(ids) if dialect == "postgresql" else as_json(list(ids))


@lru_cache(64)
def _insert(dialect: str, table: Table, columns: tuple[str, ...], on: tuple[str, ...]) -> str:
    names, unique = ", ".join(columns), f"({', '.join(on)}) " if on else ""
    conflict = f"ON CONFLICT {unique}DO NOTHING"
    if dialect == "sqlite":
        return f"INSERT INTO {table.name} ({names}) {ROWS} {conflict}"
    return f"INSERT INTO {table.name} ({names}) SELECT {names} FROM {_rows_of(table)} AS n {conflict}"


@lru_cache(64)
def _of_rows(sql: str, columns: int, room: int) -> str:
    """An insert with room for so many rows; where for several, how many there are is told behind them."""
    marks = f"({', '.join('?' * columns)})"
    values = f"VALUES {', '.join([marks] * room)}"
    return sql.replace(ROWS, values if room == 1 else f"SELECT * FROM ({values}) LIMIT ?")


@cache
def _update(dialect: str, table: Table, told: tuple[str, ...], keys: tuple[str, ...], only_null: str | None) -> str:
    and_null = f" AND {table.name}.{only_null} IS NULL" if only_null else ""
    if dialect == "sqlite":
        changes, here = ", ".join(f"{one} = ?" for one in told), " AND ".join(f"{one} = ?" for one in keys)
        return f"UPDATE {table.name} SET {changes} WHERE {here}{and_null}"
    changes = ", ".join(f"{one} = n.{one}" for one in told)
    here = " AND ".join(f"{table.name}.{one} = n.{one}" for one in keys)
    return f"UPDATE {table.name} SET {changes} FROM {_rows_of(table)} AS n WHERE {here}{and_null}"


def _rows_of(table: Table) -> str:
    return f"json_populate_recordset(NULL::{table.name}, %s::json)"


def _names(row: Row) -> tuple[str, ...]:
    return row.__struct_fields__ if isinstance(row, msgspec.Struct) else tuple(row)


def _values(rows: Sequence[Row], names: tuple[str, ...]) -> Iterable[tuple[Any, ...]]:
    """Some columns of rows, in that order."""
    picked: Callable[[Any], Any] = itemgetter(*names)
    if isinstance(rows[0], msgspec.Struct):
        picked = astuple if names == rows[0].__struct_fields__ else attrgetter(*names)
    return map(picked, rows)


def _columns(
    table: Table, names: tuple[str, ...], rows: Sequence[Row], *, all_null: bool = False
) -> dict[str, Sequence[Any]]:
    """Rows, column by column, as sqlite3 takes them; `all_null`: with those columns that are NULL in all of them.

    Of a call's columns half always are, and to bind NULL takes sqlite3 longer than to bind a text.
    """
    nothing, filled = (None,) * len(rows), _filled.setdefault(table, set())
    told: dict[str, Sequence[Any]] = {}
    columns = zip(*_values(rows, names), strict=True)
    for name, (form, may_go), values in zip(names, _forms(table, names), columns, strict=True):
        if values != nothing:
            told[name] = form(values) if form else values
            filled.add(name)
        elif all_null or not may_go or name in filled:
            told[name] = values
    return told


@cache
def _forms(table: Table, names: tuple[str, ...]) -> list[tuple[Callable[[Sequence[Any]], Sequence[Any]] | None, bool]]:
    """How the values of columns become sqlite3's, where they are not already; whether a column is NULL where an insert
    does not tell it."""
    columns = [table.c[name] for name in names]
    return [(_form(column), bool(column.nullable) and column.server_default is None) for column in columns]


def _form(column: Column[Any]) -> Callable[[Sequence[Any]], Sequence[Any]] | None:
    # Whatever both databases have is bound as it is; all else must have come as JSON.
    if is_json(column.type):
        return _texts
    if isinstance(column.type, Utc):
        return _utc_texts
    # sqlite3 asks whether it can adapt them: it takes numbers, texts and bytearrays at once.
    if isinstance(column.type, Boolean):
        return _numbers
    return _bytearrays if isinstance(column.type, LargeBinary) else None


def _texts(pieces: Sequence[msgspec.Raw | None]) -> list[str | None]:
    return [None if piece is None else str(piece, "utf-8") for piece in pieces]


def _numbers(flags: Sequence[bool | None]) -> list[int | None]:
    return [None if flag is None else int(flag) for flag in flags]


def _bytearrays(blobs: Sequence[bytes | None]) -> list[bytearray | None]:
    return [None if blob is None else bytearray(blob) for blob in blobs]


def _array(table: Table, rows: Sequence[Row]) -> tuple[str]:
    """Rows as PostgreSQL's `json_populate_recordset` takes them."""
    instants, binary = _to_look_at(table, _names(rows[0]))
    for row in rows:
        for column in instants:
            _check_zone(getattr(row, column) if isinstance(row, msgspec.Struct) else row[column])
    told = [_hex(row, binary) for row in rows] if binary else rows
    return (_encode(told).decode(),)


@cache
def _to_look_at(table: Table, names: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """Columns with instants, and with bytes."""
    instants = [name for name in names if isinstance(table.c[name].type, Utc)]
    return instants, [name for name in names if isinstance(table.c[name].type, LargeBinary)]


def _hex(row: Row, binary: Sequence[str]) -> Mapping[str, Any]:
    told = asdict(row) if isinstance(row, msgspec.Struct) else dict(row)
    for column in binary:
        if told[column] is not None:
            told[column] = f"\\x{told[column].hex()}"
    return told


def _check_zone(instant: datetime | None) -> None:
    if instant is not None and instant.tzinfo is None:
        raise ValueError(f"{instant!r} has no time zone")


def _utc_texts(instants: Sequence[datetime | None]) -> list[str | None]:
    """As SQLAlchemy stores them on SQLite.

    Raises:
        ValueError: one has no zone.
    """
    texts: list[str | None] = []
    second, told = _EPOCH, _EPOCH_TEXT
    for instant in instants:
        if instant is None:
            texts.append(None)
            continue
        _check_zone(instant)
        # Most are of the same second as the one before, and nothing takes as long as to write out a second.
        since = instant - second
        if since.seconds or since.days:
            second = instant.astimezone(UTC).replace(microsecond=0)
            told, since = second.isoformat(" ")[:19], instant - second
        texts.append(f"{told}.{str(since.microseconds).zfill(6)}")
    return texts
