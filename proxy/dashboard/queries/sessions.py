"""SQL of the dashboard's sessions. It stores hashes, never a token."""

from datetime import datetime

from sqlalchemy import Connection, Engine, Row, select

from migrations import schema

s = schema.ui_sessions.c


class SessionTables:
    """Reads sessions, from any thread."""

    def __init__(self, engine: Engine) -> None:
        self._reader = engine.execution_options(isolation_level="AUTOCOMMIT")

    def find(self, token_sha256: str, now: datetime) -> Row[str, str] | None:
        """Return the `project` and `key_id` of this token's session; None if it does not exist or has expired."""
        query = select(s.project, s.key_id).where(s.id == token_sha256, s.expires_at > now)
        with self._reader.connect() as connection:
            return connection.execute(query).one_or_none()


def begin(
    connection: Connection, project: str, key_id: str, token_sha256: str, now: datetime, expires_at: datetime
) -> None:
    """Store a new session, and delete those that have expired."""
    connection.execute(schema.ui_sessions.delete().where(s.expires_at <= now))
    row = {"project": project, "id": token_sha256, "key_id": key_id, "created_at": now, "expires_at": expires_at}
    connection.execute(schema.ui_sessions.insert().values(row))


def end(connection: Connection, token_sha256: str) -> None:
    """Delete a session."""
    connection.execute(schema.ui_sessions.delete().where(s.id == token_sha256))
