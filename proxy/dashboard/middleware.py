"""Control access to the dashboard: sign-in and sign-out, the session of each request, security headers.

Runs in `proxy.admission.middleware`, before API keys are checked.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from hmac import compare_digest
from typing import Any
from urllib.parse import parse_qsl, quote

from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError

from proxy.admission.api_keys import Keys
from proxy.admission.middleware import ConcurrencyLimit, check_origin, check_own_page
from proxy.dashboard import assets, error_page, rendering, session
from proxy.dashboard.interfaces import Visitor
from proxy.dashboard.queries import sessions as store_sessions
from proxy.domain.address import DASHBOARD
from proxy.errors import BadRequest, DatabaseAway, Forbidden, MissingScope, NoKey, NotFound, ProxyError
from proxy.http.asgi import (
    PRINCIPAL,
    Header,
    Receive,
    Routes,
    Scope,
    Send,
    WithHeaders,
    headers_of,
    read_whole,
    send_whole,
)  # fmt: skip
from whetstone.domain.api_keys import Principal, anybody

VISITOR = "whetstone.visitor"
"""Key of the visitor in a request's scope."""
FRESH = "whetstone.fresh"
"""Key of the token that the answer must set as a cookie; absent if the browser has one already."""
MOST_FORM_BYTES = 256 * 2**10
MOST_FIELDS = 50
FORM_TIMEOUT_S = 30.0
SECURITY_HEADERS: list[Header] = [
    # Nothing from other sites, nothing inline, no frames.
    (
        b"content-security-policy",
        b"default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'; object-src 'none'",
    ),
    (b"x-content-type-options", b"nosniff"),
    # Sends no referrer to other sites, and lets our own forms send their origin: with `no-referrer` they could not.
    (b"referrer-policy", b"same-origin"),
    (b"x-frame-options", b"DENY"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"permissions-policy", b"camera=(), geolocation=(), microphone=()"),
]

Commit = Callable[[Callable[[Connection], Any]], Awaitable[Any]]


@dataclass(frozen=True, eq=False)
class DashboardDoor:
    """Admits visitors."""

    keys: Keys
    sessions: store_sessions.SessionTables
    commit: Commit
    """Runs a write in the writer's thread."""
    in_flight: ConcurrencyLimit
    home: str
    """The project of a visitor without a key."""
    tenant: Callable[[str], Routes]
    """Returns the pages of a project."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request: with a page of its project, or with an error page."""
        send = WithHeaders(send, SECURITY_HEADERS)
        try:
            headers = headers_of(scope)
            check_origin(headers, keys_needed=self.keys.needed)
            check_own_page(headers)
            if "\0" in scope["path"]:
                raise NotFound("a path must not contain a NUL character")
            await self.in_flight.serve(self._serve, scope, receive, send)
        except ProxyError as error:
            await error_page.answer(send, error, scope.get(VISITOR, error_page.ANONYMOUS), here(scope))

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if path.startswith(assets.URL):
            await _send_file(scope, send, path.removeprefix(assets.URL))
            return
        visitor = scope[VISITOR] = await self._visitor(scope)
        if FRESH in scope:
            send = WithHeaders(send, [session.cookie(session.FORM, scope[FRESH], secure=is_https(scope))])
        if path == session.SIGN_IN:
            await self._sign_in(scope, receive, send)
        elif not visitor.may_look:
            await _ask_to_sign_in(scope, send)
        elif path == f"{DASHBOARD}/sign-out":
            await self._sign_out(scope, receive, send)
        else:
            await self.tenant(visitor.project)(scope, receive, send)

    async def _visitor(self, scope: Scope) -> Visitor:
        """Return the visitor: from a session, from a key in a header (which scripts send), or anonymous if no keys are
        needed.

        Raises:
            WrongKey, MissingScope: the key in the header is invalid, or does not have the scope.
        """
        headers = headers_of(scope)
        with_key = b"authorization" in headers or b"x-api-key" in headers
        session_token = session.token_of(headers, session.COOKIE)
        if self.keys.needed and not with_key and session_token is not None:
            signed_in = await self._signed_in(session_token)
            if signed_in is not None:
                scope[PRINCIPAL] = signed_in
                csrf = session.csrf_of(session_token)
                return Visitor(signed_in.project, signed_in.key_id, csrf, signed_in=True, rater=_rater(scope))
        token = session.token_of(headers, session.FORM)
        if token is None:
            token = scope[FRESH] = session.new_token()
        csrf = session.csrf_of(token)
        if self.keys.needed and not with_key:
            return Visitor(self.home, None, csrf, signed_in=False, may_look=False)
        principal = scope[PRINCIPAL] = self.keys.admit(headers, "admin") if self.keys.needed else anybody(self.home)
        return Visitor(principal.project, principal.key_id, csrf, signed_in=False, rater=_rater(scope))

    async def _signed_in(self, token: str) -> Principal | None:
        """Return the principal that signed in, as long as its key is valid and has the scope `admin`."""
        try:
            stored = await rendering.in_page_thread(self.sessions.find, session.hash_of(token), datetime.now(UTC))
        except SQLAlchemyError as error:
            raise DatabaseAway("the database does not answer; try again soon") from error
        principal = None if stored is None else self.keys.by_id(stored.project, stored.key_id)
        return principal if principal is not None and principal.allows("admin") else None

    async def _sign_in(self, scope: Scope, receive: Receive, send: Send) -> None:
        visitor: Visitor = scope[VISITOR]
        if visitor.may_look:
            await _go(send, session.FIRST)
        elif scope["method"] == "POST":
            await self._try_key(scope, await read_form(receive, visitor), send)
        else:
            query = dict(parse_qsl(scope["query_string"].decode("latin-1")))
            await _show_sign_in(send, visitor, 200, query.get("next", ""), None)

    async def _try_key(self, scope: Scope, form: dict[str, str], send: Send) -> None:
        after = session.own_path(form.get("next", ""))
        try:
            principal = self.keys.admit({b"x-api-key": form.get("key", "").strip().encode()}, "admin")
        except (NoKey, MissingScope) as error:
            await _show_sign_in(send, scope[VISITOR], error.status, after, error)
            return
        now, token = datetime.now(UTC), session.new_token()
        await self.commit(
            lambda connection: store_sessions.begin(
                connection,
                principal.project,
                str(principal.key_id),
                session.hash_of(token),
                now,
                now + session.LIFETIME,
            )
        )
        lives_s = int(session.LIFETIME.total_seconds())
        await _go(send, after, session.cookie(session.COOKIE, token, lives_s=lives_s, secure=is_https(scope)))

    async def _sign_out(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] != "POST":
            await _go(send, session.FIRST)
            return
        await read_form(receive, scope[VISITOR])
        token = session.token_of(headers_of(scope), session.COOKIE)
        if token is not None:
            await self.commit(lambda connection: store_sessions.end(connection, session.hash_of(token)))
        await _go(send, session.SIGN_IN, session.cookie(session.COOKIE, "", lives_s=0))


async def read_form(receive: Receive, visitor: Visitor) -> dict[str, str]:
    """Return the last value of each field of a submitted form, after checking that it was issued to this visitor.

    Raises:
        TooLarge, TooSlow, ClientDisconnected: as `read_whole`.
        BadRequest: the form has too many fields.
        Forbidden: it was issued to somebody else; another site's page may have sent it.
    """
    body = await read_whole(receive, MOST_FORM_BYTES, FORM_TIMEOUT_S)
    try:
        form = dict(parse_qsl(body.decode("utf-8", "replace"), keep_blank_values=True, max_num_fields=MOST_FIELDS))
    except ValueError as error:
        raise BadRequest(f"a form may have at most {MOST_FIELDS} fields") from error
    if not compare_digest(form.get("csrf", "").encode(), visitor.csrf.encode()):
        raise Forbidden(
            "this form does not belong to your current session: it was open while you signed in or out, or cookies "
            "are off for this site. Nothing was changed; go back, reload the page and send it again"
        )
    return form


async def _show_sign_in(send: Send, visitor: Visitor, status: int, after: str, error: ProxyError | None) -> None:
    values = {"next": session.own_path(after), "wrong": None if error is None else error.message}
    page = rendering.page("sign_in.html", visitor, session.SIGN_IN, datetime.now(UTC), values)
    await send_whole(send, status, [(b"content-type", error_page.HTML), error_page.NO_STORE], page.encode())


async def _ask_to_sign_in(scope: Scope, send: Send) -> None:
    after = quote(here(scope), safe="/") if scope["method"] in ("GET", "HEAD") else session.FIRST
    to = f"{session.SIGN_IN}?next={after}"
    if b"hx-request" in headers_of(scope):
        # The request is for a part of a page whose session is over: redirect the whole page, not the part.
        await send_whole(send, 401, [(b"hx-redirect", to.encode()), error_page.NO_STORE], b"")
    else:
        await _go(send, to)


async def _go(send: Send, to: str, *headers: Header) -> None:
    await send_whole(send, 303, [(b"location", to.encode("latin-1")), error_page.NO_STORE, *headers], b"")


async def _send_file(scope: Scope, send: Send, name: str) -> None:
    asset = assets.files().get(name)
    if asset is None or scope["method"] not in ("GET", "HEAD"):
        raise NotFound(f"there is no file {name[:200]!r} here")
    # The URL contains the version, so its content never changes.
    is_current = scope["query_string"] == f"v={asset.version}".encode()
    cache_control = b"public, max-age=31536000, immutable" if is_current else b"no-cache"
    headers = [(b"content-type", asset.kind), (b"cache-control", cache_control)]
    await send_whole(send, 200, headers, b"" if scope["method"] == "HEAD" else asset.body)


def _rater(scope: Scope) -> str:
    """Return the name under which the visitor rates."""
    principal: Principal = scope[PRINCIPAL]
    return session.rater_of(headers_of(scope)) or principal.name or Visitor.rater


def here(scope: Scope) -> str:
    """Return the path and query of a request."""
    query = scope["query_string"].decode("latin-1")
    return f"{quote(scope['path'])}?{query}" if query else quote(scope["path"])


def address_of(scope: Scope) -> str:
    """Return the scheme and host by which the browser reached us: `https://whetstone.example.com`."""
    host = headers_of(scope).get(b"host", b"").decode("latin-1")
    if not host:  # HTTP/1.0 may leave it out
        name, port = scope["server"]
        host = f"[{name}]:{port}" if ":" in name else f"{name}:{port}"
    return f"{'https' if is_https(scope) else 'http'}://{host}"


def is_https(scope: Scope) -> bool:
    """Return whether the browser used TLS, which may end before us.

    Forwarded headers are not trusted. The browser itself shows it: by the origin of forms, by the referrer of links.
    """
    headers = headers_of(scope)
    own = b"https://" + headers.get(b"host", b"").lower()
    came_from = headers.get(b"referer", b"").lower()
    return (
        scope.get("scheme") == "https"
        or headers.get(b"origin", b"").lower().startswith(b"https://")
        or (came_from + b"/").startswith(own + b"/")
    )
