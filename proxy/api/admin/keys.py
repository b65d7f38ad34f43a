"""Serve `/admin/keys`: create, list and revoke a project's API keys."""

from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Annotated

import msgspec
from fastapi import FastAPI, Request, Response
from msgspec import Meta
from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

from proxy.api import openapi
from proxy.api.bodies import as_json, parse_body
from proxy.errors import BadRequest, NotFound
from proxy.http.asgi import read_whole
from proxy.recording.recorder import Recorder
from whetstone.config.proxy import ProxySettings
from whetstone.domain.api_keys import MOST_PER_MIN, NAME, KeyScope, hash_of, new_key, read_lifetime, read_scopes
from whetstone.registry import api_key_store

NO_STORE = {"cache-control": "no-store"}
"""An answer with a key must not be cached."""
Quota = Annotated[int, Meta(ge=1, le=MOST_PER_MIN, description="Without it there is no limit.")]


class NewKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A key to create."""

    name: Annotated[str, Meta(pattern=NAME, description="What it is for, in words.")]
    scopes: Annotated[list[KeyScope], Meta(min_length=1, description="`admin` has them all.")]
    expires: Annotated[str, Meta(description="How long it lives: `12h`, `90d`, `2w`; without it for good.")] | None = (
        None
    )
    requests_per_min: Quota | None = None
    tokens_per_min: Quota | None = None


def add(
    api: FastAPI,
    *,
    project: str,
    engine: Engine,
    recorder: Recorder,
    refresh: Callable[[], Awaitable[None]],
    settings: ProxySettings,
) -> None:
    """Add the routes to `api`. `refresh` makes committed changes take effect here from the next request on."""
    reader = engine.execution_options(isolation_level="AUTOCOMMIT")

    @api.get("/admin/keys")
    def get_keys() -> Response:
        """List the project's keys, the newest first, with the revoked and expired keys. Their secrets are never
        shown."""
        with reader.connect() as connection:
            return as_json({"object": "list", "data": api_key_store.keys(connection, project)}, headers=NO_STORE)

    @api.post("/admin/keys", status_code=201, openapi_extra=openapi.json_body_of(NewKey))
    async def make_key(request: Request) -> Response:
        """Create a key. The answer contains it; it cannot be shown again."""
        wanted = parse_body(await read_whole(request.receive, settings.max_body_bytes, settings.body_timeout_s), NewKey)
        now, (key_id, key) = datetime.now(UTC), new_key()
        try:
            expires_at = None if wanted.expires is None else now + read_lifetime(wanted.expires)
        except ValueError as error:
            raise BadRequest(f"expires: {error}", param="expires") from error
        made = api_key_store.KeyRecord(
            project,
            wanted.name,
            read_scopes(wanted.scopes),
            now,
            expires_at,
            wanted.requests_per_min,
            wanted.tokens_per_min,
        )
        await recorder.commit(lambda connection: api_key_store.create(connection, made, key_id, hash_of(key.encode())))
        with suppress(SQLAlchemyError):  # the key is created, so the answer must contain it
            await refresh()
        of_key = {name: value for name, value in asdict(made).items() if name != "project"}
        return as_json({"object": "key", "key_id": key_id, "key": key} | of_key, status=201, headers=NO_STORE)

    @api.delete("/admin/keys/{key_id}")
    async def revoke_key(key_id: str) -> Response:
        """Revoke a key for good."""
        now = datetime.now(UTC)
        if not await recorder.commit(lambda connection: api_key_store.revoke(connection, key_id, now, project)):
            raise NotFound(f"there is no key {key_id[:200]!r} in this project; GET /admin/keys lists them")
        with suppress(SQLAlchemyError):  # the key is revoked; the change is read when the database is back
            await refresh()
        return as_json({"object": "key", "key_id": key_id, "revoked": True}, headers=NO_STORE)
