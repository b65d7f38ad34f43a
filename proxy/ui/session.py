"""Sessions of the dashboard: tokens, cookies, and the word that each form has to bring back. Knows no table.

The cookie holds a random token, never a key. Of the token only a hash is kept; who reads the tables cannot sign in by
it. The forms' word comes of the token, so that all proxies agree on it and a page of another origin cannot guess it.
"""

import base64
import hashlib
import hmac
import re
import secrets
from collections.abc import Mapping
from datetime import timedelta

from proxy.asgi import Header

COOKIE = "whetstone_ui"
FORM = "whetstone_form"
"""Cookie that forms go by before anybody has signed in. A name of its own: a link from elsewhere brings no session's
cookie, and must not put another in its place."""
SAID = "whetstone_said"
"""Cookie with what an action came to, for the next page."""
PATH = "/ui"
LIFETIME = timedelta(hours=12)
SAID_LIFETIME_S = 60
MOST_SAID = 1000
"""Characters: browsers drop a cookie over 4 KB."""
SIGN_IN = f"{PATH}/sign-in"
FIRST = f"{PATH}/policies"
"""Where who has signed in begins."""

_TOKEN = re.compile(r"[A-Za-z0-9_-]{43}")
_OWN_PATH = re.compile(r"/ui(?:/[!-\[\]-~]*)?")
"""In ASCII, and without what some browsers take for a slash."""


def new_token() -> str:
    """A fresh one, of 256 random bits."""
    return secrets.token_urlsafe(32)


def hash_of(token: str) -> str:
    """What is kept of a token."""
    return hashlib.sha256(token.encode()).hexdigest()


def csrf_of(token: str) -> str:
    """What forms of this token's session bring back."""
    return hmac.new(token.encode(), b"csrf", hashlib.sha256).hexdigest()


def cookies(headers: Mapping[bytes, bytes]) -> dict[str, str]:
    """The request's cookies; of one that comes twice the first, which has the longer path."""
    found: dict[str, str] = {}
    for piece in headers.get(b"cookie", b"").decode("latin-1").split(";"):
        name, _, value = piece.strip().partition("=")
        found.setdefault(name, value)
    return found


def token_of(headers: Mapping[bytes, bytes], name: str) -> str | None:
    """The token that a request came with; None where it has none, or what is none."""
    token = cookies(headers).get(name, "")
    return token if _TOKEN.fullmatch(token) else None


def cookie(name: str, value: str, *, lives_s: int | None = None, secure: bool = False) -> Header:
    """The header that sets a cookie of the dashboard's; without a lifetime it ends with the browser's session."""
    lasts = "" if lives_s is None else f"; Max-Age={lives_s}"
    told = f"{name}={value}; Path={PATH}; HttpOnly; SameSite=Strict{lasts}{'; Secure' if secure else ''}"
    return (b"set-cookie", told.encode("latin-1"))


def told(text: str, *, wrong: bool) -> str:
    """What the next page is to say, as a cookie's value."""
    kind = "!" if wrong else "."
    return base64.urlsafe_b64encode((kind + text[:MOST_SAID]).encode()).decode().rstrip("=")


def read_told(value: str) -> tuple[str, bool] | None:
    """What a page is to say, and whether it is of something that went wrong; None where it is not to be read."""
    try:
        text = base64.b64decode(value + "=" * (-len(value) % 4), altchars=b"-_", validate=True).decode()
    except ValueError:
        return None
    return (text[1:], text[0] == "!") if text[:1] in ("!", ".") else None


def own_path(path: str) -> str:
    """Where to go after signing in: this path if it is one of the dashboard's, whatever a link said; else the first."""
    return path if _OWN_PATH.fullmatch(path) and not path.startswith(SIGN_IN) else FIRST
