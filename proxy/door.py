"""Who may come in, and how far: one look at each request before anything of it is read. Raw ASGI around the app.

Knows hosts, origins, keys, scopes, quotas and how much is in flight; no route. Whoever passes is in the scope.
"""

from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from proxy import cors, guard, health, refusals, request_id, scopes
from proxy.address import split_url
from proxy.asgi import NOTES, Receive, Routes, Scope, Send, headers_of, with_headers
from proxy.errors import MissingScope, NotFound, ProxyError
from proxy.in_flight import InFlight, is_plain
from proxy.inference import SAID
from proxy.keys import PRINCIPAL, Held, Keys
from proxy.quotas import Quotas, has_quota
from proxy.ui.door import DashboardDoor, is_dashboard
from whetstone.keys import KeyScope, Principal

_ADMITTED = "whetstone.admitted"
"""Where a head's notes have it."""
_SAYS_MORE = frozenset({b"origin", request_id.HEADER})
"""Headers that have the answer say something."""
_NEVER = Held(-1, 0.0)
"""Of who is let in this once."""


@dataclass(frozen=True, slots=True)
class Admitted:
    """As whom requests with one head are let in."""

    principal: Principal | None
    routes: Routes
    """Of its project."""
    plain: bool
    """It can be counted at once (`in_flight.is_plain`)."""
    limited: bool
    """A quota is to be asked."""
    held: Held
    """How long that holds."""


class Door:
    """Lets requests in. `route` gives what serves a project's requests of a method to a path."""

    def __init__(
        self,
        keys: Keys,
        quotas: Quotas,
        in_flight: InFlight,
        home: str,
        cors_origins: Collection[str],
        route: Callable[[str, str, str], Routes],
        dashboard: DashboardDoor,
    ) -> None:
        self._keys = keys
        self._quotas = quotas
        self._in_flight = in_flight
        self._home = home
        self._cors_origins = cors_origins
        self._route = route
        self._dashboard = dashboard

    def serve(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Answer one request: by the routes of its key's project, or why it may not come in."""
        notes: dict[str, Any] | None = scope.get(NOTES)
        if notes is not None:
            admitted: Admitted | None = notes.get(_ADMITTED)
            if admitted is not None and self._keys.hold(admitted.held):
                return self._serve(scope, receive, send, admitted)
        return request_id.named(self._look, scope, receive, send)

    def _look(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        return (self._dashboard if is_dashboard(scope["path"]) else self._serve)(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send, admitted: Admitted | None = None) -> None:
        """`admitted`: as whom its head was let in before."""
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
            refusals.note(error)
            await send({"type": "http.response.start", "status": error.status, "headers": error.headers()})
            await send({"type": "http.response.body", "body": error.body()})

    def _admit(self, scope: Scope, headers: Mapping[bytes, bytes]) -> Admitted:
        """Who asks and how far that goes; noted for the next requests with this head, where it says all of it.

        Raises:
            ProxyError: it may not come in.
        """
        method, path = scope["method"], scope["path"]
        if "\0" in path and method in ("GET", "DELETE"):
            raise NotFound("no path has a NUL")  # nor has a text of PostgreSQL's
        if path.startswith("/r/"):
            scope[SAID], path = split_url(path)
            scope["path"], scope["raw_path"] = path, path.encode()
        needs = scopes.needed(method, path)
        principal = self._keys.known(headers) if needs is None else self._keys.admit(headers, needs)
        if path in health.PATHS:
            principal = self._of_home(principal, needs)
        plain, limited = is_plain(scope), needs == "inference" and principal is not None and has_quota(principal)
        routes = self._route(self._home if principal is None else principal.project, method, path)
        notes = scope.get(NOTES)
        # What is asked for without a word of its own: all else that its head says is looked at each time.
        if notes is None or not plain or needs != "inference" or SAID in scope or not _SAYS_MORE.isdisjoint(headers):
            return Admitted(principal, routes, plain, limited, _NEVER)
        admitted = notes[_ADMITTED] = Admitted(principal, routes, plain, limited, self._keys.held(headers))
        return admitted

    def _of_home(self, principal: Principal | None, needs: KeyScope | None) -> Principal | None:
        """Who asks how the proxy is, if it is the home project: that is told of all projects together.

        Raises:
            MissingScope: another project asks for what not everybody may know.
        """
        if principal is None or principal.project == self._home:
            return principal
        if needs is not None:
            raise MissingScope(f"this tells of all projects: it needs an admin's key of the project {self._home!r}")
        return None
