"""Serve a project's routes except inference: models, feedback, trajectories, groups.

Reads the store, writes through the recorder. It also answers requests to paths that do not exist.
"""

import asyncio
import logging
from collections.abc import Callable, Collection
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import RedirectResponse
from sqlalchemy.exc import SQLAlchemyError
from starlette.routing import Match, Route

from proxy.admission.api_keys import CONTENT, methods_of, path_hint
from proxy.admission.feedback_tokens import FeedbackClaim
from proxy.api import openapi
from proxy.api.bodies import as_json
from proxy.api.feedback_ingest import FeedbackIngest
from proxy.domain.feedback import read_feedback, read_rating
from proxy.domain.feedback_rows import FeedbackResult, request_row, row_of, too_late
from proxy.domain.policies import Policies, Policy
from proxy.errors import BadRequest, DatabaseAway, NotFound, ProxyError, TooLate, WrongMethod
from proxy.http.asgi import FEEDBACK_CLAIM, is_admin, key_of, read_whole
from proxy.metrics import rejections
from proxy.recording.recorder import Recorder
from proxy.recording.store import Store
from whetstone.config.proxy import ProxySettings
from whetstone.domain.states import FeedbackState

log = logging.getLogger(__name__)

MOST_RATING_BYTES = 32 * 2**10
"""Largest body that comes with a feedback token."""

_HIDDEN = frozenset({"project", "key_id"})


def build(
    *,
    project: str,
    policies: Callable[[], Policies],
    store: Store,
    recorder: Recorder,
    take: FeedbackIngest,
    judges: Collection[str],
    settings: ProxySettings,
) -> FastAPI:
    """Build the routes from these parts."""
    api = FastAPI(title="Whetstone", docs_url=None, redoc_url=None, redirect_slashes=False)
    openapi.add(api)

    @api.exception_handler(ProxyError)
    async def answer_error(_request: Request, error: ProxyError) -> Response:
        rejections.note(error)
        return Response(error.body(), error.status, {k.decode(): v.decode() for k, v in error.headers()})

    @api.exception_handler(404)
    @api.exception_handler(405)
    async def no_route(request: Request, _error: Exception) -> Response:
        return await answer_error(request, _no_route(api, request))

    @api.exception_handler(RequestValidationError)
    async def wrong_parameter(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        name = str(first["loc"][-1])
        return await answer_error(request, BadRequest(f"{name}: {first['msg']}", param=name))

    @api.exception_handler(SQLAlchemyError)
    async def database_away(request: Request, error: Exception) -> Response:
        log.error("%s %s: %s", request.method, request.url.path, error)
        return await answer_error(request, DatabaseAway("the database does not answer; try again soon"))

    @api.get("/", include_in_schema=False)
    async def root() -> Response:
        """Lead a browser to the dashboard."""
        return RedirectResponse("/ui", 303)

    @api.get("/v1/models")
    async def models() -> Response:
        """List every name that may be requested: policies, aliases, served versions."""
        return as_json(
            {"object": "list", "data": [_model(name, policy) for policy in policies() for name in policy.names]}
        )

    @api.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        """Show one of these names."""
        known = policies()
        served = known.resolve(name)
        return as_json(_model(name, next(policy for policy in known if policy.name == served.policy)))

    @api.post("/v1/feedback", status_code=202, openapi_extra=openapi.feedback_body())
    async def post_feedback(request: Request) -> Response:
        """Store what trajectories were worth. The answer comes once it is committed, or journaled while the database is
        down; its `target` is `known`, or `unknown yet` if no such trajectory, completion or group is recorded. With a
        feedback token: `thumbs` and `comment` on its completion."""
        claim: FeedbackClaim | None = request.scope.get(FEEDBACK_CLAIM)
        if claim is None:
            body = await read_whole(request.receive, settings.max_body_bytes, settings.body_timeout_s)
            items, batch = read_feedback(body, judges)
        else:
            most_bytes = min(MOST_RATING_BYTES, settings.max_body_bytes)
            body = await read_whole(request.receive, most_bytes, settings.body_timeout_s)
            items, batch = [read_rating(body, claim.completion_id, claim.choice)], False
        now = datetime.now(UTC)
        # In order: of two rewards for the same trajectory the last one counts.
        rows = [row_of(item, project, now + timedelta(microseconds=place)) for place, item in enumerate(items)]
        results = [_receipt(one) for one in await take(rows, key_of(request.scope))]
        return as_json(results if batch else results[0], status=202)

    @api.post("/v1/trajectories/{trajectory_id}/end", status_code=202, openapi_extra=openapi.IDEMPOTENT)
    async def end_trajectory(trajectory_id: str, request: Request) -> Response:
        """End a trajectory: it expects no more calls."""
        return await ask("end", trajectory_id, request)

    @api.post("/v1/groups/{group_id}/close", status_code=202, openapi_extra=openapi.IDEMPOTENT)
    async def close_group(group_id: str, request: Request) -> Response:
        """Close a group: it is compared with the members that it has."""
        return await ask("close", group_id, request)

    async def ask(source: Literal["end", "close"], target_id: str, request: Request) -> Response:
        key = request.headers.get("idempotency-key")
        row = request_row(source, target_id, key, project, datetime.now(UTC))
        (result,) = await take([row], key_of(request.scope))
        return as_json(_receipt(result), status=202)

    @api.get("/v1/feedback/{feedback_id}")
    def get_feedback(feedback_id: str, request: Request) -> Response:
        """Show the state of a feedback, including the step that trained on it."""
        return _row_response(store.feedback(project, feedback_id), "feedback", feedback_id, request)

    @api.delete("/v1/feedback/{feedback_id}")
    async def withdraw_feedback(feedback_id: str, request: Request) -> Response:
        """Withdraw a feedback: it no longer counts. This fails once a step has used it."""
        now = datetime.now(UTC)
        await recorder.commit(lambda connection: store.withdraw_feedback(connection, project, feedback_id, now))
        row = await asyncio.to_thread(store.feedback, project, feedback_id)
        if row is not None and (why_not := too_late(row)):
            raise TooLate(f"feedback {feedback_id!r} cannot be withdrawn: {why_not}")
        return _row_response(row, "feedback", feedback_id, request)

    @api.get("/v1/trajectories/{trajectory_id}")
    def get_trajectory(trajectory_id: str, request: Request) -> Response:
        """Show a trajectory's state, reward and `why_not_trained`."""
        return _row_response(store.trajectory(project, trajectory_id), "trajectory", trajectory_id, request)

    @api.get("/v1/groups/{group_id}")
    def get_group(group_id: str, request: Request) -> Response:
        """Show a group's state, rewards and members."""
        group = store.group(project, group_id)
        if group is not None:
            group["members"] = store.group_members(project, group_id)
        return _row_response(group, "group", group_id, request)

    @api.get("/v1/reviews")
    def get_reviews() -> Response:
        """List the attempts that wait for a person's review, the longest waiting first. Feedback on one removes it."""
        return as_json({"object": "list", "data": store.reviews(project)})

    return api


def _no_route(api: FastAPI, request: Request) -> ProxyError:
    """Return why nothing is served at this path, and what to do."""
    method, path = request.method, request.url.path
    # A route's own 405 knows only its own method, and inference is served in front of these routes.
    routes = [route for route in api.routes if isinstance(route, Route)]
    matching = [route.methods or () for route in routes if route.matches(request.scope)[0] is not Match.NONE]
    allowed = set(methods_of(path)).union(*matching)
    if allowed and method not in allowed:
        names = " or ".join(sorted(allowed))
        return WrongMethod(f"no {method} {path[:200]} here; this path takes {names}", allowed)
    return NotFound(f"no {method} {path[:200]} here{path_hint(path)}")


def _receipt(result: FeedbackResult) -> dict[str, Any]:
    # Another project's target is an unknown one: that it exists must not show.
    target = "known" if result.target_known else "unknown yet"
    return {"id": result.id, "object": "feedback", "state": FeedbackState.WAITING, "target": target}


def _model(name: str, policy: Policy) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": policy.created_at_s, "owned_by": "whetstone"}


def _row_response(row: dict[str, Any] | None, kind: str, row_id: str, request: Request) -> Response:
    """Return the row without the fields that only admins may read: a key for feedback must not read text of apps and
    people."""
    if row is None:
        raise NotFound(f"there is no {kind} {row_id[:200]!r} in this project")
    hidden = _HIDDEN if is_admin(request.scope) else _HIDDEN | CONTENT
    return as_json({"object": kind} | {key: value for key, value in row.items() if key not in hidden})
