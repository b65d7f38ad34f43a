"""The proxy's SQL of deletions: calls that were to be deleted before they came to the tables. Reads only."""

from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import Connection

from proxy.call import Call
from proxy.storable import storable
from whetstone.privacy import pseudonym
from whetstone.store_privacy import announce_writer, asked_since, is_erased

READ_BACK = timedelta(hours=1)
"""Calls are written within seconds; for one that lay in the journal for longer it is looked up by itself."""


class Erased:
    """What was asked for lately, read once in each transaction."""

    def __init__(self) -> None:
        self._transaction: Any = None
        self._since = datetime.now(UTC)
        self._asked: dict[tuple[str, str], datetime] = {}

    def has(self, connection: Connection, call: Call) -> bool:
        """Whether a deletion was asked for, after the call had come, that it falls under."""
        transaction = connection.get_transaction()
        if transaction is not self._transaction:
            self._transaction, self._since = transaction, datetime.now(UTC) - READ_BACK
            announce_writer(connection)
            self._asked = asked_since(connection, self._since)
        if call.created_at < self._since:
            return is_erased(connection, call.project, call.trajectory_id, storable(call.end_user), call.created_at)
        if not self._asked:
            return False
        user: str | None = storable(call.end_user)
        names = [call.trajectory_id] if user is None else [call.trajectory_id, user, pseudonym(user)]
        asked = (self._asked.get((call.project, name)) for name in names)
        return any(at is not None and at >= call.created_at for at in asked)
