"""Decide whether a request may come in before its body is read. Raw ASGI around the app.

The principal of an admitted request is stored in its scope.
"""

from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from proxy.admission import cors, request_id, scopes
from proxy.admission import origin as guard
from proxy.admission.api_keys import Held, Keys
from proxy.admission.concurrency import ConcurrencyLimit, is_plain
from proxy.admission.rate_limits import RateLimiter, has_quota
from proxy.domain.address import split_url
from proxy.domain.routes import HEALTH, is_dashboard
from proxy.errors import MissingScope, NotFound, ProxyError
from proxy.http.asgi import NOTES, Receive, Routes, Scope, Send, headers_of, with_headers
from proxy.http.scope import PRINCIPAL, SAID
from proxy.metrics import rejections
from whetstone.domain.api_keys import KeyScope, Principal

_ADMITTED = "whetstone.admitted"
"""Key of the admission in a head's notes."""
_SAYS_MORE = frozenset({b"origin", request_id.HEADER})
"""Headers that change the answer."""
_NEVER = Held(-1, 0.0)
"""Marks an admission that is valid for one request only."""


@dataclass(frozen=True, slots=True)
class Admission:
    """The decision to admit requests with one head."""

    principal: Principal | None
    routes: Routes
    """The routes of the principal's project."""
    plain: bool
    """It can be counted at once (`concurrency.is_plain`)."""
    limited: bool
    """A rate limit applies."""
    held: Held
    """How long the admission is valid."""


class AdmissionMiddleware:
    """Admits requests. `route` returns the routes that serve a project's requests with a method and a path."""

    def __init__(
        self,
        keys: Keys,
        quotas: RateLimiter,
        in_flight: ConcurrencyLimit,
        home: str,
        cors_origins: Collection[str],
        route: Callable[[str, str, str], Routes],
        dashboard: Routes,
    ) -> None:
        self._keys = keys
        self._quotas = quotas
        self._in_flight = in_flight
        self._home = home
        self._cors_origins = cors_origins
        self._route = route
        self._dashboard = dashboard

    def serve(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Answer one request: by the routes of its key's project, or with the reason why it may not come in."""
        notes: dict[str, Any] | None = scope.get(NOTES)
        if notes is not None:
            admitted: Admission | None = notes.get(_ADMITTED)
            if admitted is not None and self._keys.hold(admitted.held):
                return self._serve(scope, receive, send, admitted)
        return request_id.named(self._look, scope, receive, send)

    def _look(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        return (self._dashboard if is_dashboard(scope["path"]) else self._serve)(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send, admitted: Admission | None = None) -> None:
        """`admitted`: an earlier admission of the same head."""
        try:
            if admitted is None:
                headers = headers_of(scope)
                origin = guard.check(headers, keys_needed=self._keys.needed, cors_origins=self._cors_origins)
                if origin is not None:
                    send = with_headers(send, cors.told(origin))
                    if cors.is_preflight(scope, headers):
                        await cors.answer_preflight(send, headers)
                        return
                admitted = self._admit(scope, headers)
            principal = scope[PRINCIPAL] = admitted.principal
            if admitted.limited and principal is not None:
                left = self._quotas.take(principal)
                send = with_headers(send, left) if left else send
            size = self._in_flight.enter(scope) if admitted.plain else None
            if size is None:
                await self._in_flight.serve(admitted.routes, scope, receive, send)
                return
            try:
                await admitted.routes(scope, receive, send)
            finally:
                self._in_flight.leave(size)
        except ProxyError as error:
            rejections.note(error)
            await send({"type": "http.response.start", "status": error.status, "headers": error.headers()})
            await send({"type": "http.response.body", "body": error.body()})

    def _admit(self, scope: Scope, headers: Mapping[bytes, bytes]) -> Admission:
        """Return the admission of a request. Cache it for the next requests with this head, if it depends only on the
        head.

        Raises:
            ProxyError: the request may not come in.
        """
        method, path = scope["method"], scope["path"]
        if "\0" in path and method in ("GET", "DELETE"):
            raise NotFound("no path has a NUL")  # nor can a text of PostgreSQL have one
        if path.startswith("/r/"):
            scope[SAID], path = split_url(path)
            scope["path"], scope["raw_path"] = path, path.encode()
        needs = scopes.needed(method, path)
        principal = self._keys.known(headers) if needs is None else self._keys.admit(headers, needs)
        if path in HEALTH:
            principal = self._of_home(principal, needs)
        plain, limited = is_plain(scope), needs == "inference" and principal is not None and has_quota(principal)
        routes = self._route(self._home if principal is None else principal.project, method, path)
        notes = scope.get(NOTES)
        # Cache only plain inference without these headers or an address in the URL: the rest is checked each time.
        if notes is None or not plain or needs != "inference" or SAID in scope or not _SAYS_MORE.isdisjoint(headers):
            return Admission(principal, routes, plain, limited, _NEVER)
        admitted = notes[_ADMITTED] = Admission(principal, routes, plain, limited, self._keys.held(headers))
        return admitted

    def _of_home(self, principal: Principal | None, needs: KeyScope | None) -> Principal | None:
        """Return the principal of a request to a health route if it belongs to the home project: the answer covers all
        projects.

        Raises:
            MissingScope: another project requests what is not public.
        """
        if principal is None or principal.project == self._home:
            return principal
        if needs is not None:
            raise MissingScope(f"this tells of all projects: it needs an admin's key of the project {self._home!r}")
        return None
