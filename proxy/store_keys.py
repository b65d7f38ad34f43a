"""The proxy's SQL of API keys: those that open something here, and when each was last used."""

from collections.abc import Mapping, Sequence
from datetime import datetime

from sqlalchemy import Engine, or_

from migrations import schema
from proxy.store_changes import Changes
from whetstone import store_keys
from whetstone.keys import Principal

k = schema.api_keys.c


class KeyTables:
    """What `keys` asks and tells, of these projects."""

    def __init__(self, engine: Engine, projects: Sequence[str], changes: Changes | None = None) -> None:
        self._engine = engine
        self._changes = changes or Changes(engine)
        self._reader = engine.execution_options(isolation_level="AUTOCOMMIT")
        self._projects = tuple(projects)

    def state(self) -> tuple[int, int, datetime | None]:
        """What changes whenever a key does; its first number is how many were ever made, whoever's."""
        return self._changes.unless("keys", self._state)

    def living(self, now: datetime) -> dict[str, tuple[Principal, datetime | None]]:
        """The keys that open something: hash -> what, and until when."""
        with self._reader.connect() as connection:
            return store_keys.living(connection, self._projects, now)

    def _state(self) -> tuple[int, int, datetime | None]:
        with self._reader.connect() as connection:
            return store_keys.state(connection)

    def note_used(self, minutes: Mapping[tuple[str, str], datetime]) -> None:
        """Note the minute in which each key, by project and id, was last used, unless a later one is known."""
        with self._engine.begin() as connection:
            for (project, key_id), minute in sorted(minutes.items()):
                is_it = (k.project == project, k.id == key_id, or_(k.last_used_at.is_(None), k.last_used_at < minute))
                connection.execute(schema.api_keys.update().where(*is_it).values(last_used_at=minute))
