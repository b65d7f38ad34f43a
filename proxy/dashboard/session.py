"""Create and read the dashboard's session tokens, cookies and CSRF tokens.

The cookie contains a random token, never a key. Only a hash of the token is stored: the tables do not allow a sign-in.
The CSRF token is derived from the session token, so that all proxies agree on it and a page of another origin cannot
guess it.
"""

import base64
import hashlib
import hmac
import re
import secrets
from collections.abc import Mapping
from datetime import timedelta

from proxy.domain.address import DASHBOARD
from proxy.http.asgi import Header
from whetstone.domain.api_keys import NAME

COOKIE = "whetstone_ui"
FORM = "whetstone_form"
"""Cookie from which forms get their CSRF token before the sign-in. It has its own name: a link from another site sends
no session cookie, and must not replace that cookie."""
NOTICE = "whetstone_said"
"""Cookie with the result of an action, for the next page."""
RATER = "whetstone_rater"
"""Cookie with the name under which this browser rates attempts."""
LIFETIME = timedelta(hours=12)
RATER_LIFETIME_S = 365 * 24 * 3600
NOTICE_LIFETIME_S = 60
MOST_NOTICE = 1000
"""Characters: browsers drop a cookie over 4 KB."""
SIGN_IN = f"{DASHBOARD}/sign-in"
FIRST = f"{DASHBOARD}/policies"
"""First page after the sign-in."""

_TOKEN = re.compile(r"[A-Za-z0-9_-]{43}")
_OWN_PATH = re.compile(r"/ui(?:/[!-\[\]-~]*)?")
"""ASCII only, and without characters that some browsers treat as a slash."""


def new_token() -> str:
    """Return a new token of 256 random bits."""
    return secrets.token_urlsafe(32)


def hash_of(token: str) -> str:
    """Return the hash of a token, which is what the tables store."""
    return hashlib.sha256(token.encode()).hexdigest()


def csrf_of(token: str) -> str:
    """Return the CSRF token for the forms of this token's session."""
    return hmac.new(token.encode(), b"csrf", hashlib.sha256).hexdigest()


def token_of(headers: Mapping[bytes, bytes], name: str) -> str | None:
    """Return the token in a request's cookie; None if it is missing or malformed. If the name comes twice, the first
    cookie counts, which has the longer path."""
    token = _cookie_of(headers, name)
    return token if _TOKEN.fullmatch(token) else None


def cookie(name: str, value: str, *, lives_s: int | None = None, secure: bool = False) -> Header:
    """Return the header that sets a dashboard cookie; without a lifetime the cookie ends with the browser's session."""
    lasts = "" if lives_s is None else f"; Max-Age={lives_s}"
    header = f"{name}={value}; Path={DASHBOARD}; HttpOnly; SameSite=Strict{lasts}{'; Secure' if secure else ''}"
    return (b"set-cookie", header.encode("latin-1"))


def encode_notice(text: str, *, wrong: bool) -> str:
    """Encode a message for the next page as a cookie value."""
    return _encode(("!" if wrong else ".") + text[:MOST_NOTICE])


def decode_notice(value: str) -> tuple[str, bool] | None:
    """Decode a message and whether it is an error; None if it cannot be read."""
    text = _decode(value)
    return (text[1:], text[0] == "!") if text[:1] in ("!", ".") else None


def rater_cookie(name: str, *, secure: bool = False) -> Header:
    """Return the header that stores the name under which this browser rates; an empty name deletes it."""
    return cookie(RATER, _encode(name), lives_s=RATER_LIFETIME_S if name else 0, secure=secure)


def rater_of(headers: Mapping[bytes, bytes]) -> str | None:
    """Return the name under which this browser rates; None if it has chosen none."""
    name = _decode(_cookie_of(headers, RATER))
    return name if re.fullmatch(NAME, name) else None


def own_path(path: str) -> str:
    """Return the path to open after the sign-in: `path` if it belongs to the dashboard, else FIRST. A link may contain
    any path."""
    return path if _OWN_PATH.fullmatch(path) and not path.startswith(SIGN_IN) else FIRST


def _cookie_of(headers: Mapping[bytes, bytes], name: str) -> str:
    """Return the value of a cookie; empty if it is missing. The first of this name counts."""
    pieces = headers.get(b"cookie", b"").decode("latin-1").split(";")
    cookies = (piece.strip().partition("=") for piece in pieces)
    return next((value for key, _, value in cookies if key == name), "")


def _encode(text: str) -> str:
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def _decode(value: str) -> str:
    """Return the text of a cookie; empty if it cannot be decoded."""
    try:
        return base64.b64decode(value + "=" * (-len(value) % 4), altchars=b"-_", validate=True).decode()
    except ValueError:
        return ""
