"""Track the calls that their clients may retry: those without a whole answer, and those still in flight. Pure.

A client that lost its connection retries while the first call may still be running, because the proxy does not see that
the connection is lost. So calls in flight count too. They are stored by the request itself: nearly none is ever
retried, and a digest takes longer than everything else here. Ended calls are stored by digest only.
"""

from collections.abc import Hashable
from typing import Generic, TypeVar

import msgspec

from proxy.domain.eviction import oldest
from proxy.domain.request_digest import WINDOW_S

K = TypeVar("K", bound=Hashable)

MOST_ALIKE = 16
"""Most calls with the same body that are tracked, the latest calls: if there is more than one, it is not possible to
decide which one is repeated."""


class Repeatable(msgspec.Struct, frozen=True, gc=False):
    """A call that may be retried."""

    trajectory_id: str
    extends: str | None
    """The completion that it continues; a retry continues the same one."""
    turn_key: str | None
    at_s: float


class RetryTracker(Generic[K]):
    """Calls by their request, or by a digest of it. At most `most` requests; the oldest are evicted first."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._by_request: dict[K, dict[str, Repeatable]] = {}

    def add(self, request: K, call_id: str, call: Repeatable) -> None:
        """Add a call that has arrived."""
        alone = {call_id: call}
        calls = self._by_request.setdefault(request, alone)
        if calls is not alone:
            self._add_alike(calls, call_id, call)
        elif len(self._by_request) > self._most:
            for forgotten in oldest(self._by_request, self._most):
                del self._by_request[forgotten]

    def answered(self, request: K, call_id: str) -> Repeatable | None:
        """Remove a call that got a whole answer or was retried, so it will not be retried again. Return its entry."""
        calls = self._by_request.get(request)
        if calls is None:
            return None
        call = calls.pop(call_id, None)
        if not calls:
            del self._by_request[request]
        return call

    def of(self, request: K, turn_key: str | None, now_s: float) -> dict[str, Repeatable]:
        """Return the calls of the last WINDOW_S with this request, and this turn key if one is given, by call id."""
        return {
            call_id: call
            for call_id, call in self._by_request.get(request, {}).items()
            if call.at_s >= now_s - WINDOW_S and turn_key in (None, call.turn_key)
        }

    def forget(self, request: K, trajectory_id: str) -> None:
        """Remove the calls with this request in this trajectory, because an answered call has repeated them."""
        for call_id, call in list(self._by_request.get(request, {}).items()):
            if call.trajectory_id == trajectory_id:
                self.answered(request, call_id)

    def _add_alike(self, calls: dict[str, Repeatable], call_id: str, call: Repeatable) -> None:
        """Add a call to those with the same request."""
        for old in [one for one, known in calls.items() if known.at_s < call.at_s - WINDOW_S][:2]:
            del calls[old]
        calls[call_id] = call
        while len(calls) > MOST_ALIKE:
            del calls[next(iter(calls))]
