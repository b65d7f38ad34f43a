"""Calls that their clients may ask again: those that were not answered whole, and those still in flight. Pure.

A client that lost its connection asks again while the first call may still be running: nobody told the proxy that
nobody listens any more. So what is in flight counts as well.
"""

import msgspec

from proxy.forgetting import oldest

WINDOW_S = 15 * 60
"""How long a client may take to ask again; the official ones give up after seconds."""

MOST_ALIKE = 16
"""Calls with one body that are kept, the latest: of more than one nobody can tell which is repeated."""


class Repeatable(msgspec.Struct, frozen=True, gc=False):
    """A call that may be asked again."""

    trajectory_id: str
    extends: str | None
    """What it goes on from, and what asks again goes on from too."""
    turn_key: str | None
    at_s: float


class Repeats:
    """At most so many digests of bodies, the oldest forgotten first; each with the calls that had it."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._by_digest: dict[str, dict[str, Repeatable]] = {}
        self._digests: dict[str, str] = {}

    def add(self, digest: str, call_id: str, call: Repeatable) -> None:
        """A call has come."""
        calls = self._by_digest.get(digest)
        if calls is None:
            calls = self._by_digest[digest] = {}
        else:
            for old in [one for one, known in calls.items() if known.at_s < call.at_s - WINDOW_S][:2]:
                self._digests.pop(old, None)
                del calls[old]
        calls[call_id] = call
        self._digests[call_id] = digest
        while len(calls) > MOST_ALIKE:
            earliest = next(iter(calls))
            self._digests.pop(earliest, None)
            del calls[earliest]
        if len(self._by_digest) > self._most:
            for forgotten in oldest(self._by_digest, self._most):
                for known_id in self._by_digest.pop(forgotten):
                    self._digests.pop(known_id, None)

    def answered(self, call_id: str) -> None:
        """It was answered whole, or repeated: nobody asks it again."""
        digest = self._digests.pop(call_id, None)
        if digest is None:
            return
        calls = self._by_digest[digest]
        del calls[call_id]
        if not calls:
            del self._by_digest[digest]

    def of(self, digest: str, turn_key: str | None, now_s: float) -> dict[str, Repeatable]:
        """Those with this body, and this turn key if one is given, by call id."""
        return {
            call_id: call
            for call_id, call in self._by_digest.get(digest, {}).items()
            if call.at_s >= now_s - WINDOW_S and turn_key in (None, call.turn_key)
        }

    def forget(self, digest: str, trajectory_id: str) -> None:
        """What had this body in this trajectory was repeated by a call that was answered."""
        for call_id, call in list(self._by_digest.get(digest, {}).items()):
            if call.trajectory_id == trajectory_id:
                self.answered(call_id)
