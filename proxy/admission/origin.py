"""Block requests from outside: without keys only this machine may send them, with keys only pages of allowed origins.

Pure.
"""

from collections.abc import Collection, Iterable, Mapping
from urllib.parse import urlsplit

from proxy.errors import Forbidden
from whetstone.config.proxy import LOOPBACK

FORWARDED = (b"forwarded", b"x-forwarded-for", b"x-forwarded-host", b"x-real-ip")


def check(
    headers: Mapping[bytes, bytes], *, keys_needed: bool = False, cors_origins: Collection[str] = ()
) -> bytes | None:
    """Check a request's origin. Return the foreign origin that is allowed and needs CORS headers (`cors`), or None.

    If keys are needed, they decide who may come in, regardless of Host and forwarding. A page of another origin must be
    in `cors_origins`: its user could have been tricked into giving it a key.

    Without keys the Host must be loopback (otherwise a web page could reach us by rebinding its own name), an Origin
    too, and the request must not be forwarded: behind a public proxy every client would look like this machine.

    Raises:
        Forbidden: the request may not come in.
    """
    if not keys_needed:
        _check_this_machine(headers)
        return None
    origin = headers.get(b"origin")
    if origin is None or _is_own(origin, headers):
        return None
    if origin.decode("latin-1") not in cors_origins:
        raise Forbidden("a page of another origin may not ask; setting proxy.cors_origins lists those that may")
    return origin


def check_own(headers: Mapping[bytes, bytes]) -> None:
    """Check that a request comes from one of our pages, or from no page: not even another port of this machine may send
    our forms.

    Raises:
        Forbidden: another page sent it.
    """
    origin = headers.get(b"origin")
    if origin is not None and not _is_own(origin, headers):
        raise Forbidden("a page of another origin may not ask for the dashboard")


def first(names: Iterable[bytes], headers: Mapping[bytes, bytes]) -> bytes | None:
    """Return the first of `names` that is among the headers, or None."""
    return next((name for name in names if name in headers), None)


def _check_this_machine(headers: Mapping[bytes, bytes]) -> None:
    remedy = "without keys only this machine may ask; `whetstone keys create` makes one"
    host = _name(b"//" + headers.get(b"host", b""))
    if host not in LOOPBACK:
        raise Forbidden(f"Host {host!r} is not this machine; {remedy}")
    origin = headers.get(b"origin")
    if origin is not None and _name(origin) not in LOOPBACK:
        raise Forbidden(f"a page of another origin may not ask; {remedy}")
    if forwarded := first(FORWARDED, headers):
        raise Forbidden(f"a forwarded request ({forwarded.decode()}) may not; {remedy}")


def _is_own(origin: bytes, headers: Mapping[bytes, bytes]) -> bool:
    """Return whether the page is ours: it was loaded from the same host as the one in this request."""
    host = headers.get(b"host", b"")
    return bool(host) and origin.lower() in (b"http://" + host.lower(), b"https://" + host.lower())


def _name(url: bytes) -> str | None:
    try:
        return urlsplit(url.decode("latin-1")).hostname
    except ValueError:
        return None
