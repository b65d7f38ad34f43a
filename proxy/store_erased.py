"""The proxy's SQL of deletions: calls that were to be deleted before they came to the tables. Reads only."""

from collections.abc import Sequence

from sqlalchemy import Connection

from proxy.call import Call
from proxy.storable import storable
from whetstone.privacy import pseudonym
from whetstone.store_privacy import announce_writer, asked_since


def not_erased(connection: Connection, calls: Sequence[Call]) -> list[Call]:
    """The calls without those that a deletion means which was asked for after they had come."""
    if not calls:
        return []
    announce_writer(connection)
    asked = asked_since(connection, min(call.created_at for call in calls))

    def is_erased(call: Call) -> bool:
        user: str | None = storable(call.end_user)
        names = [call.trajectory_id] if user is None else [call.trajectory_id, user, pseudonym(user)]
        return any(at is not None and at >= call.created_at for at in (asked.get((call.project, it)) for it in names))

    return [call for call in calls if not is_erased(call)] if asked else list(calls)
