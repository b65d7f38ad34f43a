"""Read API keys from SQL, and store when each was last used."""

from collections.abc import Mapping, Sequence
from datetime import datetime

from sqlalchemy import Engine, or_

from migrations import schema
from whetstone.database.change_detector import Changes
from whetstone.domain.api_keys import Principal
from whetstone.registry import api_key_store

k = schema.api_keys.c


class KeyTables:
    """The table of API keys, for `api_keys`, limited to these projects."""

    def __init__(self, engine: Engine, projects: Sequence[str], changes: Changes | None = None) -> None:
        self._engine = engine
        self._changes = changes or Changes(engine)
        self._reader = engine.execution_options(isolation_level="AUTOCOMMIT")
        self._projects = tuple(projects)

    def state(self) -> tuple[int, int, datetime | None]:
        """Return a value that changes whenever a key does. Its first number counts all keys ever made, in any
        project."""
        return self._changes.unless("keys", self._state)

    def living(self, now: datetime) -> dict[str, tuple[Principal, datetime | None]]:
        """Return the valid keys: hash -> principal and expiry."""
        with self._reader.connect() as connection:
            return api_key_store.living(connection, self._projects, now)

    def _state(self) -> tuple[int, int, datetime | None]:
        with self._reader.connect() as connection:
            return api_key_store.state(connection)

    def note_used(self, minutes: Mapping[tuple[str, str], datetime]) -> None:
        """Store the minute in which each key, by project and id, was last used, unless a later one is stored."""
        with self._engine.begin() as connection:
            for (project, key_id), minute in sorted(minutes.items()):
                connection.execute(
                    schema.api_keys.update()
                    .where(k.project == project, k.id == key_id)
                    .where(or_(k.last_used_at.is_(None), k.last_used_at < minute))
                    .values(last_used_at=minute)
                )
