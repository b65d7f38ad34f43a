"""The name that an app, or a gateway before us, has for a request: it is logged and returned. Knows no route."""

from proxy.asgi import Receive, Routes, Scope, Send, headers_of, with_headers
from whetstone import logs
from whetstone.ids import ID

HEADER = b"x-request-id"


async def named(app: Routes, scope: Scope, receive: Receive, send: Send) -> None:
    """Have a request answered: every line meanwhile says its `X-Request-Id`, and the answer returns it.

    What is no id of ours' alphabet is left alone: no app is refused for what a gateway calls its requests.
    """
    name = headers_of(scope).get(HEADER)
    text = "" if name is None else name.decode("latin-1")
    if not ID.fullmatch(text):
        await app(scope, receive, send)
        return
    with logs.about(request=text):
        await app(scope, receive, with_headers(send, [(HEADER, text.encode())]))
