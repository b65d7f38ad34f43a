"""The completions that a request may go on from, by what it finds them by. Pure; knows hashes and ids."""

from collections import OrderedDict

import msgspec

from proxy.forgetting import oldest
from proxy.pins import Pins

FIRST = "/0"


def name_of(answer_id: str, choice: int) -> str:
    """What else feedback may call a choice of an answer; its first one goes by the answer's own id, with or without
    FIRST behind it."""
    return answer_id if choice == 0 else f"{answer_id}/{choice}"


class Head(msgspec.Struct, gc=False):
    """A completion that may be gone on from."""

    completion_id: str
    trajectory_id: str
    histories: tuple[bytes, ...] = ()
    """What it is found by."""
    name: str | None = None
    """What else feedback may call it (`name_of`)."""
    taken_by: str | None = None
    """The call that goes on from it; None: no call does."""
    set_aside: bool = False
    """It is not to be found as a free one, taken or not."""
    over: bool = False
    """Its trajectory is."""
    pins: Pins = ()
    """What spoke in its trajectory, up to it."""

    @property
    def free(self) -> bool:
        """A call may go on from it."""
        return self.taken_by is None and not self.set_aside


class _Alike(msgspec.Struct):
    """Several heads with the same history."""

    free: OrderedDict[str, Head]
    """The oldest first."""
    last: Head
    """Free or not: where a fork leaves."""


def _alike(head: Head) -> _Alike:
    return _Alike(OrderedDict({head.completion_id: head} if head.free else {}), head)


class Heads:
    """At most `most` of them; the oldest are forgotten first. Whatever is asked costs the same, however many."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._by_id: dict[str, Head] = {}
        self._by_history: dict[bytes, Head | _Alike] = {}
        """Nearly every history is one head's alone, for which no list is made."""
        self._by_name: dict[str, Head] = {}

    def named(self, name: str) -> Head | None:
        """By its own id, or another that feedback may use."""
        return self._by_id.get(name) or self._by_name.get(name) or self._by_name.get(name.removesuffix(FIRST))

    def alike(self, history: bytes) -> Head | None:
        """The last one with this history, free or not."""
        found = self._by_history.get(history)
        return found.last if isinstance(found, _Alike) else found

    def free(self, history: bytes) -> Head | None:
        """The oldest one with this history that is free."""
        found = self._by_history.get(history)
        if isinstance(found, _Alike):
            return next(iter(found.free.values()), None)
        return found if found is not None and found.free else None

    def keep(self, head: Head) -> None:
        """Add one; in place of what was known under its id, but what was taken stays so."""
        by_id, completion_id = self._by_id, head.completion_id
        before = by_id.pop(completion_id, None)
        if before is not None:
            head.taken_by = head.taken_by or before.taken_by
            self._unlink(before)
        by_id[completion_id] = head
        for history in head.histories:
            found = self._by_history.setdefault(history, head)
            if found is not head:
                self._keep_beside(found, history, head)
        if head.name is not None:
            self._by_name[head.name] = head
        if len(by_id) > self._most:
            for forgotten in oldest(by_id, self._most):
                self._unlink(by_id.pop(forgotten))

    def keep_taken(self, head: Head, call_id: str) -> None:
        """Note that a head is taken, of which so far nothing else may be known."""
        if head.completion_id not in self._by_id:
            head.taken_by = call_id
            self.keep(head)
        self.take(head.completion_id, call_id)

    def learn(self, head: Head) -> bool:
        """Add one that SQL told of, unless more is known of it here; whether it was added."""
        known = self._by_id.get(head.completion_id)
        if known is not None and known.histories:
            return False
        self.keep(head)
        return True

    def take(self, completion_id: str, call_id: str, instead_of: str | None = None) -> None:
        """Let a call go on from it, if it is free or was taken by the one that this call repeats."""
        if (head := self._by_id.get(completion_id)) and head.taken_by in (None, instead_of):
            head.taken_by = call_id
            self.set_aside(head)

    def release(self, completion_id: str, call_id: str) -> None:
        """That call came to nothing: it is free again, and the next to be taken."""
        head = self._by_id.get(completion_id)
        if head is None or head.taken_by != call_id:
            return
        head.taken_by, head.set_aside = None, False
        for history in head.histories:
            found = self._by_history.get(history)
            if found is None or found is head:
                continue
            if not isinstance(found, _Alike):
                found = self._by_history[history] = _alike(found)
            found.free[completion_id] = head
            found.free.move_to_end(completion_id, last=False)

    def set_aside(self, head: Head) -> None:
        """It is no longer to be found as a free one."""
        head.set_aside = True
        for history in head.histories:
            if isinstance(found := self._by_history.get(history), _Alike):
                found.free.pop(head.completion_id, None)

    def _keep_beside(self, found: Head | _Alike, history: bytes, head: Head) -> None:
        """Add one to what has the same history."""
        if not isinstance(found, _Alike):
            found = self._by_history[history] = _alike(found)
        found.last = head
        if head.free:
            found.free[head.completion_id] = head

    def _unlink(self, head: Head) -> None:
        for history in head.histories:
            found = self._by_history.get(history)
            if found is head:
                del self._by_history[history]
                continue
            if not isinstance(found, _Alike):
                continue
            found.free.pop(head.completion_id, None)
            if found.last is head:
                # Others with this history may be left; the latest of those that are free stands for them.
                if found.free:
                    found.last = next(reversed(found.free.values()))
                else:
                    del self._by_history[history]
        if head.name is not None and self._by_name.get(head.name) is head:
            del self._by_name[head.name]
