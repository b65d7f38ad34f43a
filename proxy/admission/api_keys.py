"""Identify who sends a request by its API key, and define which scope each route needs. Valid keys are cached.

A wrong, revoked, expired or other project's key takes the same time and gets the same answer, so that a stranger cannot
find out which keys exist. Used from one event loop.
"""

import asyncio
import math
import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from functools import lru_cache
from hmac import compare_digest

from sqlalchemy.exc import SQLAlchemyError

from proxy.admission.api_key_store import KeyTables
from proxy.admission.feedback_tokens import FeedbackClaim
from proxy.domain.address import PASSED_THROUGH, RECORDED
from proxy.errors import MissingScope, NoKey, WrongKey, WrongToken
from whetstone.domain.api_keys import SUFFICIENT, Need, Principal, anybody, hash_of

MOST_HASHES = 256
"""Number of sent keys whose hash is cached: only the hash, not the principal."""
LONGEST_CACHED = 256
"""Most bytes of a sent key that is cached, as strangers may send anything."""

ROUTES: dict[tuple[str, str], Need | None] = {
    **{("POST", path): "inference" for path in sorted(RECORDED | PASSED_THROUGH)},
    ("GET", "/v1/responses/{response_id}"): "inference",
    ("DELETE", "/v1/responses/{response_id}"): "inference",
    ("GET", "/v1/responses/{response_id}/input_items"): "inference",
    ("POST", "/v1/responses/{response_id}/cancel"): "inference",
    ("GET", "/v1/models"): "inference",
    ("GET", "/v1/models/{name:path}"): "inference",
    ("POST", "/v1/feedback"): "feedback",
    ("POST", "/v1/feedback/tokens"): "inference or feedback",
    ("GET", "/v1/feedback/{feedback_id}"): "feedback",
    ("DELETE", "/v1/feedback/{feedback_id}"): "feedback",
    ("GET", "/v1/trajectories/{trajectory_id}"): "feedback",
    ("POST", "/v1/trajectories/{trajectory_id}/end"): "feedback",
    ("GET", "/v1/groups/{group_id}"): "feedback",
    ("POST", "/v1/groups/{group_id}/close"): "feedback",
    ("GET", "/"): None,
    ("GET", "/feedback.js"): None,
    ("GET", "/health"): None,
    ("GET", "/healthz"): None,
    ("GET", "/readyz"): None,
}
"""Method and path, as FastAPI writes it -> scope. None: public; the answer shows only that the proxy is running, leads
to the dashboard, or is the script of the thumbs. A route that is not listed is for admins."""

CONTENT = frozenset({"comment", "demonstration", "metadata", "end_user", "code_error", "judge_waits"})
"""Fields of feedback, trajectories and groups that may contain or quote text of apps and people. Only admins may read
them."""

_BEARER = b"bearer "
_NO_KEY = ("0" * 64, None, 0.0)
_REMEDY = "`whetstone keys create` makes one (docs/keys.md)"


class Keys:
    """The keys as last read from the table. Call `refresh` first, and then periodically."""

    def __init__(
        self, table: KeyTables, home: str, *, on_loopback: bool, now_s: Callable[[], float] = time.time
    ) -> None:
        """`home` is the project of requests that need no key. `on_loopback`: only this machine can reach the proxy.
        `now_s` returns seconds since the epoch."""
        self._table = table
        self._anybody = anybody(home)
        self._on_loopback = on_loopback
        self._now_s = now_s
        self._reading = asyncio.Lock()
        self._state: tuple[int, int, datetime | None] | None = None
        self._living: dict[str, tuple[str, Principal | None, float]] = {}
        """Hash -> the hash itself, principal, and expiry (seconds since the epoch)."""
        self._living_by_id: dict[tuple[str, str | None], tuple[Principal, float]] = {}
        """Project and id -> principal and expiry."""
        self._used: dict[tuple[str, str], datetime] = {}
        self._stored_use: dict[tuple[str, str], datetime] = {}
        self._minute = datetime.min.replace(tzinfo=UTC)
        self._minute_s = -math.inf
        """The current minute when it was last checked: made once a minute, not for each request."""
        self.needed = True
        """Requests need a key. Not on loopback as long as no key was ever made."""

    async def refresh(self) -> None:
        """Read the keys if any has changed, and store which were used. While the database is down, the keys that were
        read last remain valid until they expire.

        Raises:
            SQLAlchemyError: the database is down.
        """
        async with self._reading:  # an older read must not overwrite a newer one
            state = await asyncio.to_thread(self._table.state)
            if state != self._state:
                living = await asyncio.to_thread(self._table.living, datetime.fromtimestamp(self._now_s(), UTC))
                self._living = {
                    key_hash: (key_hash, key, math.inf if until is None else until.timestamp())
                    for key_hash, (key, until) in living.items()
                }
                self._living_by_id = {
                    (key.project, key.key_id): (key, until_s)
                    for _, key, until_s in self._living.values()
                    if key is not None
                }
                self._state = state
                _hash_of.cache_clear()  # invalid keys must not stay in memory
                self.needed = not self._on_loopback or state[0] > 0
        used, self._used = self._used, {}
        if used:
            self._stored_use.update(used)
            with suppress(SQLAlchemyError):  # it is stored a minute later
                await asyncio.to_thread(self._table.note_used, used)

    def admit(self, headers: Mapping[bytes, bytes], needs: Need) -> Principal:
        """Return who sent the request, if they have this scope.

        Raises:
            NoKey: a key is needed and none was sent.
            WrongKey: the key is invalid.
            MissingScope: the key does not have the scope.
        """
        principal = self.find(headers)
        if SUFFICIENT[needs].isdisjoint(principal.scopes):
            has = ", ".join(sorted(principal.scopes))
            raise MissingScope(f"this needs a key with the scope {needs}; the key {principal.key_id} has: {has}")
        return principal

    def find(self, headers: Mapping[bytes, bytes]) -> Principal:
        """Return who sent the request.

        Raises:
            NoKey, WrongKey: as `admit`.
        """
        if not self.needed:
            return self._anybody
        sent = headers.get(b"authorization", b""), headers.get(b"x-api-key", b"")
        key_hash = (_hash_of if len(sent[0]) + len(sent[1]) <= LONGEST_CACHED else _hash_of.__wrapped__)(*sent)
        if key_hash is None:
            raise NoKey(f"no API key came with it: send `Authorization: Bearer <key>`, or `x-api-key`; {_REMEDY}")
        now_s = self._now_s()
        known_hash, principal, until_s = self._living.get(key_hash, _NO_KEY)
        is_it = compare_digest(known_hash, key_hash)
        lives = now_s < until_s
        if not (is_it and lives) or principal is None or principal.key_id is None:
            raise WrongKey(f"this API key opens nothing here: it is wrong, revoked or expired; {_REMEDY}")
        self._note(principal.project, principal.key_id, now_s)
        return principal

    def by_id(self, project: str, key_id: str) -> Principal | None:
        """Return the principal of a key that was used before, or None once the key is revoked or expired."""
        now_s = self._now_s()
        principal, until_s = self._living_by_id.get((project, key_id), (None, 0.0))
        if principal is None or now_s >= until_s:
            return None
        self._note(project, key_id, now_s)
        return principal

    def of_token(self, claim: FeedbackClaim) -> Principal:
        """Return whom a feedback token acts for: the key that it was made for, without its scopes.

        Raises:
            WrongToken: that key is revoked or expired, or keys are needed only since then.
        """
        if claim.key_id is None:
            is_valid = not self.needed and claim.project == self._anybody.project
        else:
            is_valid = self.by_id(claim.project, claim.key_id) is not None
        if not is_valid:
            raise WrongToken("the API key that this feedback token was made for is no longer valid")
        return Principal(claim.project, claim.key_id, frozenset())

    def find_or_none(self, headers: Mapping[bytes, bytes]) -> Principal | None:
        """Return who sent a request to a public route, or None without a valid key."""
        with suppress(NoKey):
            return self.find(headers)
        return None

    def _note(self, project: str, key_id: str, now_s: float) -> None:
        if not self._minute_s <= now_s < self._minute_s + 60:
            self._minute_s = now_s // 60 * 60
            self._minute = datetime.fromtimestamp(self._minute_s, UTC)
        if self._stored_use.get((project, key_id)) != self._minute:
            self._used[project, key_id] = self._minute


@lru_cache(MOST_HASHES)
def _hash_of(authorization: bytes, x_api_key: bytes) -> str | None:
    """Return the hash of the key as OpenAI's or Anthropic's clients send it, or None if there is none."""
    is_bearer = authorization[: len(_BEARER)].lower() == _BEARER
    presented = (authorization[len(_BEARER) :] if is_bearer else x_api_key).strip()
    return hash_of(presented) if presented else None


def scope_needed(method: str, path: str) -> Need | None:
    """Return the scope that a request needs, or None if the route is public.

    If there is no such route, return the scope of the route that was probably meant. So a key that may use that route
    gets the real error, and not one about the key.
    """
    scope = ROUTES.get((method, path))
    if scope is not None or (method, path) in ROUTES:
        return scope
    scopes = next(filter(None, map(methods_of, (path, *_almost(path)))), {})
    return scopes.get(method, next(iter(scopes.values()), "admin"))


def methods_of(path: str) -> dict[str, Need | None]:
    """Return the methods of this path in ROUTES, each with its scope."""
    exact = {method: scope for (method, known), scope in ROUTES.items() if known == path}
    return {method: scope for method, pattern, scope in _PATTERNS if pattern.fullmatch(path)} | exact


def path_hint(path: str) -> str:
    """Return what to do about a wrong path, if that is clear: the rest of a sentence, or ""."""
    with_v1, *without_v1 = _almost(path)
    if methods_of(with_v1):
        return "; did you leave /v1 out of the base URL?"
    return "; is there one /v1 too many in the base URL?" if any(map(methods_of, without_v1)) else ""


def _almost(path: str) -> list[str]:
    """Return the path with one more /v1, and with one less if it has one and is more than that."""
    return ["/v1" + path, *([path.removeprefix("/v1")] if path.startswith("/v1/") and path != "/v1/" else [])]


def _pattern(path: str) -> re.Pattern[str]:
    """Return what matches a path with something in its holes: `{name}`, or `{name:path}` with slashes too."""
    escaped = re.escape(path)
    return re.compile(re.sub(r"\\{\w+(:path)?\\}", lambda hole: ".+" if hole[1] else "[^/]+", escaped), re.DOTALL)


_PATTERNS = tuple((method, _pattern(path), scope) for (method, path), scope in ROUTES.items() if "{" in path)
