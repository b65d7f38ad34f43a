"""The name that an app, or a gateway before us, has for a request: it is logged and returned. Knows no route."""

from collections.abc import Iterator
from contextlib import contextmanager

from proxy.asgi import Scope, Send, with_headers
from whetstone import logs
from whetstone.ids import ID

HEADER = b"x-request-id"


@contextmanager
def named(scope: Scope, send: Send) -> Iterator[Send]:
    """Around a request: every line inside says its `X-Request-Id`, and what is sent by `Send` returns it.

    What is no id of ours' alphabet is left alone: no app is refused for what a gateway calls its requests.
    """
    text = next((value for name, value in scope["headers"] if name == HEADER), b"").decode("latin-1")
    if not ID.fullmatch(text):
        yield send
        return
    with logs.about(request=text):
        yield with_headers(send, [(HEADER, text.encode())])
