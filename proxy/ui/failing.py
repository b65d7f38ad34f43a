"""What went wrong, as a page. Knows statuses and remedies; raises nothing."""

from datetime import UTC, datetime
from http import HTTPStatus

from proxy.asgi import Header, Send, send_whole
from proxy.errors import ProxyError
from proxy.ui.page import Visitor
from proxy.ui.rendering import renderer

NOBODY = Visitor("", None, "", signed_in=False, may_look=False)
HTML = b"text/html; charset=utf-8"
NO_STORE: Header = (b"cache-control", b"no-store")
"""What the dashboard shows is for nobody's cache."""


def page(error: ProxyError, visitor: Visitor = NOBODY, here: str = "/ui") -> bytes:
    """The error's page."""
    try:
        title = HTTPStatus(error.status).phrase
    except ValueError:
        title = "Error"
    values = {"status": error.status, "title": title, "message": error.message}
    return renderer().page("error.html", visitor, here, datetime.now(UTC), values).encode()


async def answer(send: Send, error: ProxyError, visitor: Visitor = NOBODY, here: str = "/ui") -> None:
    """Send the error's page."""
    kept = [header for header in error.headers() if header[0] in (b"retry-after", b"connection")]
    await send_whole(send, error.status, [(b"content-type", HTML), NO_STORE, *kept], page(error, visitor, here))
