"""Sign and verify feedback tokens: each lets a web page send a thumb and a comment on one completion, until it expires.

A token is `wft_` and, in base64, an HMAC-SHA256 and what it signs: expiry, project, id of the key that it was made for,
completion, choice. Whoever has it can read these, and change none. Nothing of a token is stored: it is verified by the
secret alone. An older secret still verifies, so that a new one can be added while tokens are in use.
"""

import base64
import hmac
import math
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec

from proxy.domain.feedback import TOKEN_HEADER
from proxy.errors import ExpiredToken, WrongToken

PREFIX = "wft_"
"""Tells a token from an API key (`wsk_`), for people and for programs that look for keys in files."""
LONGEST = 1024
"""Most bytes of a token; a longer one is not read."""

_MAC_BYTES = 32
_REMEDY = "the app's server makes one (docs/feedback.md)"


class FeedbackClaim(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a token permits: feedback on this completion."""

    expires_at_s: int
    """Seconds since the epoch; it is valid before that."""
    project: str
    key_id: str | None
    """The key that it was made for, and ends with; None if the proxy required no keys."""
    completion_id: str
    """As feedback names it: our id, the answer's own, or that of a tool call in it."""
    choice: int


class FeedbackTokens:
    """Signs with the first of the secrets, verifies with all. `now_s` returns seconds since the epoch."""

    def __init__(self, secrets: Sequence[bytes], lifetime_s: float, now_s: Callable[[], float] = time.time) -> None:
        self._secrets = tuple(secrets)
        self._lifetime_s = lifetime_s
        self._now_s = now_s

    def expiry(self, lifetime_s: float | None = None) -> int:
        """Return when a token of this lifetime, by default the settings', would expire (seconds since the epoch)."""
        return math.ceil(self._now_s() + (self._lifetime_s if lifetime_s is None else lifetime_s))

    def sign(
        self,
        project: str,
        key_id: str | None,
        completion_id: str,
        choice: int = 0,
        expires_at_s: int | None = None,
    ) -> str:
        """Return the token for a completion. It takes about 3 µs, and neither the database nor the disk."""
        expires_at_s = self.expiry() if expires_at_s is None else expires_at_s
        claim = msgspec.msgpack.encode(FeedbackClaim(expires_at_s, project, key_id, completion_id, choice))
        mac = hmac.digest(self._secrets[0], claim, "sha256")
        return PREFIX + _encoded(mac + claim).decode()

    def verify(self, token: bytes) -> FeedbackClaim:
        """Return what the token permits.

        Raises:
            WrongToken: it is none, or none of ours.
            ExpiredToken: its time is over.
        """
        signed = _decoded(token)
        mac, claim = signed[:_MAC_BYTES], signed[_MAC_BYTES:]
        # All secrets are tried, so that the time tells nothing.
        if not max(hmac.compare_digest(hmac.digest(secret, claim, "sha256"), mac) for secret in self._secrets):
            raise WrongToken(f"this feedback token was not signed here, or was changed; {_REMEDY}")
        try:
            read = msgspec.msgpack.decode(claim, type=FeedbackClaim)
        except msgspec.DecodeError as error:
            raise WrongToken(f"this feedback token is of another release; {_REMEDY}") from error
        if self._now_s() >= read.expires_at_s:
            raise ExpiredToken(f"this feedback token has expired; {_REMEDY}")
        return read


def token_in(headers: Mapping[bytes, bytes]) -> bytes | None:
    """Return what a request brings as its feedback token: `X-Feedback-Token`, or a token as `Authorization: Bearer`.

    Whatever is in `X-Feedback-Token` counts as one, so that an API key there is refused.
    """
    token = headers.get(TOKEN_HEADER)
    if token is not None:
        return token.strip()
    scheme, _, bearer = headers.get(b"authorization", b"").partition(b" ")
    return bearer.strip() if scheme.lower() == b"bearer" and is_token(bearer.strip()) else None


def is_token(text: bytes) -> bool:
    """Return whether this is meant as a feedback token; it need not be valid."""
    return text.startswith(PREFIX.encode())


def _encoded(signed: bytes) -> bytes:
    return base64.urlsafe_b64encode(signed).rstrip(b"=")


def _decoded(token: bytes) -> bytes:
    """Return the signature and the claim.

    Raises:
        WrongToken: this is no token.
    """
    if not is_token(token):
        raise WrongToken(
            "X-Feedback-Token holds no feedback token (wft_…). An API key must never be in a web page: if one was, "
            f"revoke it. Of tokens, {_REMEDY}"
        )
    encoded = token[len(PREFIX) :]
    try:
        signed = base64.urlsafe_b64decode(encoded + b"=" * (-len(encoded) % 4)) if len(token) <= LONGEST else b""
        # One text for each token: decoding alone skips what is not base64.
        if _encoded(signed) != encoded:
            raise ValueError
        return signed
    except ValueError as error:
        raise WrongToken(f"this feedback token was cut or changed on its way; {_REMEDY}") from error
