"""Serve the routes under `/admin` that control a policy: train, only record, pause, or run a step now."""

from collections.abc import Callable
from datetime import UTC, datetime

from fastapi import FastAPI, Request, Response

from proxy.api import openapi
from proxy.api.admin import store
from proxy.api.json_response import as_json
from proxy.api.step_body import StepAsked, read_step
from proxy.api.version_bodies import State, parse_body
from proxy.domain.policies import Policies
from proxy.errors import NotFound, StepRefused
from proxy.http.asgi import read_whole
from proxy.recording.recorder import Recorder
from whetstone.config.proxy import ProxySettings
from whetstone.registry import version_store


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
    project: str,
    policies: Callable[[], Policies],
    recorder: Recorder,
    on_step_requested: Callable[[], None],
    settings: ProxySettings,
) -> None:
    """Add the routes to `api`."""

    @api.post("/admin/policies/{policy}/state", openapi_extra=openapi.json_body_of(State))
    async def set_state(policy: str, request: Request) -> Response:
        """Let a policy train, only record, or pause. A paused policy still answers and records, but no step begins."""
        known(policies(), policy)
        body = await read_whole(request.receive, settings.max_body_bytes, settings.body_timeout_s)
        state = parse_body(body, State).state
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
        body = await read_whole(request.receive, settings.max_body_bytes, settings.body_timeout_s)
        logs = await recorder.commit(lambda connection: store.imported(connection, project))
        step = read_step(body, policy, [*names, *logs])
        now = datetime.now(UTC)
        why_not = await recorder.commit(
            lambda connection: store.request_step(connection, project, policy, step, now), first=True
        )
        if why_not is not None:
            raise StepRefused(why_not)
        on_step_requested()
        return as_json({"object": "step", "policy": policy, "kind": step["kind"], "asked_at": now}, status=202)
