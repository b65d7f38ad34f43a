"""Convert rows to the form that sqlite3 takes, bypassing SQLAlchemy.

Binding a value takes as long as computing it. So a value that all rows of a statement share is bound once, and a column
that is NULL in all of them is left out. Which columns these are is learned from the rows. A column only ever moves from
left out to bound, and from shared to bound per row.
"""

from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from functools import cache
from operator import itemgetter
from typing import Any

import msgspec
from sqlalchemy import Boolean, Column, LargeBinary, Table

from whetstone.database.types import Utc, is_json

Values = tuple[Any, ...]
Picker = Callable[[Sequence[Any]], Values]
Form = Callable[[Sequence[Any]], Sequence[Any]]
"""Converts the values of a column to sqlite3's types."""


class Plan(msgspec.Struct, frozen=True):
    """Which columns of the rows are bound, and how."""

    same: tuple[str, ...]
    """Columns that are bound once for all rows."""
    varying: tuple[str, ...]
    """Columns that are bound row by row; at least one."""
    of_nothing: Picker
    of_same: Picker
    of_varying: Picker
    """Pick from all columns, or from a row's values: those left out, those shared, those bound row by row."""
    same_forms: list[tuple[int, Form]]
    varying_forms: list[tuple[int, Form]]
    """Positions among the picked columns whose values must be converted, with the conversions."""
    statements: dict[tuple[tuple[str, ...], int], str] = {}
    """INSERT statements for such rows, by unique constraint and row capacity."""


_plans: dict[tuple[Table, tuple[str, ...], bool], Plan] = {}
"""Plans by table, column names, and whether there are several rows."""
_filled: dict[Table, set[str]] = {}
"""Columns that once were not NULL in a batch. They are always bound from then on; otherwise each subset would be a
separate statement, and sqlite3 keeps the last values bound to each statement."""
_varied: dict[Table, set[str]] = {}
"""Columns that once differed within a batch; they are bound row by row from then on."""
_seconds: list[tuple[datetime, str]] = [(datetime(1970, 1, 1, tzinfo=UTC), "1970-01-01 00:00:00")]
"""The last second that was formatted."""
_instants: list[tuple[Sequence[datetime | None], list[str | None]]] = [((), [])]
"""The last column that was formatted. In most batches the next column is equal, because a trajectory begins with a
call."""


def as_sqlite_takes(table: Table, names: tuple[str, ...], rows: list[Values]) -> tuple[Plan, Values, list[Values]]:
    """Convert rows with the columns `names` for an insert. Return the plan, the shared values, and the other values row
    by row."""
    several, columns = len(rows) > 1, list(zip(*rows, strict=True))
    plan = _plans.get((table, names, several))
    if plan is None or not _holds(plan, columns):
        plan = _plans[table, names, several] = _make_plan(table, names, columns)
    same = list(plan.of_same(rows[0]))
    for place, form in plan.same_forms:
        same[place] = form((same[place],))[0]
    varying = list(plan.of_varying(columns))
    for place, form in plan.varying_forms:
        varying[place] = form(varying[place])
    return plan, tuple(same), list(zip(*varying, strict=True))


def all_as_sqlite_takes(table: Table, names: tuple[str, ...], rows: Iterable[Values]) -> list[Values]:
    """Convert rows with all their columns, NULL or not."""
    columns: list[Sequence[Any]] = list(zip(*rows, strict=True))
    for place, (form, _) in enumerate(_forms(table, names)):
        if form is not None:
            columns[place] = form(columns[place])
    return list(zip(*columns, strict=True))


def _holds(plan: Plan, columns: list[Values]) -> bool:
    """Whether the plan fits these rows."""
    count = len(columns[0])
    filled = [values for values in plan.of_nothing(columns) if values.count(None) < count]
    varied = [values for values in plan.of_same(columns) if values.count(values[0]) < count]
    return not filled and not varied


def _make_plan(table: Table, names: tuple[str, ...], columns: list[Values]) -> Plan:
    filled, varied = _filled.setdefault(table, set()), _varied.setdefault(table, {_key(table)})
    forms, count = _forms(table, names), len(columns[0])
    nothing: list[int] = []
    same: list[int] = []
    varying: list[int] = []
    for place, values in enumerate(columns):
        name, (_, may_go) = names[place], forms[place]
        if values.count(None) < count:
            filled.add(name)
        if values.count(values[0]) < count:
            varied.add(name)
        if may_go and name not in filled:
            nothing.append(place)
        else:
            (same if count > 1 and name not in varied else varying).append(place)
    return Plan(
        same=tuple([names[place] for place in same]),
        varying=tuple([names[place] for place in varying]),
        of_nothing=_picker(nothing),
        of_same=_picker(same),
        of_varying=_picker(varying),
        same_forms=_formed(forms, same),
        varying_forms=_formed(forms, varying),
    )


def _key(table: Table) -> str:
    """Return the primary-key column that differs from row to row."""
    *_, last = table.primary_key
    return last.name


def _picker(places: Sequence[int]) -> Picker:
    if len(places) > 1:
        return itemgetter(*places)
    few = slice(places[0], places[0] + 1) if places else slice(0)
    return lambda values: tuple(values[few])


def _formed(forms: list[tuple[Form | None, bool]], places: Sequence[int]) -> list[tuple[int, Form]]:
    return [(at, form) for at, place in enumerate(places) if (form := forms[place][0]) is not None]


@cache
def _forms(table: Table, names: tuple[str, ...]) -> list[tuple[Form | None, bool]]:
    """For each column, return its conversion to sqlite3's types, or None, and whether it is NULL when an insert omits
    it."""
    columns = (table.c[name] for name in names)
    return [(_form(column), bool(column.nullable) and column.server_default is None) for column in columns]


def _form(column: Column[Any]) -> Form | None:
    # Types that both databases have are bound unchanged; all others arrive as JSON. sqlite3 looks for an adapter for
    # bool and bytes; it takes numbers, texts and bytearrays directly.
    forms: dict[type, Form] = {Utc: _utc_texts, Boolean: _numbers, LargeBinary: _bytearrays}
    other = next((form for kind, form in forms.items() if isinstance(column.type, kind)), None)
    return _texts if is_json(column.type) else other


def _texts(pieces: Sequence[bytes | None]) -> list[str | None]:
    return [None if piece is None else piece.decode() for piece in pieces]


def _numbers(flags: Sequence[bool | None]) -> list[int | None]:
    return [None if flag is None else int(flag) for flag in flags]


def _bytearrays(blobs: Sequence[bytes | None]) -> list[bytearray | None]:
    return [None if blob is None else bytearray(blob) for blob in blobs]


def utc_text(instant: datetime) -> str:
    """Format an instant as SQLite stores it.

    Raises:
        ValueError: it has no time zone.
    """
    return str(_utc_texts((instant,))[0])


def utc_of(text: str) -> datetime:
    """Parse an instant that SQLite stores."""
    return datetime.fromisoformat(f"{text}+00:00")


def check_zone(instant: datetime | None) -> None:
    """Check that an instant has a time zone.

    Raises:
        ValueError: it has none.
    """
    if instant is not None and instant.tzinfo is None:
        raise ValueError(f"{instant!r} has no time zone")


def _utc_texts(instants: Sequence[datetime | None]) -> list[str | None]:
    """Format instants as SQLAlchemy stores them in SQLite.

    Raises:
        ValueError: one has no time zone.
    """
    known, texts = _instants[0]
    if instants == known:
        return texts
    texts = []
    second, text = _seconds[0]
    for instant in instants:
        if instant is None:
            texts.append(None)
            continue
        if instant.tzinfo is not UTC:
            check_zone(instant)
        # Most are in the same second as the one before, and formatting a second is the slowest part.
        since = instant - second
        if since.seconds or since.days:
            second = instant.astimezone(UTC).replace(microsecond=0)
            text, since = second.isoformat(" ")[:19], instant - second
            _seconds[0] = second, text
        texts.append(f"{text}.{since.microseconds:06d}")
    _instants[0] = instants, texts
    return texts
