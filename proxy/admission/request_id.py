"""Log and return the id that an app, or a gateway before the proxy, gives to a request."""

from collections.abc import Awaitable

from proxy.http.asgi import Receive, Routes, Scope, Send, headers_of, with_headers
from whetstone.domain.ids import ID
from whetstone.observability import log_setup

HEADER = b"x-request-id"


def named(app: Routes, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
    """Answer a request. Add its `X-Request-Id` to every log line meanwhile, and to the answer.

    A value outside our ids' alphabet is ignored: no app is refused because of its gateway's request ids.
    """
    name = headers_of(scope).get(HEADER)
    if name is None or not ID.fullmatch(text := name.decode("latin-1")):
        return app(scope, receive, send)
    return _named(text, app, scope, receive, send)


async def _named(name: str, app: Routes, scope: Scope, receive: Receive, send: Send) -> None:
    with log_setup.about(request=name):
        await app(scope, receive, with_headers(send, [(HEADER, name.encode())]))
