"""Calls that their clients may ask again: those that were not answered whole, and those still in flight. Pure.

A client that lost its connection asks again while the first call may still be running: nobody told the proxy that
nobody listens any more. So what is in flight counts as well; by itself, since nearly none of it is ever asked again
and a digest takes longer than all else that is done here. Of what is over a digest alone is kept.
"""

import hashlib
from collections.abc import Hashable
from typing import Generic, TypeVar

import msgspec

from proxy.forgetting import oldest

K = TypeVar("K", bound=Hashable)

WINDOW_S = 15 * 60
"""How long a client may take to ask again; the official ones give up after seconds."""

MOST_ALIKE = 16
"""Calls with one body that are kept, the latest: of more than one nobody can tell which is repeated."""


_EMPTY = hashlib.sha256()
"""Copied for each digest: to look the algorithm up takes longer than to hash."""


Question = tuple[str, bytes, str | None]
"""A request as far as two of them are the same: path, body, key."""


def digest_of(question: Question) -> str:
    """A hash of it, which stays when the body has gone."""
    path, body, key_id = question
    made = _EMPTY.copy()
    made.update(f"{path}\0{key_id or ''}\0".encode() + body)
    return made.hexdigest()


class Repeatable(msgspec.Struct, frozen=True, gc=False):
    """A call that may be asked again."""

    trajectory_id: str
    extends: str | None
    """What it goes on from, and what asks again goes on from too."""
    turn_key: str | None
    at_s: float


class Repeats(Generic[K]):
    """Calls by what they ask, or by a digest of it: at most so many of these, the oldest forgotten first."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._by_asked: dict[K, dict[str, Repeatable]] = {}

    def add(self, asked: K, call_id: str, call: Repeatable) -> None:
        """A call has come."""
        alone = {call_id: call}
        calls = self._by_asked.setdefault(asked, alone)
        if calls is not alone:
            self._add_alike(calls, call_id, call)
        elif len(self._by_asked) > self._most:
            for forgotten in oldest(self._by_asked, self._most):
                del self._by_asked[forgotten]

    def answered(self, asked: K, call_id: str) -> Repeatable | None:
        """It was answered whole, or repeated: nobody asks it again. What was known of it."""
        calls = self._by_asked.get(asked)
        if calls is None:
            return None
        call = calls.pop(call_id, None)
        if not calls:
            del self._by_asked[asked]
        return call

    def of(self, asked: K, turn_key: str | None, now_s: float) -> dict[str, Repeatable]:
        """Those that ask this, and with this turn key if one is given, by call id."""
        return {
            call_id: call
            for call_id, call in self._by_asked.get(asked, {}).items()
            if call.at_s >= now_s - WINDOW_S and turn_key in (None, call.turn_key)
        }

    def forget(self, asked: K, trajectory_id: str) -> None:
        """What asked this in this trajectory was repeated by a call that was answered."""
        for call_id, call in list(self._by_asked.get(asked, {}).items()):
            if call.trajectory_id == trajectory_id:
                self.answered(asked, call_id)

    def _add_alike(self, calls: dict[str, Repeatable], call_id: str, call: Repeatable) -> None:
        """Add one to those that ask the same."""
        for old in [one for one, known in calls.items() if known.at_s < call.at_s - WINDOW_S][:2]:
            del calls[old]
        calls[call_id] = call
        while len(calls) > MOST_ALIKE:
            del calls[next(iter(calls))]
