"""Nobody from outside: without keys only this machine may ask, with them no web page but those of the settings.

Pure; knows headers, no routes and no keys.
"""

from collections.abc import Collection, Iterable, Mapping
from urllib.parse import urlsplit

from proxy.errors import Forbidden
from whetstone.serving import LOOPBACK

FORWARDED = (b"forwarded", b"x-forwarded-for", b"x-forwarded-host", b"x-real-ip")


def check(
    headers: Mapping[bytes, bytes], *, keys_needed: bool = False, cors_origins: Collection[str] = ()
) -> bytes | None:
    """Let a request pass that may come in; the foreign origin that it is from, which must be told so (`cors`).

    Where keys are needed, they decide who asks, whatever the Host and whoever forwarded it. A page of another origin
    may only if it is of `cors_origins`: it would ask with a key that its user was lured into giving.

    Without keys the Host must be loopback (else a web page could reach us by re-binding its own name), an Origin too,
    and nothing may have been forwarded: behind a public proxy everybody would look like this machine.

    Raises:
        Forbidden: it may not.
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
    """Let a request pass that a page of ours made, or none: not even another port of this machine may send our forms.

    Raises:
        Forbidden: another page made it.
    """
    origin = headers.get(b"origin")
    if origin is not None and not _is_own(origin, headers):
        raise Forbidden("a page of another origin may not ask for the dashboard")


def first(names: Iterable[bytes], headers: Mapping[bytes, bytes]) -> bytes | None:
    """The first of `names` that is among the headers."""
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
    """Whether the page is one of ours: it was reached under the very name that is asked now."""
    host = headers.get(b"host", b"")
    return bool(host) and origin.lower() in (b"http://" + host.lower(), b"https://" + host.lower())


def _name(url: bytes) -> str | None:
    try:
        return urlsplit(url.decode("latin-1")).hostname
    except ValueError:
        return None
