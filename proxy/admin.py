"""The route under `/admin` that asks for a step. Knows the policies and who writes; nothing of training."""

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
from whetstone.settings import ProxySettings


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

    @api.post(
        "/admin/policies/{policy}/step", status_code=202, openapi_extra=openapi.json_body_of(StepAsked, required=False)
    )
    async def ask_step(policy: str, request: Request) -> Response:
        """Have a step taken now; answered once that is committed, before it begins."""
        names = known(policies(), policy)
        asked = read_step(
            await read_whole(request.receive, settings.max_body_bytes, settings.body_timeout_s), policy, names
        )
        now = datetime.now(UTC)
        why_not = await recorder.commit(
            lambda connection: store_admin.ask_step(connection, project, policy, asked, now), first=True
        )
        if why_not is not None:
            raise StepRefused(why_not)
        on_step_asked()
        return as_json({"object": "step", "policy": policy, "kind": asked["kind"], "asked_at": now}, status=202)
