"""Nobody from outside: without keys only this machine may ask. Pure ASGI; knows headers, no routes."""

from collections.abc import Iterable, Mapping
from urllib.parse import urlsplit

from proxy.errors import Forbidden

LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
FORWARDED = (b"forwarded", b"x-forwarded-for", b"x-forwarded-host", b"x-real-ip")


def check(headers: Mapping[bytes, bytes]) -> None:
    """Let a request pass that comes from this machine.

    The Host must be loopback (else a web page could reach us by re-binding its own name), an Origin too, and nothing
    may have been forwarded: behind a public proxy everybody would look like this machine.

    Raises:
        Forbidden: it does not.
    """
    host = _name(b"//" + headers.get(b"host", b""))
    if host not in LOOPBACK:
        raise Forbidden(f"Host {host!r} is not this machine; without keys only loopback may ask")
    origin = headers.get(b"origin")
    if origin is not None and _name(origin) not in LOOPBACK:
        raise Forbidden("a page of another origin may not ask; without keys only loopback may")
    if forwarded := first(FORWARDED, headers):
        raise Forbidden(f"a forwarded request ({forwarded.decode()}) needs keys, which this version cannot check")


def first(names: Iterable[bytes], headers: Mapping[bytes, bytes]) -> bytes | None:
    """The first of `names` that is among the headers."""
    return next((name for name in names if name in headers), None)


def _name(url: bytes) -> str | None:
    try:
        return urlsplit(url.decode("latin-1")).hostname
    except ValueError:
        return None
