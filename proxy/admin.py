"""Routes under `/admin` on what a policy does: train, only record, pause; take a step now.

Knows the policies and who writes; nothing of training.
"""

from collections.abc import Callable
from datetime import UTC, datetime

from fastapi import FastAPI, Request, Response

from proxy import openapi, store_admin
from proxy.asgi import read_whole
from proxy.errors import NotFound, StepRefused
from proxy.policies import Policies
from proxy.recorder import Recorder
from proxy.responses import as_json
from proxy.step_asked import StepAsked, read_step
from proxy.versions_asked import State, read_asked
from whetstone import store_lines
from whetstone.serving import ProxySettings


def known(policies: Policies, policy: str) -> list[str]:
    """The policies' names, of which it is one.

    Raises:
        NotFound: it is none of them.
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
    on_step_asked: Callable[[], None],
    settings: ProxySettings,
) -> None:
    """Add the routes to `api`."""

    @api.post("/admin/policies/{policy}/state", openapi_extra=openapi.json_body_of(State))
    async def set_state(policy: str, request: Request) -> Response:
        """Let a policy train, only record, or pause: it is answered and recorded, and no step begins."""
        known(policies(), policy)
        body = await read_whole(request.receive, settings.max_body_bytes, settings.body_timeout_s)
        state = read_asked(body, State).state
        changed = await recorder.commit(
            lambda connection: store_lines.set_state(connection, project, policy, state), first=True
        )
        if not changed:
            raise StepRefused(f"{policy} is answered by another server: only what vLLM serves here can train")
        return as_json({"object": "policy", "policy": policy, "state": state})

    @api.post(
        "/admin/policies/{policy}/step", status_code=202, openapi_extra=openapi.json_body_of(StepAsked, required=False)
    )
    async def ask_step(policy: str, request: Request) -> Response:
        """Have a step taken now; answered once that is committed, before it begins."""
        names = known(policies(), policy)
        body = await read_whole(request.receive, settings.max_body_bytes, settings.body_timeout_s)
        logs = await recorder.commit(lambda connection: store_admin.imported(connection, project))
        asked = read_step(body, policy, [*names, *logs])
        now = datetime.now(UTC)
        why_not = await recorder.commit(
            lambda connection: store_admin.ask_step(connection, project, policy, asked, now), first=True
        )
        if why_not is not None:
            raise StepRefused(why_not)
        on_step_asked()
        return as_json({"object": "step", "policy": policy, "kind": asked["kind"], "asked_at": now}, status=202)
