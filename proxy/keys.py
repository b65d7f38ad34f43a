"""Who asks: the keys that open the proxy, kept in memory. Knows headers and hashes; the table is the store's.

Whatever is wrong with a key costs the same and is answered the same: a stranger learns nothing of keys that were, or
that are another project's. Used from one event loop.
"""

import asyncio
import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from hmac import compare_digest
from typing import Any, Protocol

from sqlalchemy.exc import SQLAlchemyError

from proxy.errors import MissingScope, NoKey, WrongKey
from whetstone.keys import KeyScope, Principal, anybody, hash_of

PRINCIPAL = "whetstone.principal"
"""Where a request's scope has who asks."""

HASHES_KEPT = 256
"""Keys whose hash is known as they are sent: only that, not what they open."""
LONGEST_KEPT = 256
"""Bytes of what is sent so: strangers may send anything."""

_BEARER = b"bearer "
_NOBODY = ("0" * 64, None, 0.0)
_REMEDY = "`whetstone keys create` makes one (docs/keys.md)"


class Table(Protocol):
    """Where the keys are."""

    def state(self) -> tuple[int, int, datetime | None]:
        """What changes whenever a key does; its first number is how many were ever made."""
        ...

    def living(self, now: datetime) -> dict[str, tuple[Principal, datetime | None]]:
        """Hash -> what the key opens, and until when."""
        ...

    def note_used(self, minutes: Mapping[tuple[str, str], datetime]) -> None:
        """Note the minute in which each key, by project and id, was last used."""
        ...


@dataclass(frozen=True, slots=True)
class Held:
    """For how long somebody whom a key let in is let in again, with the very same headers (`Keys.hold`)."""

    version: int
    """Of the keys."""
    until_s: float
    """Seconds since the epoch."""


class Keys:
    """The keys as the table last told them. `refresh` first, and again and again."""

    def __init__(self, table: Table, home: str, *, on_loopback: bool, now_s: Callable[[], float] = time.time) -> None:
        """`home`: the project of those who need no key; `on_loopback`: only this machine can reach the proxy; `now_s`:
        seconds since the epoch."""
        self._table = table
        self._anybody = anybody(home)
        self._on_loopback = on_loopback
        self._now_s = now_s
        self._reading = asyncio.Lock()
        self._state: tuple[int, int, datetime | None] | None = None
        self._living: dict[str, tuple[str, Principal | None, float]] = {}
        """Hash -> itself, what the key opens, and until when (seconds since the epoch)."""
        self._version = 0
        """Another one whenever a key was made, changed or revoked."""
        self._used: dict[tuple[str, str], datetime] = {}
        self._told: dict[tuple[str, str], datetime] = {}
        self._minute = datetime.min.replace(tzinfo=UTC)
        self._minute_s = -math.inf
        """The minute that it was at the last look: made once a minute, not for each request."""
        self.needed = True
        """Whoever asks needs a key: but on loopback, where none was ever made."""

    async def refresh(self) -> None:
        """Read the keys if any has changed, and write down which were used. While the database is away the last ones
        stay; what they expire at holds all the same.

        Raises:
            SQLAlchemyError: the database is away.
        """
        async with self._reading:  # what was read first must not come last
            state = await asyncio.to_thread(self._table.state)
            if state != self._state:
                now = datetime.fromtimestamp(self._now_s(), UTC)
                living = await asyncio.to_thread(self._table.living, now)
                self._living = {key_hash: (key_hash, key, _seconds(until)) for key_hash, (key, until) in living.items()}
                self._state = state
                self._version += 1
                _hash_of.cache_clear()  # what opens nothing any more is not to stay
                self.needed = not self._on_loopback or state[0] > 0
        used, self._used = self._used, {}
        if used:
            self._told.update(used)
            with suppress(SQLAlchemyError):  # then it is told a minute later
                await asyncio.to_thread(self._table.note_used, used)

    def admit(self, headers: Mapping[bytes, bytes], needs: KeyScope) -> Principal:
        """Who asks, if it may do what needs this scope.

        Raises:
            NoKey: no key came with it, and it needs one.
            WrongKey: the key opens nothing.
            MissingScope: it does not go so far.
        """
        principal = self.find(headers)
        if not principal.allows(needs):
            has = ", ".join(sorted(principal.scopes))
            raise MissingScope(f"this needs a key with the scope {needs}; the key {principal.key_id} has: {has}")
        return principal

    def find(self, headers: Mapping[bytes, bytes]) -> Principal:
        """Who asks.

        Raises:
            NoKey, WrongKey: as `admit`.
        """
        return self._find(headers)[0] if self.needed else self._anybody

    def held(self, headers: Mapping[bytes, bytes]) -> Held:
        """How long who sends these headers, and was let in just now, need not be looked up again.

        Raises:
            NoKey, WrongKey: as `admit`.
        """
        if not self.needed:
            return Held(self._version, math.inf)
        _, until_s = self._find(headers)
        # In another minute the key is to be noted as used once more.
        return Held(self._version, min(until_s, self._minute_s + 60))

    def hold(self, held: Held) -> bool:
        """Whether that is so still: no key was changed, and none has expired."""
        return held.version == self._version and self._now_s() < held.until_s

    def by_id(self, project: str, key_id: str) -> Principal | None:
        """Who came with this key before, as long as it opens anything; None once it is revoked or expired."""
        now_s = self._now_s()
        for _, principal, until_s in self._living.values():
            if principal is not None and (principal.project, principal.key_id) == (project, key_id):
                if now_s >= until_s:
                    return None
                self._note(project, key_id, now_s)
                return principal
        return None

    def known(self, headers: Mapping[bytes, bytes]) -> Principal | None:
        """Who asks, where everybody may; None without a key that opens anything."""
        with suppress(NoKey):
            return self.find(headers)
        return None

    def _find(self, headers: Mapping[bytes, bytes]) -> tuple[Principal, float]:
        """Who asks, where that needs a key, and until when the key lives."""
        sent = headers.get(b"authorization", b""), headers.get(b"x-api-key", b"")
        key_hash = (_hash_of if len(sent[0]) + len(sent[1]) <= LONGEST_KEPT else _hash_of.__wrapped__)(*sent)
        if key_hash is None:
            raise NoKey(f"no API key came with it: send `Authorization: Bearer <key>`, or `x-api-key`; {_REMEDY}")
        now_s = self._now_s()
        known_hash, principal, until_s = self._living.get(key_hash, _NOBODY)
        is_it = compare_digest(known_hash, key_hash)
        lives = now_s < until_s
        if not (is_it and lives) or principal is None or principal.key_id is None:
            raise WrongKey(f"this API key opens nothing here: it is wrong, revoked or expired; {_REMEDY}")
        self._note(principal.project, principal.key_id, now_s)
        return principal, until_s

    def _note(self, project: str, key_id: str, now_s: float) -> None:
        if not self._minute_s <= now_s < self._minute_s + 60:
            self._minute_s = now_s // 60 * 60
            self._minute = datetime.fromtimestamp(self._minute_s, UTC)
        if self._told.get((project, key_id)) != self._minute:
            self._used[project, key_id] = self._minute


def _seconds(moment: datetime | None) -> float:
    """Since the epoch; of no moment, never."""
    return math.inf if moment is None else moment.timestamp()


@lru_cache(HASHES_KEPT)
def _hash_of(authorization: bytes, x_api_key: bytes) -> str | None:
    """Of the key as OpenAI's clients send it, or as Anthropic's do; None where none is."""
    if authorization[: len(_BEARER)].lower() == _BEARER:
        presented = authorization[len(_BEARER) :].strip()
    else:
        presented = x_api_key.strip()
    return hash_of(presented) if presented else None


def key_of(scope: Mapping[str, Any]) -> str | None:
    """The key that a request came with; None where it needed none."""
    principal: Principal | None = scope.get(PRINCIPAL)
    return None if principal is None else principal.key_id


def is_admin(scope: Mapping[str, Any]) -> bool:
    """Whether a request may read all there is in its project."""
    principal: Principal | None = scope.get(PRINCIPAL)
    return principal is not None and principal.allows("admin")
