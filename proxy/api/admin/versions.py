"""Serve the routes under `/admin/policies` about versions: list them and their decisions, and move them by hand."""

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI, Request, Response
from sqlalchemy import Connection, Engine

from proxy.api import openapi
from proxy.api.admin import store
from proxy.api.admin.policies import known
from proxy.api.json_response import as_json
from proxy.api.version_bodies import BodyT, Pin, Promote, RollBack, parse_body
from proxy.api.version_moves import Ledger
from proxy.domain.policies import Policies
from proxy.http.asgi import read_whole
from whetstone.config.settings import Settings
from whetstone.registry import version_store
from whetstone.registry.versions import Move


def add(api: FastAPI, *, settings: Settings, policies: Callable[[], Policies], engine: Engine, ledger: Ledger) -> None:
    """Add the routes to `api`."""
    project, limits = settings.project, settings.proxy
    reader = engine.execution_options(isolation_level="AUTOCOMMIT")

    def listed(query: Callable[[Connection], list[dict[str, Any]]]) -> Response:
        with reader.connect() as connection:
            return as_json({"object": "list", "data": query(connection)})

    async def read(policy: str, request: Request, kind: type[BodyT]) -> BodyT:
        known(policies(), policy)
        body = await read_whole(request.receive, limits.max_body_bytes, limits.body_timeout_s)
        return parse_body(body, kind)

    @api.get("/admin/policies")
    def get_policies() -> Response:
        """List the policies, with their state and the version of each that answers."""
        names = {one.name for one in policies()}
        return listed(lambda connection: [row for row in store.policies(connection, project) if row["policy"] in names])

    @api.get("/admin/policies/{policy}/versions")
    def get_versions(policy: str) -> Response:
        """List the policy's versions with the gate's figures, the newest first."""
        known(policies(), policy)
        return listed(lambda connection: version_store.versions(connection, project, policy))

    @api.get("/admin/policies/{policy}/decisions")
    def get_decisions(policy: str) -> Response:
        """List the decisions on the policy's versions, with the test and the figures of each, the newest first."""
        known(policies(), policy)
        return listed(lambda connection: version_store.decisions(connection, project, policy))

    @api.post("/admin/policies/{policy}/promote", openapi_extra=openapi.json_body_of(Promote))
    async def promote(policy: str, request: Request) -> Response:
        """Let a version answer from the next request on. It is loaded first if it is not."""
        body = await read(policy, request, Promote)
        return _moved(policy, await ledger.promote(policy, body.version, body.reason))

    @api.post("/admin/policies/{policy}/rollback", openapi_extra=openapi.json_body_of(RollBack, required=False))
    async def roll_back(policy: str, request: Request) -> Response:
        """Go back to an older version from the next request on. The versions that descend from it since are
        rejected."""
        body = await read(policy, request, RollBack)
        return _moved(policy, await ledger.roll_back(policy, body.to, body.reason))

    @api.post("/admin/policies/{policy}/pin", openapi_extra=openapi.json_body_of(Pin))
    async def pin(policy: str, request: Request) -> Response:
        """Keep a version loaded and on the disk although newer versions exist, or stop doing so."""
        body = await read(policy, request, Pin)
        await ledger.pin(policy, body.version, pinned=body.pinned)
        return as_json({"object": "pin", "policy": policy, "version": body.version, "pinned": body.pinned})


def _moved(policy: str, move: Move) -> Response:
    moved = {"object": "move", "policy": policy, "live_version": move.live, "before": move.before}
    return as_json(moved | {"rejected": move.rejected})
