"""SQL of the dashboard's sessions. It stores hashes, never a token."""

from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Connection, Engine, select

from migrations import schema

s = schema.ui_sessions.c


@dataclass(frozen=True)
class Session:
    """The project and key of a sign-in."""

    project: str
    key_id: str


class SessionTables:
    """Reads sessions, from any thread."""

    def __init__(self, engine: Engine) -> None:
        self._reader = engine.execution_options(isolation_level="AUTOCOMMIT")

    def find(self, token_sha256: str, now: datetime) -> Session | None:
        """Return the session of this token; None if it does not exist or has expired."""
        query = select(s.project, s.key_id).where(s.id == token_sha256, s.expires_at > now)
        with self._reader.connect() as connection:
            row = connection.execute(query).one_or_none()
        return None if row is None else Session(row.project, row.key_id)


def begin(connection: Connection, session: Session, token_sha256: str, now: datetime, expires_at: datetime) -> None:
    """Store a new session, and delete those that have expired."""
    connection.execute(schema.ui_sessions.delete().where(s.expires_at <= now))
    row = {"project": session.project, "id": token_sha256, "key_id": session.key_id}
    connection.execute(schema.ui_sessions.insert().values(row | {"created_at": now, "expires_at": expires_at}))


def end(connection: Connection, token_sha256: str) -> None:
    """Delete a session."""
    connection.execute(schema.ui_sessions.delete().where(s.id == token_sha256))
