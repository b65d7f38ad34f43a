"""Let web pages of the configured origins read answers (CORS).

No cookie grants access to the proxy, so credentials are not allowed: a page sends a key in a header that it sets.
"""

from collections.abc import Mapping

from proxy.http.asgi import Header, Scope, Send

PREFLIGHT_CACHE_S = 600
"""Seconds that a browser may cache a preflight's answer."""
EXPOSED = b", ".join(
    (
        *(b"x-trajectory-id", b"x-group-id", b"x-completion-id", b"x-policy-version", b"x-threaded-by", b"retry-after"),
        *(b"x-ratelimit-limit-requests", b"x-ratelimit-remaining-requests"),
        *(b"x-ratelimit-limit-tokens", b"x-ratelimit-remaining-tokens"),
    )
)


def headers(origin: bytes) -> list[Header]:
    """Return the headers that let a page of this origin read an answer."""
    return [
        (b"access-control-allow-origin", origin),
        (b"access-control-expose-headers", EXPOSED),
        (b"vary", b"Origin"),
    ]


def is_preflight(scope: Scope, headers: Mapping[bytes, bytes]) -> bool:
    """Return whether this is a browser's preflight, which never carries a key."""
    return scope["method"] == "OPTIONS" and b"access-control-request-method" in headers


async def answer_preflight(send: Send, headers: Mapping[bytes, bytes]) -> None:
    """Answer a preflight: allow all of our methods, and the headers that the page wants to send."""
    allowed = [
        (b"access-control-allow-methods", b"GET, POST, DELETE"),
        (b"access-control-allow-headers", headers.get(b"access-control-request-headers", b"authorization")),
        (b"access-control-max-age", str(PREFLIGHT_CACHE_S).encode()),
    ]
    await send({"type": "http.response.start", "status": 204, "headers": allowed})
    await send({"type": "http.response.body", "body": b""})
