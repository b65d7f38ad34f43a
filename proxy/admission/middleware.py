"""Decide whether a request may come in before its body is read. Raw ASGI around the app.

The principal of an admitted request is stored in its scope.
"""

from collections.abc import Awaitable, Callable, Collection, Mapping

from proxy.admission import cors, request_id, scopes
from proxy.admission import origin as guard
from proxy.admission.api_keys import Keys
from proxy.admission.concurrency import ConcurrencyLimit
from proxy.admission.rate_limits import RateLimiter, has_quota
from proxy.domain.address import split_url
from proxy.domain.routes import HEALTH, is_dashboard
from proxy.errors import MissingScope, NotFound, ProxyError
from proxy.http.asgi import Receive, Routes, Scope, Send, headers_of, with_headers
from proxy.http.scope import PRINCIPAL, URL_ADDRESS
from proxy.metrics import rejections
from whetstone.domain.api_keys import KeyScope, Principal


class AdmissionMiddleware:
    """Admits requests. `route` returns the routes that serve a project's requests with a method and a path."""

    def __init__(
        self,
        keys: Keys,
        limiter: RateLimiter,
        in_flight: ConcurrencyLimit,
        home: str,
        cors_origins: Collection[str],
        route: Callable[[str, str, str], Routes],
        dashboard: Routes,
    ) -> None:
        self._keys = keys
        self._limiter = limiter
        self._in_flight = in_flight
        self._home = home
        self._cors_origins = cors_origins
        self._route = route
        self._dashboard = dashboard

    def serve(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Answer one request: by the routes of its key's project, or with the reason why it may not come in."""
        return request_id.named(self._look, scope, receive, send)

    def _look(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        return (self._dashboard if is_dashboard(scope["path"]) else self._serve)(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            headers = headers_of(scope)
            origin = guard.check(headers, keys_needed=self._keys.needed, cors_origins=self._cors_origins)
            if origin is not None:
                send = with_headers(send, cors.headers(origin))
                if cors.is_preflight(scope, headers):
                    await cors.answer_preflight(send, headers)
                    return
            principal, needs = self._authorize(scope, headers)
            project = self._home if principal is None else principal.project
            routes = self._route(project, scope["method"], scope["path"])
            if needs == "inference" and principal is not None and has_quota(principal):
                send = with_headers(send, self._limiter.check(principal))
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

    def _authorize(self, scope: Scope, headers: Mapping[bytes, bytes]) -> tuple[Principal | None, KeyScope | None]:
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
        needs = scopes.needed(method, path)
        principal = self._keys.find_or_none(headers) if needs is None else self._keys.admit(headers, needs)
        if path in HEALTH:
            principal = self._of_home(principal, needs)
        scope[PRINCIPAL] = principal
        return principal, needs

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
