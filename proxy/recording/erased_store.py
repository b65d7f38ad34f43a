"""The proxy's SQL for erasures: find records whose deletion was requested before they reached the tables. Reads
only."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import Connection

from proxy.domain.call import Call
from whetstone.config.privacy import pseudonym
from whetstone.database.bulk_sqlite import utc_text
from whetstone.database.engine import run_sqlite
from whetstone.database.sanitize import storable
from whetstone.privacy.store import announce_writer, requested_since

_ANY = "SELECT 1 FROM erasures WHERE asked_at >= ? LIMIT 1"
"""Whether there is any erasure to read: nearly always there is none."""
_Requests = Mapping[tuple[str, str], datetime]
"""Project and name to delete -> when the deletion was requested."""


def not_erased(connection: Connection, calls: Sequence[Call]) -> list[Call]:
    """Return the calls without those whose deletion was requested after they arrived."""
    first = min(calls, key=lambda call: call.created_at_s, default=None)
    requests = {} if first is None else _requests_since(connection, first.created_at)
    if not requests:
        return list(calls)
    return [call for call in calls if not _covers(requests, call.project, _names(call), call.created_at)]


def erased_feedback(connection: Connection, rows: Sequence[Mapping[str, Any]]) -> set[str]:
    """Return the ids of feedback on trajectories whose deletion was requested after the feedback arrived."""
    requests = _requests_since(connection, min(row["created_at"] for row in rows)) if rows else {}
    named = [row for row in rows if row["target_kind"] == "trajectory"]
    return {row["id"] for row in named if _covers(requests, row["project"], [row["target_id"]], row["created_at"])}


def _names(call: Call) -> list[str]:
    user: str | None = storable(call.end_user)
    return [call.trajectory_id] if user is None else [call.trajectory_id, user, pseudonym(user)]


def _requests_since(connection: Connection, first_came_at: datetime) -> _Requests:
    """Return the deletions requested since the first record arrived. A deletion waits for this transaction."""
    if connection.dialect.name == "sqlite" and not run_sqlite(connection, _ANY, (utc_text(first_came_at),)).fetchone():
        return {}
    announce_writer(connection)
    return requested_since(connection, first_came_at)


def _covers(requests: _Requests, project: str, names: Iterable[str], came_at: datetime) -> bool:
    return any(at is not None and at >= came_at for at in (requests.get((project, name)) for name in names))
