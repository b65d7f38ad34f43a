"""Answers that web pages of other origins may read: CORS, for the origins of the settings. Pure ASGI; knows no route.

No cookie opens the proxy, so no credentials are allowed for: a page asks with a key in a header of its own making.
"""

from collections.abc import Mapping

from proxy.asgi import Header, Scope, Send

KEPT_S = 600
"""How long a browser need not ask again whether a page may ask."""
EXPOSED = b", ".join(
    (
        *(b"x-trajectory-id", b"x-group-id", b"x-completion-id", b"x-policy-version", b"x-threaded-by", b"retry-after"),
        *(b"x-ratelimit-limit-requests", b"x-ratelimit-remaining-requests"),
        *(b"x-ratelimit-limit-tokens", b"x-ratelimit-remaining-tokens"),
    )
)


def told(origin: bytes) -> list[Header]:
    """The headers that let a page of this origin read an answer."""
    return [
        (b"access-control-allow-origin", origin),
        (b"access-control-expose-headers", EXPOSED),
        (b"vary", b"Origin"),
    ]


def is_preflight(scope: Scope, headers: Mapping[bytes, bytes]) -> bool:
    """Whether a browser asks if its page may ask; it never sends a key with that."""
    return scope["method"] == "OPTIONS" and b"access-control-request-method" in headers


async def answer_preflight(send: Send, headers: Mapping[bytes, bytes]) -> None:
    """Yes: every method of ours, and the headers that the page means to send."""
    allowed = [
        (b"access-control-allow-methods", b"GET, POST, DELETE"),
        (b"access-control-allow-headers", headers.get(b"access-control-request-headers", b"authorization")),
        (b"access-control-max-age", str(KEPT_S).encode()),
    ]
    await send({"type": "http.response.start", "status": 204, "headers": allowed})
    await send({"type": "http.response.body", "body": b""})
