"""Format rows as a table, as CSV, or as JSON.

Both databases give the same output: times are text in UTC, a boolean is true or false, and a list or object of the
admin views is one in JSON, even where SQLite stores it as text.
"""

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import UTC, date, datetime
from decimal import Decimal
from itertools import count
from typing import Any

import msgspec
from rich.cells import cell_len, set_cell_size
from rich.table import Column, Table
from rich.text import Text

from migrations.views import VIEWS, Kind
from whetstone.database.types import as_json

CELL = 60
"""Widest cell of a table; the other formats cut nothing."""
CELL_OF_RECORD = 240
"""Widest cell when each column has a line of its own."""
_LISTS_AND_OBJECTS = frozenset(c.name for view in VIEWS for c in view.columns if c.kind.is_list_or_object)
_BOOLEANS = frozenset(c.name for view in VIEWS for c in view.columns if c.kind is Kind.BOOLEAN)

Rows = Iterable[Sequence[Any]]


def csv_lines(columns: Sequence[str], rows: Rows) -> Iterator[str]:
    """Yield a header, then a line for each row. NULL is empty, the empty text is `""`, as in PostgreSQL's COPY."""
    yield ",".join(_field(name) for name in columns) + "\r\n"
    as_boolean = [name in _BOOLEANS for name in columns]
    for row in rows:
        yield ",".join(map(_field, map(_alike, row, as_boolean))) + "\r\n"


def json_lines(columns: Sequence[str], rows: Rows) -> Iterator[str]:
    """Yield one JSON object per line for each row."""
    return (f"{one}\n" for one in _objects(columns, rows))


def json_array(columns: Sequence[str], rows: Rows) -> Iterator[str]:
    """Yield one JSON array of objects, a line for each row."""
    before = "[\n"
    for one in _objects(columns, rows):
        yield f"{before}{one}"
        before = ",\n"
    yield "[]\n" if before == "[\n" else "\n]\n"


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]], width: int | None) -> Table:
    """Return a table of the rows; if wider than `width` (None: any width), each row has a line for each column."""
    cells = [[_cell(name, value, CELL) for name, value in zip(columns, row, strict=True)] for row in rows]
    widths = [max(map(cell_len, (name, *(one.plain for one in column)))) for name, column in _by_column(columns, cells)]
    if width is not None and sum(widths) + 3 * len(widths) + 1 > width:
        return _records(columns, rows)
    made = Table()
    for name, values in _by_column(columns, rows):
        is_number = all(isinstance(value, int | float | Decimal | None) for value in values)
        made.add_column(Text(name), justify="right" if is_number else "left", no_wrap=True)
    for line in cells:
        made.add_row(*line)
    return made


def _records(columns: Sequence[str], rows: Rows) -> Table:
    made = Table(Column(no_wrap=True, style="bold"), Column(overflow="fold"), show_header=False)
    for row in rows:
        for name, value in zip(columns, row, strict=True):
            made.add_row(name, _cell(name, value, CELL_OF_RECORD))
        made.add_section()
    return made


def _by_column(columns: Sequence[str], lines: Sequence[Sequence[Any]]) -> Iterator[tuple[str, list[Any]]]:
    return ((name, [line[place] for line in lines]) for place, name in enumerate(columns))


def _cell(name: str, value: Any, widest: int) -> Text:
    value = _alike(value, name in _BOOLEANS)
    if value is None:
        return Text("NULL", style="dim italic")
    if value in ("", "NULL"):
        return Text(f"'{value}'")
    text = _text(value)[: 2 * widest]
    # Text from apps must not move the reader's cursor.
    text = "".join(one if one.isprintable() else "↵" if one == "\n" else "·" for one in text)
    return Text(text if cell_len(text) <= widest else set_cell_size(text, widest - 1) + "…")


def _objects(columns: Sequence[str], rows: Rows) -> Iterator[str]:
    names = list(_distinct(columns))
    as_boolean, as_value = [n in _BOOLEANS for n in columns], [n in _LISTS_AND_OBJECTS for n in columns]
    for row in rows:
        values = {
            name: _value(_alike(value, boolean), is_value)
            for name, value, boolean, is_value in zip(names, row, as_boolean, as_value, strict=True)
        }
        yield as_json(values)


def _distinct(columns: Sequence[str]) -> Iterator[str]:
    """Yield distinct names for an object's keys: the second `count` is `count_2`."""
    seen = set(columns)
    for place, name in enumerate(columns):
        own = name
        if name in columns[:place]:
            own = next(other for other in (f"{name}_{number}" for number in count(2)) if other not in seen)
            seen.add(own)
        yield own


def _alike(value: Any, as_boolean: bool) -> Any:
    if value is None or isinstance(value, str):
        return value
    if as_boolean and value in (0, 1):
        return bool(value)
    if isinstance(value, datetime):
        return f"{value.astimezone(UTC) if value.tzinfo else value:%Y-%m-%d %H:%M:%S.%f}"
    if isinstance(value, Decimal):
        return int(value) if value.is_finite() and value == value.to_integral_value() else float(value)
    if isinstance(value, bytes | bytearray | memoryview):
        return "\\x" + bytes(value).hex()
    if isinstance(value, bool | int | float | list | dict):
        return value
    return value.isoformat() if isinstance(value, date) else str(value)


def _value(value: Any, is_value: bool) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON cannot represent it
    if is_value and isinstance(value, str) and value[:1] in ("[", "{"):
        with suppress(msgspec.DecodeError):
            return msgspec.json.decode(value)
    return value


def _text(value: Any) -> str:
    return (
        json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        if isinstance(value, bool | list | dict)
        else str(value)
    )


def _field(value: Any) -> str:
    if value is None:
        return ""
    text = value if isinstance(value, str) else _text(value)
    if text == "" or any(one in text for one in ',"\r\n') or text[0] == " " or text[-1] == " ":
        return '"' + text.replace('"', '""') + '"'
    return text
