"""Serve the routes under `/admin/policies`: list policies with their versions and decisions, move versions by hand, let
a policy train, only record or pause, and run a step now."""

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from fastapi import FastAPI, Request, Response
from sqlalchemy import Connection, Engine

from proxy.api import openapi
from proxy.api.admin import store
from proxy.api.bodies import BodyT, Pin, Promote, RollBack, State, StepAsked, as_json, parse_body, read_step
from proxy.api.version_moves import Ledger
from proxy.domain.policies import Policies
from proxy.errors import NotFound, StepRefused
from proxy.http.asgi import read_whole
from proxy.recording.recorder import Recorder
from whetstone.config.settings import Settings
from whetstone.registry import version_store
from whetstone.registry.versions import Move


def known(policies: Policies, policy: str) -> list[str]:
    """Return the policies' names, after checking that `policy` is one of them.

    Raises:
        NotFound: it is not.
    """
    names = [one.name for one in policies]
    if policy not in names:
        raise NotFound(f"there is no policy {policy[:200]!r}; there are: {', '.join(names) or 'none yet'}")
    return names


def add(
    api: FastAPI,
    *,
    settings: Settings,
    policies: Callable[[], Policies],
    engine: Engine,
    recorder: Recorder,
    ledger: Ledger,
    on_step_requested: Callable[[], None],
) -> None:
    """Add the routes to `api`."""
    project, limits = settings.project, settings.proxy
    reader = engine.execution_options(isolation_level="AUTOCOMMIT")

    def listed(query: Callable[[Connection], list[dict[str, Any]]]) -> Response:
        with reader.connect() as connection:
            return as_json({"object": "list", "data": query(connection)})

    async def read(policy: str, request: Request, kind: type[BodyT]) -> BodyT:
        known(policies(), policy)
        return parse_body(await read_whole(request.receive, limits.max_body_bytes, limits.body_timeout_s), kind)

    @api.post("/admin/policies/{policy}/state", openapi_extra=openapi.json_body_of(State))
    async def set_state(policy: str, request: Request) -> Response:
        """Let a policy train, only record, or pause. A paused policy still answers and records, but no step begins."""
        state = (await read(policy, request, State)).state
        changed = await recorder.commit(
            lambda connection: version_store.set_state(connection, project, policy, state), first=True
        )
        if not changed:
            raise StepRefused(f"{policy} is answered by another server: only what vLLM serves here can train")
        return as_json({"object": "policy", "policy": policy, "state": state})

    @api.post(
        "/admin/policies/{policy}/step", status_code=202, openapi_extra=openapi.json_body_of(StepAsked, required=False)
    )
    async def ask_step(policy: str, request: Request) -> Response:
        """Request one step now. The answer comes once the request is committed, before the step begins."""
        names = known(policies(), policy)
        body = await read_whole(request.receive, limits.max_body_bytes, limits.body_timeout_s)
        logs = await recorder.commit(lambda connection: store.imported(connection, project))
        step = read_step(body, policy, [*names, *logs], settings.teachers)
        now = datetime.now(UTC)
        why_not = await recorder.commit(
            lambda connection: store.request_step(connection, project, policy, step, now), first=True
        )
        if why_not is not None:
            raise StepRefused(why_not)
        on_step_requested()
        return as_json({"object": "step", "policy": policy, "kind": step["kind"], "asked_at": now}, status=202)

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
    return as_json(
        {"object": "move", "policy": policy, "live_version": move.live, "before": move.before}
        | {"rejected": move.rejected}
    )
