"""Make, hash and parse API keys.

A key is `wsk_<id>_<secret>`. The id is not secret: tables, logs and people identify the key by it. Only a hash of the
whole key is stored. The secret has 256 random bits, so a plain SHA-256 cannot be reversed by guessing, and costs a
request only microseconds.
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
"""What a key may allow: calling models; sending feedback; everything."""
Need = Literal["inference", "feedback", "admin", "inference or feedback"]
"""What a route may need of a key."""
SUFFICIENT: dict[Need, frozenset[str]] = {
    **{scope: frozenset({scope, "admin"}) for scope in SCOPES},
    "inference or feedback": frozenset(SCOPES),
}
"""For each need the scopes that suffice, any of them: admin implies all others."""
ID_LENGTH = 12
SECRET_LENGTH = 43
"""Characters, out of 62, that encode 32 random bytes."""
LEAST_BOOTSTRAP = 32
"""Shortest bootstrap key, in characters; an operator chooses it."""
NAME = r"^[^\x00-\x1f\x7f-\x9f]{1,100}$"
"""Regular expression of a valid key name."""
MOST_PER_MIN = 10**9

_ID_LETTERS = string.ascii_lowercase + string.digits
_LETTERS = string.ascii_letters + string.digits
_KEY = re.compile(rf"wsk_([a-z0-9]{{{ID_LENGTH}}})_[A-Za-z0-9]{{{SECRET_LENGTH}}}")
_LIFETIME = re.compile(r"([0-9]{1,6})([hdw])")
_UNITS = {"h": timedelta(hours=1), "d": timedelta(days=1), "w": timedelta(weeks=1)}
_LONGEST = timedelta(days=3650)


class Principal(msgspec.Struct, frozen=True):
    """The authenticated caller of a request: its project, scopes and limits."""

    project: str
    key_id: str | None
    """None if the proxy requires no keys."""
    scopes: frozenset[str]
    requests_per_min: int | None = None
    """Rate limit; None: no limit."""
    tokens_per_min: int | None = None
    name: str | None = None
    """Name of the key."""

    def allows(self, need: Need) -> bool:
        """Return whether the caller's scopes suffice for this."""
        return not SUFFICIENT[need].isdisjoint(self.scopes)


def anybody(project: str) -> Principal:
    """Return the principal of every caller when the proxy requires no keys."""
    return Principal(project, None, frozenset(SCOPES))


def new_key() -> tuple[str, str]:
    """Return the id and the full text of a new key. The full text must not be stored."""
    key_id = new_key_id()
    return key_id, f"wsk_{key_id}_{''.join(secrets.choice(_LETTERS) for _ in range(SECRET_LENGTH))}"


def new_key_id() -> str:
    """Return a new id, for a new key or for a key that was made elsewhere."""
    return "".join(secrets.choice(_ID_LETTERS) for _ in range(ID_LENGTH))


def hash_of(key: bytes) -> str:
    """Return the hash of a key, which is what is stored."""
    return hashlib.sha256(key).hexdigest()


def id_of(text: str) -> str:
    """Return the id within a key's full text; other text is returned unchanged, as an id."""
    match = _KEY.fullmatch(text)
    return match[1] if match else text


def read_scopes(names: Iterable[str]) -> list[KeyScope]:
    """Return the scopes with these names, without duplicates, in the order of SCOPES.

    Raises:
        ValueError: a name is not a scope, or there is none.
    """
    unique = set(names)
    if strangers := sorted(unique - set(SCOPES)):
        raise ValueError(f"{strangers[0]!r} is no scope; there are: {', '.join(SCOPES)}")
    if not unique:
        raise ValueError(f"a key needs a scope: {', '.join(SCOPES)}")
    return [scope for scope in SCOPES if scope in unique]


def read_lifetime(text: str) -> timedelta:
    """Return the duration that `12h`, `90d` or `2w` stands for.

    Raises:
        ValueError: the text has another form, or the duration is over ten years.
    """
    match = _LIFETIME.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is no time; write 12h, 90d or 2w")
    lifetime = int(match[1]) * _UNITS[match[2]]
    if not timedelta(0) < lifetime <= _LONGEST:
        raise ValueError(f"{text!r} is out of bounds: over 0, up to {_LONGEST.days}d")
    return lifetime
