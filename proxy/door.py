"""Who may come in, and how far: one look at each request before anything of it is read. Raw ASGI around the app.

Knows hosts, origins, keys, scopes, quotas and how much is in flight; no route. Whoever passes is in the scope.
"""

from collections.abc import Callable, Collection

from proxy import cors, guard, health, refusals, scopes
from proxy.address import split_url
from proxy.asgi import Receive, Routes, Scope, Send, headers_of, with_headers
from proxy.errors import MissingScope, NotFound, ProxyError
from proxy.in_flight import InFlight
from proxy.inference import SAID
from proxy.keys import PRINCIPAL, Keys
from proxy.quotas import Quotas
from proxy.ui.door import DashboardDoor, is_dashboard
from whetstone.keys import KeyScope, Principal


class Door:
    """Lets requests in. `tenant` gives the routes of a project."""

    def __init__(
        self,
        keys: Keys,
        quotas: Quotas,
        in_flight: InFlight,
        home: str,
        cors_origins: Collection[str],
        tenant: Callable[[str], Routes],
        dashboard: DashboardDoor,
    ) -> None:
        self._keys = keys
        self._quotas = quotas
        self._in_flight = in_flight
        self._home = home
        self._cors_origins = cors_origins
        self._tenant = tenant
        self._dashboard = dashboard

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request: by the routes of its key's project, or why it may not come in."""
        path = scope["path"]
        if is_dashboard(path):
            await self._dashboard(scope, receive, send)
            return
        try:
            headers = headers_of(scope)
            origin = guard.check(headers, keys_needed=self._keys.needed, cors_origins=self._cors_origins)
            if origin is not None:
                send = with_headers(send, cors.told(origin))
                if cors.is_preflight(scope, headers):
                    await cors.answer_preflight(send, headers)
                    return
            method = scope["method"]
            if "\0" in path and method in ("GET", "DELETE"):
                raise NotFound("no path has a NUL")  # nor has a text of PostgreSQL's
            if path.startswith("/r/"):
                scope[SAID], path = split_url(path)
                scope["path"], scope["raw_path"] = path, path.encode()
            needs = scopes.needed(method, path)
            principal = self._keys.known(headers) if needs is None else self._keys.admit(headers, needs)
            if path in health.PATHS:
                principal = self._of_home(principal, needs)
            scope[PRINCIPAL] = principal
            if principal is not None and needs == "inference":
                left = self._quotas.take(principal)
                send = with_headers(send, left) if left else send
            tenant = self._tenant(self._home if principal is None else principal.project)
            size = self._in_flight.enter(scope)
            if size is None:
                await self._in_flight.serve(tenant, scope, receive, send)
                return
            try:
                await tenant(scope, receive, send)
            finally:
                self._in_flight.leave(size)
        except ProxyError as error:
            refusals.note(error)
            await send({"type": "http.response.start", "status": error.status, "headers": error.headers()})
            await send({"type": "http.response.body", "body": error.body()})

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
