"""Rows as sqlite3 takes them, past SQLAlchemy. Knows columns and their types; runs no statement.

To bind a value takes as long as to make it: what all rows of a statement have in common is bound once, and what is NULL
in all of them not at all. Which columns these are is learned from the rows, in one direction only.
"""

from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from functools import cache
from operator import itemgetter
from typing import Any

import msgspec
from sqlalchemy import Boolean, LargeBinary, Table
from sqlalchemy.schema import Column

from migrations.types import Utc, is_json

Values = tuple[Any, ...]
Picker = Callable[[Sequence[Any]], Values]
Form = Callable[[Sequence[Any]], Sequence[Any]]
"""Makes the values of a column sqlite3's."""


class Plan(msgspec.Struct, frozen=True):
    """Which columns of rows are told, and how."""

    same: tuple[str, ...]
    """Columns that are bound once for all rows."""
    told: tuple[str, ...]
    """Columns that are bound row by row; at least one."""
    of_nothing: Picker
    of_same: Picker
    of_told: Picker
    """Of all columns, or a row's values, those that are left out, that are the same, that are told."""
    same_forms: list[tuple[int, Form]]
    told_forms: list[tuple[int, Form]]
    """Places among them whose values are to be made sqlite3's."""
    statements: dict[tuple[tuple[str, ...], int], str] = {}
    """What inserts such rows, by the unique key and the room for rows."""


_plans: dict[tuple[Table, tuple[str, ...], bool], Plan] = {}
"""For those columns of a table, and whether there are several rows."""
_filled: dict[Table, set[str]] = {}
"""Columns that were once not NULL in a whole batch: they are told from then on, or each set of them would be a
statement of its own, and sqlite3 keeps what it last bound to each."""
_varied: dict[Table, set[str]] = {}
"""Likewise, columns that once differed within a batch: they are bound row by row from then on."""
_seconds: list[tuple[datetime, str]] = [(datetime(1970, 1, 1, tzinfo=UTC), "1970-01-01 00:00:00")]
"""The second that was written out last."""
_instants: list[tuple[Sequence[datetime | None], list[str | None]]] = [((), [])]
"""The column that was written out last: of most batches the next one is equal, for trajectories begin with a call."""


def as_sqlite_takes(table: Table, names: tuple[str, ...], rows: list[Values]) -> tuple[Plan, Values, list[Values]]:
    """Rows to insert, of the columns `names`: how they are told, the values they have in common, and all others row by
    row."""
    several, columns = len(rows) > 1, list(zip(*rows, strict=True))
    plan = _plans.get((table, names, several))
    if plan is None or not _holds(plan, columns):
        plan = _plans[table, names, several] = _learned(table, names, columns)
    same = list(plan.of_same(rows[0]))
    for place, form in plan.same_forms:
        same[place] = form((same[place],))[0]
    told = list(plan.of_told(columns))
    for place, form in plan.told_forms:
        told[place] = form(told[place])
    return plan, tuple(same), list(zip(*told, strict=True))


def all_as_sqlite_takes(table: Table, names: tuple[str, ...], rows: Iterable[Values]) -> list[Values]:
    """Rows with all their columns, NULL or not."""
    columns: list[Sequence[Any]] = list(zip(*rows, strict=True))
    for place, (form, _) in enumerate(_forms(table, names)):
        if form is not None:
            columns[place] = form(columns[place])
    return list(zip(*columns, strict=True))


def _holds(plan: Plan, columns: list[Values]) -> bool:
    """Whether these rows are as those from which it was learned."""
    count = len(columns[0])
    filled = [values for values in plan.of_nothing(columns) if values.count(None) < count]
    varied = [values for values in plan.of_same(columns) if values.count(values[0]) < count]
    return not filled and not varied


def _learned(table: Table, names: tuple[str, ...], columns: list[Values]) -> Plan:
    filled, varied = _filled.setdefault(table, set()), _varied.setdefault(table, {_key(table)})
    forms, count = _forms(table, names), len(columns[0])
    nothing: list[int] = []
    same: list[int] = []
    told: list[int] = []
    for place, values in enumerate(columns):
        name, (_, may_go) = names[place], forms[place]
        if values.count(None) < count:
            filled.add(name)
        if values.count(values[0]) < count:
            varied.add(name)
        if may_go and name not in filled:
            nothing.append(place)
        else:
            (same if count > 1 and name not in varied else told).append(place)
    return Plan(
        same=tuple([names[place] for place in same]),
        told=tuple([names[place] for place in told]),
        of_nothing=_picker(nothing),
        of_same=_picker(same),
        of_told=_picker(told),
        same_forms=_formed(forms, same),
        told_forms=_formed(forms, told),
    )


def _key(table: Table) -> str:
    """The column that differs from row to row."""
    *_, last = table.primary_key
    return last.name


def _picker(places: Sequence[int]) -> Picker:
    if len(places) > 1:
        return itemgetter(*places)
    few = slice(places[0], places[0] + 1) if places else slice(0)
    return lambda values: tuple(values[few])


def _formed(forms: list[tuple[Form | None, bool]], places: Sequence[int]) -> list[tuple[int, Form]]:
    picked = enumerate([forms[place][0] for place in places])
    return [(place, form) for place, form in picked if form is not None]


@cache
def _forms(table: Table, names: tuple[str, ...]) -> list[tuple[Form | None, bool]]:
    """How the values of columns become sqlite3's, where they are not already; whether a column is NULL where an insert
    does not tell it."""
    columns = [table.c[name] for name in names]
    return [(_form(column), bool(column.nullable) and column.server_default is None) for column in columns]


def _form(column: Column[Any]) -> Form | None:
    # Whatever both databases have is bound as it is; all else must have come as JSON.
    if is_json(column.type):
        return _texts
    if isinstance(column.type, Utc):
        return _utc_texts
    # sqlite3 asks whether it can adapt them: it takes numbers, texts and bytearrays at once.
    if isinstance(column.type, Boolean):
        return _numbers
    return _bytearrays if isinstance(column.type, LargeBinary) else None


def _texts(pieces: Sequence[bytes | None]) -> list[str | None]:
    return [None if piece is None else piece.decode() for piece in pieces]


def _numbers(flags: Sequence[bool | None]) -> list[int | None]:
    return [None if flag is None else int(flag) for flag in flags]


def _bytearrays(blobs: Sequence[bytes | None]) -> list[bytearray | None]:
    return [None if blob is None else bytearray(blob) for blob in blobs]


def utc_text(instant: datetime) -> str:
    """An instant as SQLite has it.

    Raises:
        ValueError: it has no zone.
    """
    return str(_utc_texts((instant,))[0])


def utc_of(text: str) -> datetime:
    """The instant that SQLite has as that."""
    return datetime.fromisoformat(f"{text}+00:00")


def check_zone(instant: datetime | None) -> None:
    """Refuse an instant without a zone (ValueError)."""
    if instant is not None and instant.tzinfo is None:
        raise ValueError(f"{instant!r} has no time zone")


def _utc_texts(instants: Sequence[datetime | None]) -> list[str | None]:
    """As SQLAlchemy stores them on SQLite.

    Raises:
        ValueError: one has no zone.
    """
    known, texts = _instants[0]
    if instants == known:
        return texts
    texts = []
    second, told = _seconds[0]
    for instant in instants:
        if instant is None:
            texts.append(None)
            continue
        if instant.tzinfo is not UTC:
            check_zone(instant)
        # Most are of the same second as the one before, and nothing takes as long as to write out a second.
        since = instant - second
        if since.seconds or since.days:
            second = instant.astimezone(UTC).replace(microsecond=0)
            told, since = second.isoformat(" ")[:19], instant - second
            _seconds[0] = second, told
        texts.append(f"{told}.{since.microseconds:06d}")
    _instants[0] = instants, texts
    return texts
