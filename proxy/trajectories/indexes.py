"""Index in memory the completions that a request may continue, and the calls that it may repeat. Pure.

Completions are found by their conversation hashes.

A client that lost its connection retries while the first call may still be running, because the proxy does not see that
the connection is lost. So calls in flight count too. They are stored by the request itself: nearly none is ever
retried, and a digest takes longer than everything else here. Ended calls are stored by digest only.
"""

from collections import OrderedDict
from collections.abc import Hashable
from itertools import islice
from typing import Generic, TypeVar

import msgspec

from proxy.domain.call import WINDOW_S
from proxy.domain.eviction import evict_oldest
from proxy.domain.policies import Pins
from proxy.trajectories.rewriting import AnswerMarks

K = TypeVar("K", bound=Hashable)

FIRST = "/0"
MOST_ALIKE = 16
"""Most calls with the same body that are tracked, the latest calls: if there is more than one, it is not possible to
decide which one is repeated."""


def name_of(answer_id: str, choice: int) -> str:
    """Return the other id that feedback may use for a choice of an answer. The first choice has the answer's own id,
    with or without FIRST after it."""
    return answer_id if choice == 0 else f"{answer_id}/{choice}"


class OpenCompletion(msgspec.Struct, gc=False):
    """A completion that a request may continue: a head."""

    completion_id: str
    trajectory_id: str
    histories: tuple[bytes, ...] = ()
    """The conversation hashes that lead to it."""
    name: str | None = None
    """The other id that feedback may use for it (`name_of`)."""
    taken_by: str | None = None
    """The call that continues it; None: no call does."""
    set_aside: bool = False
    """Whether it is excluded from the free heads, taken or not."""
    over: bool = False
    """Whether its trajectory is over."""
    pins: Pins = ()
    """The versions that answered in its trajectory, up to this completion."""
    prompt: bytes | None = None
    """What its histories share with those of all answers to its prompt (`prompt_of`); None: not known."""
    answer: AnswerMarks | str = ""
    """What identifies its answer where an app rewrites it: the end of a plain text, else its marks."""

    @property
    def free(self) -> bool:
        """Return whether a call may continue it."""
        return self.taken_by is None and not self.set_aside


class _SharedPrefix(msgspec.Struct):
    """Several heads with the same history."""

    free: OrderedDict[str, OpenCompletion]
    """The oldest first."""
    last: OpenCompletion
    """The latest head, free or not: a fork branches from it."""


class PrefixIndex:
    """Holds at most `most` heads and evicts the oldest first. Every lookup takes the same time, however many heads
    there are."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._by_id: dict[str, OpenCompletion] = {}
        self._by_history: dict[bytes, OpenCompletion | _SharedPrefix] = {}
        """Nearly every history belongs to one head only; no `_SharedPrefix` is made for those."""
        self._by_name: dict[str, OpenCompletion] = {}
        self._by_prompt: dict[bytes, OpenCompletion | dict[str, OpenCompletion]] = {}
        """Nearly every prompt belongs to one head only; no dict is made for those."""

    def named(self, name: str) -> OpenCompletion | None:
        """Return the head with this id, or with another id that feedback may use."""
        return self._by_id.get(name) or self._by_name.get(name) or self._by_name.get(name.removesuffix(FIRST))

    def alike(self, history: bytes) -> OpenCompletion | None:
        """Return the last head with this history, free or not."""
        entry = self._by_history.get(history)
        return entry.last if isinstance(entry, _SharedPrefix) else entry

    def free(self, history: bytes) -> OpenCompletion | None:
        """Return the oldest free head with this history."""
        entry = self._by_history.get(history)
        if isinstance(entry, _SharedPrefix):
            return next(iter(entry.free.values()), None)
        return entry if entry is not None and entry.free else None

    def of_prompt(self, prompt: bytes, most: int) -> list[OpenCompletion]:
        """Return the heads with this whole prompt, free or not: at most so many, the latest first."""
        entry = self._by_prompt.get(prompt)
        if isinstance(entry, dict):
            return list(islice(reversed(entry.values()), most))
        return [] if entry is None else [entry]

    def keep(self, head: OpenCompletion) -> None:
        """Add a head. It replaces an entry with the same id; if that one was taken, the new one is taken too."""
        by_id, completion_id = self._by_id, head.completion_id
        before = by_id.pop(completion_id, None)
        if before is not None:
            head.taken_by = head.taken_by or before.taken_by
            self._unlink(before)
        by_id[completion_id] = head
        for history in head.histories:
            entry = self._by_history.setdefault(history, head)
            if entry is not head:
                shared = self._shared(history, entry)
                shared.last = head
                if head.free:
                    shared.free[completion_id] = head
        if head.prompt is not None:
            same = self._by_prompt.setdefault(head.prompt, head)
            if same is not head:
                if not isinstance(same, dict):
                    same = self._by_prompt[head.prompt] = {same.completion_id: same}
                same[completion_id] = head
        if head.name is not None:
            self._by_name[head.name] = head
        if len(by_id) > self._most:
            for evicted in evict_oldest(by_id, self._most):
                self._unlink(evicted)

    def keep_taken(self, head: OpenCompletion, call_id: str) -> None:
        """Mark a head as taken, even if nothing else is known about it yet."""
        if head.completion_id not in self._by_id:
            head.taken_by = call_id
            self.keep(head)
        self.take(head.completion_id, call_id)

    def learn(self, head: OpenCompletion) -> bool:
        """Add a head that SQL returned, unless the index already knows more about it. Return whether it was added."""
        known = self._by_id.get(head.completion_id)
        if known is not None and known.histories:
            return False
        self.keep(head)
        return True

    def take(self, completion_id: str, call_id: str, instead_of: str | None = None) -> None:
        """Let a call continue a head, if the head is free or was taken by the call that this one repeats
        (`instead_of`)."""
        if (head := self._by_id.get(completion_id)) and head.taken_by in (None, instead_of):
            head.taken_by = call_id
            self.set_aside(head)

    def release(self, completion_id: str, call_id: str) -> None:
        """Free a head again after its call failed. It becomes the next head to be taken."""
        head = self._by_id.get(completion_id)
        if head is None or head.taken_by != call_id:
            return
        head.taken_by, head.set_aside = None, False
        for history in head.histories:
            entry = self._by_history.get(history)
            if entry is not None and entry is not head:
                free = self._shared(history, entry).free
                free[completion_id] = head
                free.move_to_end(completion_id, last=False)

    def set_aside(self, head: OpenCompletion) -> None:
        """Exclude a head from the free heads."""
        head.set_aside = True
        for history in head.histories:
            if isinstance(entry := self._by_history.get(history), _SharedPrefix):
                entry.free.pop(head.completion_id, None)

    def _shared(self, history: bytes, entry: OpenCompletion | _SharedPrefix) -> _SharedPrefix:
        """Return the heads with this history; `entry` is what the index has there."""
        if not isinstance(entry, _SharedPrefix):
            free = OrderedDict({entry.completion_id: entry} if entry.free else {})
            entry = self._by_history[history] = _SharedPrefix(free, entry)
        return entry

    def _unlink(self, head: OpenCompletion) -> None:
        for history in head.histories:
            entry = self._by_history.get(history)
            if entry is head:
                del self._by_history[history]
            elif isinstance(entry, _SharedPrefix):
                entry.free.pop(head.completion_id, None)
                if entry.last is head and entry.free:
                    # Other heads with this history are left; the latest free one becomes `last`.
                    entry.last = next(reversed(entry.free.values()))
                elif entry.last is head:
                    del self._by_history[history]
        if head.prompt is not None:
            same = self._by_prompt[head.prompt]
            if isinstance(same, dict):
                del same[head.completion_id]
            if same is head or not same:
                del self._by_prompt[head.prompt]
        if head.name is not None and self._by_name.get(head.name) is head:
            del self._by_name[head.name]


class TrajectoryState(msgspec.Struct, gc=False):
    """The state of a trajectory."""

    tail: str | None = None
    """Its last completion, as far as known."""
    seen_s: float = 0.0
    over: bool = False
    """Whether feedback or the app has ended it."""
    successor: str | None = None
    """The trajectory that continues under its name."""
    pins: Pins = ()
    """The versions that answered in it, as far as known."""
    trains: bool | None = None
    """Whether it is left to training: neither of the split `eval` nor excluded; None: not known."""


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
        if calls is alone:
            if len(self._by_request) > self._most:
                evict_oldest(self._by_request, self._most)
            return
        for old in [one for one, known in calls.items() if known.at_s < call.at_s - WINDOW_S][:2]:
            del calls[old]
        calls[call_id] = call
        while len(calls) > MOST_ALIKE:
            del calls[next(iter(calls))]

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
