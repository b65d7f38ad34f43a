"""Read rows of a table, the newest first, a page at a time: by keyset, and within a bounded time for any filter.

Filters need no index: they are applied while the rows are scanned by time. If that takes too long, the scan stops and
returns its place, so that the reader can continue it.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import ColumnElement, Connection, Table, func, or_, select

ROWS_AT_ONCE = 50
WALK_S = 0.08
"""How long a page may scan for rows that match its filters."""
FIRST_CHUNK, MOST_CHUNK = 500, 4_000
"""Rows scanned by one query."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a page begins: after this row. An empty id: after all rows of that time."""

    created_at: datetime
    id: str = ""

    def __str__(self) -> str:
        """Return its form in a URL."""
        return f"{int(self.created_at.timestamp() * 1_000_000)}~{self.id}"


def read_place(text: str | None) -> Place | None:
    """Parse a place from a URL; None if it is missing or malformed: then a list begins at its newest row."""
    micros, _, row_id = (text or "").partition("~")
    try:
        return Place(
            datetime.fromtimestamp(int(micros) // 1_000_000, UTC).replace(microsecond=int(micros) % 1_000_000), row_id
        )
    except (ValueError, OverflowError, OSError):
        return None


@dataclass(frozen=True, slots=True)
class RowPage:
    """One page of rows."""

    rows: list[dict[str, Any]]
    older: Place | None
    """Where the next page begins; None at the end."""
    looked_at: int
    """Rows that were scanned; 0 without filters."""
    stopped: bool
    """Whether the scan took too long: the page may have fewer rows than match."""


def newest(
    connection: Connection,
    table: Table,
    columns: Sequence[ColumnElement[Any]],
    within: Sequence[ColumnElement[bool]],
    filters: Sequence[ColumnElement[bool]],
    before: Place | None,
    rows_at_once: int = ROWS_AT_ONCE,
    most_s: float = WALK_S,
) -> RowPage:
    """Return the newest rows before a place.

    `within`: conditions that the index on project and time covers, the project first. `filters`: the other conditions.
    `columns` must include `created_at` and `id`.
    """
    c = table.c
    newest_first = (c.created_at.desc(), c.id.desc())
    if not filters:
        query = select(*columns).where(*within, *_before(table, before)).order_by(*newest_first)
        newest_rows = [dict(row._mapping) for row in connection.execute(query.limit(rows_at_once + 1))]
        return _page(newest_rows, rows_at_once, 0)
    matches: list[dict[str, Any]] = []
    looked_at, chunk, until_s = 0, FIRST_CHUNK, time.perf_counter() + most_s
    while True:
        began_s = time.perf_counter()
        behind = (*within, *_before(table, before))
        walked = select(c.created_at).where(*behind).order_by(c.created_at.desc()).limit(chunk).subquery()
        count, oldest = connection.execute(select(func.count(), func.min(walked.c.created_at))).one()
        looked_at += count
        if count:
            query = select(*columns).where(*behind, c.created_at >= oldest, *filters).order_by(*newest_first)
            rows = connection.execute(query.limit(rows_at_once + 1 - len(matches)))
            matches += [dict(row._mapping) for row in rows]
        if len(matches) > rows_at_once:
            return _page(matches, rows_at_once, looked_at)
        if count < chunk:
            return RowPage(matches, None, looked_at, stopped=False)
        before, now_s = Place(oldest), time.perf_counter()
        # The next query is expected to take as long as this one.
        if 2 * now_s - began_s > until_s:
            return RowPage(matches, before, looked_at, stopped=True)
        if now_s - began_s < most_s / 8:
            chunk = min(2 * chunk, MOST_CHUNK)


def equal(*pairs: tuple[ColumnElement[Any], Any]) -> list[ColumnElement[bool]]:
    """Return a condition for each column whose value is not None."""
    return [column == value for column, value in pairs if value is not None]


def _before(table: Table, place: Place | None) -> list[ColumnElement[bool]]:
    if place is None:
        return []
    earlier = table.c.created_at < place.created_at
    # An index covers only the first part.
    return [table.c.created_at <= place.created_at, or_(earlier, table.c.id < place.id)] if place.id else [earlier]


def _page(rows: list[dict[str, Any]], rows_at_once: int, looked_at: int) -> RowPage:
    """Return as many of these rows as a page has; there is an older page if one row more was read."""
    last = rows[rows_at_once - 1] if len(rows) > rows_at_once else None
    older = None if last is None else Place(last["created_at"], last["id"])
    return RowPage(rows[:rows_at_once], older, looked_at, stopped=False)
