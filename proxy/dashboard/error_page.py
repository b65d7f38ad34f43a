"""Render an error as a page."""

from datetime import UTC, datetime
from http import HTTPStatus

from proxy.dashboard import rendering
from proxy.dashboard.interfaces import Visitor
from proxy.errors import ProxyError
from proxy.http.asgi import Header, Send, send_whole

ANONYMOUS = Visitor("", None, "", signed_in=False, may_look=False)
HTML = b"text/html; charset=utf-8"
NO_STORE: Header = (b"cache-control", b"no-store")
"""No cache may store what the dashboard shows."""


def page(error: ProxyError, visitor: Visitor = ANONYMOUS, here: str = "/ui") -> bytes:
    """Return the page of an error."""
    try:
        title = HTTPStatus(error.status).phrase
    except ValueError:
        title = "Error"
    values = {"status": error.status, "title": title, "message": error.message}
    return rendering.page("error.html", visitor, here, datetime.now(UTC), values).encode()


async def answer(send: Send, error: ProxyError, visitor: Visitor = ANONYMOUS, here: str = "/ui") -> None:
    """Send the page of an error."""
    headers = [header for header in error.headers() if header[0] in (b"retry-after", b"connection")]
    await send_whole(send, error.status, [(b"content-type", HTML), NO_STORE, *headers], page(error, visitor, here))
