"""The table of API keys: SQL that the command line and the proxy share. It stores hashes, never keys.

Before a proxy listens, `ensure_bootstrap` stores the environment's key, and requires a key when listening off loopback.
"""

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Connection, Engine, func, or_, select

from migrations import schema
from whetstone.config.settings import BOOTSTRAP_VARIABLE, Settings, SettingsError
from whetstone.database.engine import insert_new
from whetstone.domain.api_keys import LEAST_BOOTSTRAP, KeyScope, Principal, hash_of, new_key_id

BOOTSTRAP = "bootstrap"
"""Name of the key that comes from the environment."""

log = logging.getLogger(__name__)
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
    its = () if project is None else (k.project == project,)
    query = select(*_SHOWN).where(*its).order_by(k.created_at.desc(), k.id)
    return [dict(row._mapping) for row in connection.execute(query)]


def revoke(connection: Connection, key_id: str, now: datetime, project: str | None = None) -> bool:
    """Revoke a key for good; a key revoked before keeps its time. Return whether such a key exists."""
    is_it = [k.id == key_id, *([] if project is None else [k.project == project])]
    connection.execute(schema.api_keys.update().where(*is_it, k.revoked_at.is_(None)).values(revoked_at=now))
    return connection.execute(select(k.id).where(*is_it)).first() is not None


def living(
    connection: Connection, projects: Sequence[str], now: datetime
) -> dict[str, tuple[Principal, datetime | None]]:
    """Return the valid keys of these projects: hash -> principal and expiry."""
    columns = (k.secret_sha256, k.project, k.id, k.scopes, k.expires_at, k.requests_per_min, k.tokens_per_min, k.name)
    stands = (k.project.in_(projects), k.revoked_at.is_(None), or_(k.expires_at.is_(None), k.expires_at > now))
    return {
        row.secret_sha256: (
            Principal(row.project, row.id, frozenset(row.scopes), row.requests_per_min, row.tokens_per_min, row.name),
            row.expires_at,
        )
        for row in connection.execute(select(*columns).where(*stands))
    }


def state(connection: Connection) -> tuple[int, int, datetime | None]:
    """Return how many keys were ever created, how many of them were revoked, and when the last one was created.

    As long as this does not change, neither do the keys: a key changes only by being revoked.
    """
    row = connection.execute(_STATE).one()
    return (row[0], row[1], row[2])


def ensure_bootstrap(engine: Engine, settings: Settings, environment: Mapping[str, str] | None = None) -> None:
    """Store the environment's key, and check that the proxy may listen on the configured address.

    Raises:
        SettingsError: that key is too short; or other machines could reach the proxy, and there is no key.
    """
    environment, now = os.environ if environment is None else environment, datetime.now(UTC)
    first = environment.get(BOOTSTRAP_VARIABLE, "").strip()
    if 0 < len(first) < LEAST_BOOTSTRAP:
        raise SettingsError(
            f"{BOOTSTRAP_VARIABLE} has {len(first)} characters; it needs {LEAST_BOOTSTRAP} at least, of chance: "
            "`openssl rand -hex 32`"
        )
    projects = [one.project for one in settings.of_projects()]
    with engine.begin() as connection:
        # The environment's key is stored once: if it was revoked since, it stays revoked.
        own = KeyRecord(settings.home, BOOTSTRAP, ["admin"], now)
        if first and create(connection, own, new_key_id(), hash_of(first.encode())):
            log.info("the hash of the key of %s is stored", BOOTSTRAP_VARIABLE)
        usable = living(connection, projects, now)
    if settings.proxy.on_loopback:
        return
    where = f"proxy.host is {settings.proxy.host}, which is not loopback"
    if not usable:
        raise SettingsError(
            f"{where}: anyone who reaches it could send requests. Create a key first, "
            f"`whetstone keys create --project {settings.home} --name admin --scope admin`, or bring one in "
            f"{BOOTSTRAP_VARIABLE}; or listen on 127.0.0.1"
        )
    log.warning(
        "%s, and the proxy uses plain HTTP: keys and conversations can be read on the way. Put TLS in front of it "
        "(docs/keys.md)",
        where,
    )
