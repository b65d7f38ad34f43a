"""Decide whether a request may come in before its body is read, and limit what is in flight. Raw ASGI around the app.

Without keys only this machine may send requests, with keys only apps and pages of allowed origins (CORS). No cookie
grants access to the proxy, so credentials are not allowed: a page sends a key in a header that it sets.

The principal of an admitted request is stored in its scope.
"""

from collections.abc import Awaitable, Callable, Collection, Mapping, MutableMapping
from typing import Any
from urllib.parse import urlsplit

from proxy.admission.api_keys import Keys, scope_needed
from proxy.admission.feedback_tokens import FeedbackTokens, token_in
from proxy.admission.rate_limits import RateLimiter
from proxy.domain.address import HEALTH, is_dashboard, split_url
from proxy.domain.feedback import TOKEN_HEADER
from proxy.errors import Busy, Forbidden, MissingScope, NotFound, ProxyError, UnsupportedEncoding
from proxy.http.asgi import (
    EXCHANGE,
    FEEDBACK_CLAIM,
    PRINCIPAL,
    URL_ADDRESS,
    Header,
    Receive,
    Routes,
    Scope,
    Send,
    WithHeaders,
    exchange_of,
    headers_of,
)
from proxy.metrics import rejections
from whetstone.config.proxy import LOOPBACK, ProxySettings
from whetstone.domain.api_keys import Need, Principal
from whetstone.domain.ids import ID
from whetstone.observability import log_setup

READS = frozenset({"GET", "HEAD", "OPTIONS"})
"""Methods whose bodies are not read. They are not limited, as health checks must pass when nothing else does."""
REQUEST_ID = b"x-request-id"
FORWARDED = (b"forwarded", b"x-forwarded-for", b"x-forwarded-host", b"x-real-ip")
FEEDBACK = ("POST", "/v1/feedback")
"""The route that takes feedback tokens."""
RATINGS_PER_MIN = 20
"""How often one completion may be rated by token in a minute: anyone who sees the page may send them."""
PREFLIGHT_CACHE_S = 600
"""Seconds that a browser may cache a preflight's answer."""
EXPOSED = b", ".join(
    (
        *(b"x-trajectory-id", b"x-group-id", b"x-completion-id", b"x-policy-version", b"x-threaded-by", b"retry-after"),
        *(b"x-ratelimit-limit-requests", b"x-ratelimit-remaining-requests"),
        *(b"x-ratelimit-limit-tokens", b"x-ratelimit-remaining-tokens", TOKEN_HEADER),
    )
)


class ConcurrencyLimit:
    """Counts the requests in flight, and the bytes of their bodies."""

    def __init__(self, settings: ProxySettings) -> None:
        self._most, self._most_bytes = settings.max_in_flight, settings.max_in_flight_bytes
        self.requests = 0
        self.bytes = 0
        """Bytes of their bodies, as far as they have arrived."""

    async def serve(self, app: Routes, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request, and count it until it ends.

        Raises:
            UnsupportedEncoding: its body would have to be decompressed, with no bound on its size.
            Busy: too many requests are in flight. Reading the body raises it too, if all bodies together are too long.
        """
        if scope["method"] in READS:
            await app(scope, receive, send)
            return
        encoding = headers_of(scope).get(b"content-encoding", b"").strip().lower()
        if encoding not in (b"", b"identity"):
            raise UnsupportedEncoding(
                f"a body in the encoding {encoding.decode('latin-1')[:100]!r} is not read; send it as it is",
                param="content-encoding",
            )
        if self.requests >= self._most:
            raise Busy(f"{self._most} requests are in flight (setting proxy.max_in_flight); try again soon")
        exchange = exchange_of(scope)
        # A body that has already arrived will not grow.
        whole = None if exchange is None else exchange.whole_bytes()
        body = _BodyCounter(self, receive)
        self.requests += 1
        try:
            if whole is None:
                receive = body.receive
            else:
                body.add(whole)
            await app(scope, receive, send)
        finally:
            self.release(body.bytes)

    def try_acquire(self, scope: Scope, headers: Mapping[bytes, bytes]) -> int | None:
        """Count a plain request, as nearly all are: its body has arrived, is not encoded, and there is room for it.
        Return the body's size; pass it to `release`. None: it is not counted; call `serve`, which raises if there is no
        room."""
        if scope["method"] in READS or b"content-encoding" in headers:
            return None
        exchange = scope.get(EXCHANGE)
        size: int | None = None if exchange is None else exchange.whole_bytes()
        if size is None or self.requests >= self._most or self.bytes + size > self._most_bytes:
            return None
        self.requests += 1
        self.bytes += size
        return size

    def release(self, size: int) -> None:
        """Stop counting a request whose body has this size."""
        self.requests -= 1
        self.bytes -= size

    def add_bytes(self, size: int) -> None:
        """Count this many bytes of a body.

        Raises:
            Busy: the total is too large. The bytes still count until their request is over.
        """
        self.bytes += size
        if size and self.bytes > self._most_bytes:
            raise Busy(
                f"the bodies of all requests are over {self._most_bytes} bytes (setting proxy.max_in_flight_bytes); "
                "try again soon"
            )


class _BodyCounter:
    """Counts one request's body: whole, or as it arrives."""

    def __init__(self, limit: ConcurrencyLimit, receive: Receive) -> None:
        self._limit, self._receive = limit, receive
        self.bytes = 0

    def add(self, size: int) -> None:
        self.bytes += size
        self._limit.add_bytes(size)

    async def receive(self) -> MutableMapping[str, Any]:
        message = await self._receive()
        self.add(len(message.get("body", b"")))
        return message


class AdmissionMiddleware:
    """Admits requests. `route` returns the routes that serve a project's requests with a method and a path."""

    def __init__(
        self,
        keys: Keys,
        tokens: FeedbackTokens,
        limiter: RateLimiter,
        in_flight: ConcurrencyLimit,
        home: str,
        cors_origins: Collection[str],
        route: Callable[[str, str, str], Routes],
        dashboard: Routes,
    ) -> None:
        self._keys = keys
        self._tokens = tokens
        self._limiter = limiter
        self._in_flight = in_flight
        self._home = home
        self._cors_origins = cors_origins
        self._route = route
        self._dashboard = dashboard

    def serve(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Answer one request: by the routes of its key's project, or with the reason why it may not come in.

        The id that an app, or a gateway before the proxy, gives to the request (`X-Request-Id`) is in every log line
        meanwhile, and in the answer. A value outside our ids' alphabet is ignored: no app is refused because of its
        gateway's request ids.
        """
        app = self._dashboard if is_dashboard(scope["path"]) else self._serve
        name = headers_of(scope).get(REQUEST_ID)
        if name is None or not ID.fullmatch(text := name.decode("latin-1")):
            return app(scope, receive, send)
        return _serve_named(text, app, scope, receive, WithHeaders(send, [(REQUEST_ID, name)]))

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            headers = headers_of(scope)
            origin = check_origin(headers, keys_needed=self._keys.needed, cors_origins=self._cors_origins)
            if origin is not None:
                send = WithHeaders(send, cors_headers(origin))
                if is_preflight(scope, headers):
                    await answer_preflight(send, headers)
                    return
            principal, needs = self._authorize(scope, headers)
            routes = self._route(self._home if principal is None else principal.project, scope["method"], scope["path"])
            if needs == "inference" and principal is not None and has_quota(principal):
                send = WithHeaders(send, self._limiter.check(principal))
            size = self._in_flight.try_acquire(scope, headers)
            if size is None:
                await self._in_flight.serve(routes, scope, receive, send)
                return
            try:
                await routes(scope, receive, send)
            finally:
                self._in_flight.release(size)
        except ProxyError as error:
            rejections.note(error)
            await send({"type": "http.response.start", "status": error.status, "headers": error.headers()})
            await send({"type": "http.response.body", "body": error.body()})

    def _authorize(self, scope: Scope, headers: Mapping[bytes, bytes]) -> tuple[Principal | None, Need | None]:
        """Store and return whose request it is. Return also the scope that it needs.

        Raises:
            ProxyError: the request may not come in.
        """
        method, path = scope["method"], scope["path"]
        if "\0" in path and method in ("GET", "DELETE"):
            raise NotFound("no path has a NUL")  # nor can a text of PostgreSQL have one
        if path.startswith("/r/"):
            scope[URL_ADDRESS], path = split_url(path)
            scope["path"], scope["raw_path"] = path, path.encode()
        if (method, path) == FEEDBACK and (token := token_in(headers)) is not None:
            scope[PRINCIPAL] = self._authorize_token(scope, token)
            return scope[PRINCIPAL], None
        needs = scope_needed(method, path)
        principal = self._keys.find_or_none(headers) if needs is None else self._keys.admit(headers, needs)
        # The answer of a health route covers all projects: only the home project's keys may see more than the public.
        if path in HEALTH and principal is not None and principal.project != self._home:
            if needs is not None:
                raise MissingScope(f"this tells of all projects: it needs an admin's key of the project {self._home!r}")
            principal = None
        scope[PRINCIPAL] = principal
        return principal, needs

    def _authorize_token(self, scope: Scope, token: bytes) -> Principal:
        """Store what a feedback token permits, and return whom it acts for.

        Raises:
            WrongToken: it is invalid.
            RateLimited: its completion was rated too often just now.
        """
        claim = self._tokens.verify(token)
        principal = self._keys.of_token(claim)
        # No key id has a slash, so these are buckets of their own.
        rated = f"token/{claim.completion_id}/{claim.choice}"
        self._limiter.check(Principal(claim.project, rated, frozenset(), RATINGS_PER_MIN), whose="feedback token")
        scope[FEEDBACK_CLAIM] = claim
        return principal


def has_quota(principal: Principal) -> bool:
    """Return whether the key has a rate limit."""
    return principal.requests_per_min is not None or principal.tokens_per_min is not None


async def _serve_named(name: str, app: Routes, scope: Scope, receive: Receive, send: Send) -> None:
    with log_setup.about(request=name):
        await app(scope, receive, send)


def check_origin(
    headers: Mapping[bytes, bytes], *, keys_needed: bool = False, cors_origins: Collection[str] = ()
) -> bytes | None:
    """Check a request's origin. Return the foreign origin that is allowed and needs `cors_headers`, or None.

    If keys are needed, they decide who may come in, regardless of Host and forwarding. A page of another origin must be
    in `cors_origins`: its user could have been tricked into giving it a key.

    Without keys the Host must be loopback (otherwise a web page could reach us by rebinding its own name), an Origin
    too, and the request must not be forwarded: behind a public proxy every client would look like this machine. Of the
    pages on this machine, those in `cors_origins` may read the answers.

    Raises:
        Forbidden: the request may not come in.
    """
    origin = headers.get(b"origin")
    if not keys_needed:
        _check_this_machine(headers)
        return origin if origin is not None and origin.decode("latin-1") in cors_origins else None
    if origin is None or _is_own(origin, headers):
        return None
    if origin.decode("latin-1") not in cors_origins:
        raise Forbidden("a page of another origin may not ask; setting proxy.cors_origins lists those that may")
    return origin


def check_own_page(headers: Mapping[bytes, bytes]) -> None:
    """Check that a request comes from one of our pages, or from no page: not even another port of this machine may send
    our forms.

    Raises:
        Forbidden: another page sent it.
    """
    origin = headers.get(b"origin")
    if origin is not None and not _is_own(origin, headers):
        raise Forbidden("a page of another origin may not ask for the dashboard")


def _check_this_machine(headers: Mapping[bytes, bytes]) -> None:
    remedy = "without keys only this machine may ask; `whetstone keys create` makes one"
    host = _host_of(b"//" + headers.get(b"host", b""))
    if host not in LOOPBACK:
        raise Forbidden(f"Host {host!r} is not this machine; {remedy}")
    origin = headers.get(b"origin")
    if origin is not None and _host_of(origin) not in LOOPBACK:
        raise Forbidden(f"a page of another origin may not ask; {remedy}")
    if forwarded := next((name for name in FORWARDED if name in headers), None):
        raise Forbidden(f"a forwarded request ({forwarded.decode()}) may not; {remedy}")


def _is_own(origin: bytes, headers: Mapping[bytes, bytes]) -> bool:
    """Return whether the page is ours: it was loaded from the same host as the one in this request."""
    host = headers.get(b"host", b"")
    return bool(host) and origin.lower() in (b"http://" + host.lower(), b"https://" + host.lower())


def _host_of(url: bytes) -> str | None:
    try:
        return urlsplit(url.decode("latin-1")).hostname
    except ValueError:
        return None


def cors_headers(origin: bytes) -> list[Header]:
    """Return the headers that let a page of this origin read an answer."""
    return [
        (b"access-control-allow-origin", origin),
        (b"access-control-expose-headers", EXPOSED),
        (b"vary", b"Origin"),
    ]


def is_preflight(scope: Scope, headers: Mapping[bytes, bytes]) -> bool:
    """Return whether this is a browser's preflight, which never carries a key."""
    return scope["method"] == "OPTIONS" and b"access-control-request-method" in headers


async def answer_preflight(send: Send, headers: Mapping[bytes, bytes]) -> None:
    """Answer a preflight: allow all of our methods, and the headers that the page wants to send."""
    allowed = [
        (b"access-control-allow-methods", b"GET, POST, DELETE"),
        (b"access-control-allow-headers", headers.get(b"access-control-request-headers", b"authorization")),
        (b"access-control-max-age", str(PREFLIGHT_CACHE_S).encode()),
    ]
    await send({"type": "http.response.start", "status": 204, "headers": allowed})
    await send({"type": "http.response.body", "body": b""})
