"""The name that an app, or a gateway before us, has for a request: it is logged and returned. Knows no route."""

from collections.abc import Awaitable

from proxy.asgi import Receive, Routes, Scope, Send, headers_of, with_headers
from whetstone import logs
from whetstone.ids import ID

HEADER = b"x-request-id"


def named(app: Routes, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
    """Have a request answered: every line meanwhile says its `X-Request-Id`, and the answer returns it.

    What is no id of ours' alphabet is left alone: no app is refused for what a gateway calls its requests.
    """
    name = headers_of(scope).get(HEADER)
    if name is None or not ID.fullmatch(text := name.decode("latin-1")):
        return app(scope, receive, send)
    return _named(text, app, scope, receive, send)


async def _named(name: str, app: Routes, scope: Scope, receive: Receive, send: Send) -> None:
    with logs.about(request=name):
        await app(scope, receive, with_headers(send, [(HEADER, name.encode())]))
