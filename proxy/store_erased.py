"""The proxy's SQL of deletions: what was to be deleted before it came to the tables. Reads only."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import Connection

from migrations.bulk_sqlite import utc_text
from migrations.database import run_sqlite
from proxy.call import Call
from proxy.storable import storable
from whetstone.privacy import pseudonym
from whetstone.store_privacy import announce_writer, asked_since

_ANY = "SELECT 1 FROM erasures WHERE asked_at >= ? LIMIT 1"
"""Whether there is anything to read: nearly always there is not."""
_Asked = Mapping[tuple[str, str], datetime]
"""Project and name of what was to be deleted -> when it was asked for."""


def not_erased(connection: Connection, calls: Sequence[Call]) -> list[Call]:
    """The calls without those that a deletion means which was asked for after they had come."""
    first = min(calls, key=lambda call: call.created_at_s, default=None)
    asked = {} if first is None else _asked(connection, first.created_at)
    if not asked:
        return list(calls)
    return [call for call in calls if not _means(asked, call.project, _names(call), call.created_at)]


def erased_feedback(connection: Connection, rows: Sequence[Mapping[str, Any]]) -> set[str]:
    """The feedback, by its id, on trajectories whose deletion was asked for after it had come."""
    asked = _asked(connection, min(row["created_at"] for row in rows)) if rows else {}
    named = [row for row in rows if row["target_kind"] == "trajectory"]
    return {row["id"] for row in named if _means(asked, row["project"], [row["target_id"]], row["created_at"])}


def _names(call: Call) -> list[str]:
    user: str | None = storable(call.end_user)
    return [call.trajectory_id] if user is None else [call.trajectory_id, user, pseudonym(user)]


def _asked(connection: Connection, first_came_at: datetime) -> _Asked:
    """What was asked for since the first of them came. Whoever deletes waits for this transaction."""
    if connection.dialect.name == "sqlite" and not run_sqlite(connection, _ANY, (utc_text(first_came_at),)).fetchone():
        return {}
    announce_writer(connection)
    return asked_since(connection, first_came_at)


def _means(asked: _Asked, project: str, names: Iterable[str], came_at: datetime) -> bool:
    return any(at is not None and at >= came_at for at in (asked.get((project, name)) for name in names))
