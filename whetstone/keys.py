"""API keys: how they are made and hashed, and what each opens. Knows no table and no request.

A key is `wsk_<id>_<secret>`. Its id is no secret: tables, logs and people name the key by it. Of the whole only a hash
is kept; the secret has 256 random bits, so a plain SHA-256 cannot be guessed back, and costs a request microseconds.
"""

import hashlib
import re
import secrets
import string
from collections.abc import Iterable
from datetime import timedelta
from typing import Literal, get_args

import msgspec

KeyScope = Literal["inference", "feedback", "admin"]
SCOPES: tuple[KeyScope, ...] = get_args(KeyScope)
"""What a key may open: asking models; saying what answers were worth; all of it."""
ID_LENGTH = 12
SECRET_LENGTH = 43
"""Characters of 62 kinds that hold 32 random bytes."""
LEAST_BOOTSTRAP = 32
"""Fewest characters of the first key, which an operator chooses."""
NAME = r"^[^\x00-\x1f\x7f-\x9f]{1,100}$"
"""What a key's name may be, as a regular expression."""
MOST_PER_MIN = 10**9

_ID_LETTERS = string.ascii_lowercase + string.digits
_LETTERS = string.ascii_letters + string.digits
_KEY = re.compile(rf"wsk_([a-z0-9]{{{ID_LENGTH}}})_[A-Za-z0-9]{{{SECRET_LENGTH}}}")
_LIFETIME = re.compile(r"([0-9]{1,6})([hdw])")
_UNITS = {"h": timedelta(hours=1), "d": timedelta(days=1), "w": timedelta(weeks=1)}
_LONGEST = timedelta(days=3650)


class Principal(msgspec.Struct, frozen=True):
    """Whoever asks: the project that answers, and how far it goes."""

    project: str
    key_id: str | None
    """None where the proxy asks for no keys."""
    scopes: frozenset[str]
    requests_per_min: int | None = None
    """None: no limit; likewise the next."""
    tokens_per_min: int | None = None

    def allows(self, scope: KeyScope) -> bool:
        """Whether it may do what needs this scope; admin implies the others."""
        return scope in self.scopes or "admin" in self.scopes


def anybody(project: str) -> Principal:
    """Whoever asks where the proxy asks for no keys."""
    return Principal(project, None, frozenset(SCOPES))


def new_key() -> tuple[str, str]:
    """A fresh key: its id and its whole text, which is not to be kept."""
    key_id = new_key_id()
    return key_id, f"wsk_{key_id}_{''.join(secrets.choice(_LETTERS) for _ in range(SECRET_LENGTH))}"


def new_key_id() -> str:
    """A fresh id, for a key or for one that somebody else made."""
    return "".join(secrets.choice(_ID_LETTERS) for _ in range(ID_LENGTH))


def hash_of(key: bytes) -> str:
    """What is kept of a key."""
    return hashlib.sha256(key).hexdigest()


def id_of(text: str) -> str:
    """The id in a key's whole text; what is no key of ours is taken for an id."""
    found = _KEY.fullmatch(text)
    return found[1] if found else text


def read_scopes(names: Iterable[str]) -> list[KeyScope]:
    """The scopes of these names, each once and in our order.

    Raises:
        ValueError: one is no scope, or there is none.
    """
    asked = set(names)
    if strangers := sorted(asked - set(SCOPES)):
        raise ValueError(f"{strangers[0]!r} is no scope; there are: {', '.join(SCOPES)}")
    if not asked:
        raise ValueError(f"a key needs a scope: {', '.join(SCOPES)}")
    return [scope for scope in SCOPES if scope in asked]


def read_lifetime(text: str) -> timedelta:
    """How long `12h`, `90d` or `2w` is.

    Raises:
        ValueError: it is none of these, or over ten years.
    """
    found = _LIFETIME.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is no time; write 12h, 90d or 2w")
    lifetime = int(found[1]) * _UNITS[found[2]]
    if not timedelta(0) < lifetime <= _LONGEST:
        raise ValueError(f"{text!r} is out of bounds: over 0, up to {_LONGEST.days}d")
    return lifetime
