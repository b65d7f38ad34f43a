"""Routes under `/admin/keys`: a project's keys, made, listed and taken back. Knows bodies; the table is the store's."""

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

from proxy import openapi
from proxy.asgi import read_whole
from proxy.errors import BadRequest, NotFound
from proxy.recorder import Recorder
from proxy.responses import as_json
from proxy.versions_asked import read_asked
from whetstone import store_keys
from whetstone.keys import MOST_PER_MIN, NAME, KeyScope, hash_of, new_key, read_lifetime, read_scopes
from whetstone.serving import ProxySettings

NO_STORE = {"cache-control": "no-store"}
"""What is told here is for nobody's cache."""
Quota = Annotated[int, Meta(ge=1, le=MOST_PER_MIN, description="Without it there is no limit.")]


class NewKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A key to be made."""

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
    """Add the routes to `api`. `refresh`: have what was committed count here from the next request on."""
    reader = engine.execution_options(isolation_level="AUTOCOMMIT")

    @api.get("/admin/keys")
    def get_keys() -> Response:
        """The project's keys, the newest first, also those that are over; never a key itself."""
        with reader.connect() as connection:
            return as_json({"object": "list", "data": store_keys.keys(connection, project)}, headers=NO_STORE)

    @api.post("/admin/keys", status_code=201, openapi_extra=openapi.json_body_of(NewKey))
    async def make_key(request: Request) -> Response:
        """Make a key. The answer has it, and nobody can tell it again."""
        asked = read_asked(await read_whole(request.receive, settings.max_body_bytes, settings.body_timeout_s), NewKey)
        now, (key_id, key) = datetime.now(UTC), new_key()
        try:
            expires_at = None if asked.expires is None else now + read_lifetime(asked.expires)
        except ValueError as error:
            raise BadRequest(f"expires: {error}", param="expires") from error
        limits = (asked.requests_per_min, asked.tokens_per_min)
        made = store_keys.Made(project, asked.name, read_scopes(asked.scopes), now, expires_at, *limits)
        await recorder.commit(lambda connection: store_keys.create(connection, made, key_id, hash_of(key.encode())))
        with suppress(SQLAlchemyError):  # it is made, and must be told
            await refresh()
        told = {"object": "key", "key_id": key_id, "key": key}
        told |= {name: value for name, value in asdict(made).items() if name != "project"}
        return as_json(told, status=201, headers=NO_STORE)

    @api.delete("/admin/keys/{key_id}")
    async def revoke_key(key_id: str) -> Response:
        """Take a key back for good."""
        now = datetime.now(UTC)
        if not await recorder.commit(lambda connection: store_keys.revoke(connection, key_id, now, project)):
            raise NotFound(f"there is no key {key_id[:200]!r} in this project; GET /admin/keys lists them")
        with suppress(SQLAlchemyError):  # it is revoked, and is read when the database is back
            await refresh()
        return as_json({"object": "key", "key_id": key_id, "revoked": True}, headers=NO_STORE)
