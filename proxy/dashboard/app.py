"""Build the dashboard of one project: its pages and actions as routes."""

import logging
import time
from datetime import UTC, datetime
from functools import partial
from typing import Any
from urllib.parse import quote

from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from starlette.routing import Route

from proxy.dashboard import error_page, rendering, session
from proxy.dashboard.interfaces import Action, FormRequest, Page, PageRequest, Parts, Visitor
from proxy.dashboard.middleware import VISITOR, address_of, here, is_https, read_form
from proxy.dashboard.pages.registry import ACTIONS, NAV, PAGES
from proxy.errors import BadRequest, DatabaseAway, NotFound, ProxyError

JSON = "application/json"

log = logging.getLogger(__name__)


class InternalError(ProxyError):
    """An internal error; the log has its trace."""

    code = "fault"


def build(parts: Parts) -> Starlette:
    """Build the app of one project; the visitor is in the scope (`proxy.dashboard.middleware`)."""
    reader = parts.engine.execution_options(isolation_level="AUTOCOMMIT")
    routes = [
        Route("/ui", _to_first, methods=["GET"]),
        Route("/ui/", _to_first, methods=["GET"]),
        *(Route(page.path, partial(_show, page, parts, reader), methods=["GET"]) for page in PAGES),
        *(Route(action.path, partial(_act, action, parts), methods=["POST"]) for action in ACTIONS),
    ]
    handlers: dict[Any, Any] = {
        ProxyError: _answer_error,
        SQLAlchemyError: _database_away,
        HTTPException: _no_route,
        Exception: _fault,
    }
    app = Starlette(routes=routes, exception_handlers=handlers)
    app.router.redirect_slashes = False
    return app


async def _to_first(_request: Request) -> Response:
    return RedirectResponse(session.FIRST, 303, {"cache-control": "no-store"})


async def _show(page: Page, parts: Parts, reader: Engine, request: Request) -> Response:
    started_s = time.perf_counter()
    body = await rendering.in_page_thread(_rendered, page, parts, reader, request)
    taken_ms = 1000 * (time.perf_counter() - started_s)
    response = HTMLResponse(
        body, headers={"cache-control": "no-store", "server-timing": f"total;dur={taken_ms:.1f}", "vary": "cookie"}
    )
    if session.NOTICE in request.cookies:  # it was shown
        response.raw_headers.append(session.cookie(session.NOTICE, "", lives_s=0))
    return response


def _rendered(page: Page, parts: Parts, reader: Engine, request: Request) -> str:
    visitor: Visitor = request.scope[VISITOR]
    now = datetime.now(UTC)
    if "\0" in "".join(request.query_params.values()):
        raise BadRequest("ids and labels must not contain a NUL character")  # PostgreSQL's text cannot have one either
    with reader.connect() as connection:
        values = page.load(
            PageRequest(request.path_params, visitor, parts, now, connection, dict(request.query_params))
        )
    notice = session.decode_notice(request.cookies.get(session.NOTICE, ""))
    common = {"nav": NAV, "current": page.nav, "notice": notice, "address": address_of(request.scope)}
    return rendering.page(page.template, visitor, here(request.scope), now, common | dict(values))


async def _act(action: Action, parts: Parts, request: Request) -> Response:
    visitor: Visitor = request.scope[VISITOR]
    form = await read_form(request.receive, visitor)
    back = action.back.format_map({name: quote(value, safe="") for name, value in request.path_params.items()})
    back = session.own_path(form["page"]) if form.get("page") else back
    by_script = request.headers.get("accept") == JSON
    try:
        result = await action.act(FormRequest(request.path_params, visitor, parts, datetime.now(UTC), form))
    except NotFound:
        raise
    except ProxyError as error:
        return _refused(error, back, by_script=by_script)
    except SQLAlchemyError as error:
        log.error("%s: %s", request.url.path, error)
        away = DatabaseAway("the database does not answer, so nothing was changed; try again soon")
        return _refused(away, back, by_script=by_script)
    response = (
        _answer(200, result.message, result.reward)
        if by_script
        else _go(result.to or back, result.message, wrong=False)
    )
    if result.rater is not None:
        response.raw_headers.append(session.rater_cookie(result.rater, secure=is_https(request.scope)))
    return response


def _refused(error: ProxyError, back: str, *, by_script: bool) -> Response:
    return _answer(error.status, error.message) if by_script else _go(back, error.message, wrong=True)


def _answer(status: int, message: str, reward: float | None = None) -> Response:
    """Answer a script that sent a form: it shows the message and the reward itself."""
    fields = {"message": message} | ({} if reward is None else {"reward": reward})
    return JSONResponse(fields, status, {"cache-control": "no-store"})


def _go(to: str, message: str, *, wrong: bool) -> Response:
    notice = session.encode_notice(message, wrong=wrong)
    response = RedirectResponse(to, 303)
    response.raw_headers.append(session.cookie(session.NOTICE, notice, lives_s=session.NOTICE_LIFETIME_S))
    return response


async def _answer_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ProxyError)
    headers = {name.decode(): value.decode() for name, value in error.headers() if name == b"retry-after"}
    page = error_page.page(error, request.scope.get(VISITOR, error_page.ANONYMOUS), here(request.scope))
    return HTMLResponse(page, error.status, headers | {"cache-control": "no-store"})


async def _no_route(request: Request, _error: Exception) -> Response:
    return await _answer_error(request, NotFound(f"there is no {request.method} {request.url.path[:200]} here"))


async def _database_away(request: Request, error: Exception) -> Response:
    log.error("%s %s: %s", request.method, request.url.path, error)
    return await _answer_error(request, DatabaseAway("the database does not answer; try again soon"))


async def _fault(request: Request, _error: Exception) -> Response:
    return await _answer_error(
        request, InternalError("Whetstone failed to build this page; the proxy's log has the error")
    )
