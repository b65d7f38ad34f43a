"""The table of API keys: SQL that the command line and the proxy share. It stores hashes, never keys."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, func, or_, select

from migrations import schema
from whetstone.database.engine import insert_new
from whetstone.domain.api_keys import KeyScope, Principal, new_key_id

BOOTSTRAP = "bootstrap"
"""Name of the key that comes from the environment."""

k = schema.api_keys.c
_SHOWN = (
    k.project,
    k.id.label("key_id"),
    *(k.name, k.scopes, k.created_at, k.expires_at, k.revoked_at, k.last_used_at),
    *(k.requests_per_min, k.tokens_per_min),
)


# Built once: the proxy runs it several times a second.
_STATE = select(func.count(), func.count(k.revoked_at), func.max(k.created_at))


@dataclass(frozen=True)
class KeyRecord:
    """What is stored of a new key besides its id and its hash."""

    project: str
    name: str
    scopes: Sequence[KeyScope]
    created_at: datetime
    expires_at: datetime | None = None
    requests_per_min: int | None = None
    tokens_per_min: int | None = None


def create(connection: Connection, made: KeyRecord, key_id: str, secret_sha256: str) -> bool:
    """Store a key, and its project if that does not exist yet. Return whether the key is new."""
    insert_new(connection, schema.projects, {"id": made.project, "created_at": made.created_at})
    return insert_new(connection, schema.api_keys, {**asdict(made), "id": key_id, "secret_sha256": secret_sha256})


def keys(connection: Connection, project: str | None = None) -> list[dict[str, Any]]:
    """Return all keys, the newest first, without their hashes; with `project`, only that project's."""
    query = select(*_SHOWN).order_by(k.created_at.desc(), k.id)
    rows = connection.execute(query if project is None else query.where(k.project == project))
    return [dict(row._mapping) for row in rows]


def revoke(connection: Connection, key_id: str, now: datetime, project: str | None = None) -> bool:
    """Revoke a key for good; a key revoked before keeps its time. Return whether such a key exists."""
    is_it = [k.id == key_id, *([] if project is None else [k.project == project])]
    connection.execute(schema.api_keys.update().where(*is_it, k.revoked_at.is_(None)).values(revoked_at=now))
    return connection.execute(select(k.id).where(*is_it)).first() is not None


def bootstrap(connection: Connection, project: str, secret_sha256: str, now: datetime) -> bool:
    """Store the environment's key as an admin key, unless it was ever stored, revoked or not; return whether it was
    new."""
    return create(connection, KeyRecord(project, BOOTSTRAP, ["admin"], now), new_key_id(), secret_sha256)


def living(
    connection: Connection, projects: Sequence[str], now: datetime
) -> dict[str, tuple[Principal, datetime | None]]:
    """Return the valid keys of these projects: hash -> principal and expiry."""
    stands = (k.project.in_(projects), k.revoked_at.is_(None), or_(k.expires_at.is_(None), k.expires_at > now))
    query = select(
        k.secret_sha256, k.project, k.id, k.scopes, k.expires_at, k.requests_per_min, k.tokens_per_min
    ).where(*stands)
    return {
        row.secret_sha256: (
            Principal(row.project, row.id, frozenset(row.scopes), row.requests_per_min, row.tokens_per_min),
            row.expires_at,
        )
        for row in connection.execute(query)
    }


def state(connection: Connection) -> tuple[int, int, datetime | None]:
    """Return how many keys were ever created, how many of them were revoked, and when the last one was created.

    As long as this does not change, neither do the keys: a key changes only by being revoked.
    """
    row = connection.execute(_STATE).one()
    return (row[0], row[1], row[2])
