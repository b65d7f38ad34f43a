"""The completions that a request may go on from, by what it finds them by. Pure; knows hashes and ids."""

from collections import OrderedDict

import msgspec

from proxy.pins import Pins


def names_of(answer_id: str, choice: int) -> tuple[str, ...]:
    """What else feedback may call a choice of an answer: the answer's own id stands for its first one."""
    return (f"{answer_id}/{choice}", *([answer_id] if choice == 0 else ()))


class Head(msgspec.Struct):
    """A completion that may be gone on from."""

    completion_id: str
    trajectory_id: str
    histories: tuple[bytes, ...] = ()
    """What it is found by."""
    names: tuple[str, ...] = ()
    """What else feedback may call it."""
    taken_by: str | None = None
    """The call that goes on from it; None while it is free."""
    over: bool = False
    """Its trajectory is."""
    pins: Pins = ()
    """What spoke in its trajectory, up to it."""


class _Alike(msgspec.Struct):
    """Heads with the same history."""

    free: OrderedDict[str, Head]
    """The oldest first."""
    last: Head
    """Free or not: where a fork leaves."""


class Heads:
    """At most `most` of them; the oldest are forgotten first. Whatever is asked costs the same, however many."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._by_id: OrderedDict[str, Head] = OrderedDict()
        self._by_history: dict[bytes, _Alike] = {}
        self._by_name: dict[str, Head] = {}

    def named(self, name: str) -> Head | None:
        """By its own id, or another that feedback may use."""
        return self._by_id.get(name) or self._by_name.get(name)

    def alike(self, history: bytes) -> Head | None:
        """The last one with this history, free or not."""
        found = self._by_history.get(history)
        return found.last if found else None

    def free(self, history: bytes) -> Head | None:
        """The oldest one with this history that is free."""
        found = self._by_history.get(history)
        return next(iter(found.free.values()), None) if found else None

    def keep(self, head: Head) -> None:
        """Add one; in place of what was known under its id, but what was taken stays so."""
        before = self._by_id.pop(head.completion_id, None)
        if before is not None:
            head.taken_by = head.taken_by or before.taken_by
            self._unlink(before)
        self._by_id[head.completion_id] = head
        for history in head.histories:
            found = self._by_history.get(history)
            if found is None:
                self._by_history[history] = found = _Alike(OrderedDict(), head)
            found.last = head
            if head.taken_by is None:
                found.free[head.completion_id] = head
        for name in head.names:
            self._by_name[name] = head
        while len(self._by_id) > self._most:
            self._unlink(self._by_id.popitem(last=False)[1])

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
        head.taken_by = None
        for history in head.histories:
            if found := self._by_history.get(history):
                found.free[completion_id] = head
                found.free.move_to_end(completion_id, last=False)

    def set_aside(self, head: Head) -> None:
        """It is no longer to be found as a free one."""
        for history in head.histories:
            if found := self._by_history.get(history):
                found.free.pop(head.completion_id, None)

    def _unlink(self, head: Head) -> None:
        for history in head.histories:
            found = self._by_history.get(history)
            if found is None:
                continue
            found.free.pop(head.completion_id, None)
            if found.last is head:
                # Others with this history may be left; the latest of those that are free stands for them.
                if found.free:
                    found.last = next(reversed(found.free.values()))
                else:
                    del self._by_history[history]
        for name in head.names:
            if self._by_name.get(name) is head:
                del self._by_name[name]
