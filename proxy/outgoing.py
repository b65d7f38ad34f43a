"""What goes out on connections: at once, or together with what others say within the same turn of the event loop.

Each write wakes whoever reads at the other end. Where that sleeps, on a core of its own, to wake it takes longer than
to write, and it may sleep again before the next: of sixteen requests that came together, each would wake the server
that is to answer. Written one right behind the other, the first wakes it for all. Knows transports and turns; nothing
of what is said.
"""

import asyncio
import logging
from weakref import WeakKeyDictionary

MOST_HELD = 16
"""Connections whose writes wait for one another: more would gain nothing, and the first would wait longer."""
MOST_BYTES = 64 * 2**10
"""Held of one connection. As asyncio's transports: with more than this they ask who writes to pause."""

log = logging.getLogger(__name__)


class Outbox:
    """Of one event loop: how many are likely to write within this turn, and what is held for them."""

    def __init__(self) -> None:
        self.due = 0
        """Pieces that were read, and nothing was written since on their account."""
        self._read = self._read_before = 0
        """Pieces in all: until now, and until the end of this turn was asked for."""
        self._held: list[Outgoing] = []
        self._ends = False
        """The end of this turn was asked for."""

    def read(self) -> None:
        """A piece was read: whoever it is for is likely to write."""
        self._read += 1
        self.due += 1

    def hold(self, one: "Outgoing") -> None:
        """Have it flushed with others, and when this turn ends at the latest."""
        self._held.append(one)
        if len(self._held) == MOST_HELD:
            self.flush()
        elif not self._ends:
            self._ends, self._read_before = True, self._read
            one.loop.call_soon(self._end)

    def flush(self) -> None:
        """Write all that is held."""
        held, self._held = self._held, []
        for one in held:
            try:
                one.flush()
            except Exception:  # whatever was written there: nobody else's is to stay behind
                log.exception("what was held for a connection cannot be written")
                one.abort()

    def _end(self) -> None:
        # Of what was read before, whoever has written nothing is not waited for any more.
        self._ends, self.due = False, self._read - self._read_before
        self.flush()


class Outgoing(asyncio.Transport):
    """A transport that may hold what is written to it; nothing overtakes that."""

    __slots__ = ("_held", "_transport", "loop", "outbox")

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self.loop = loop
        self.outbox = _outbox(loop)
        self._held = b""

    def write(self, data: bytes) -> None:  # type: ignore[override]
        """As asyncio's, at once where nobody else is due to write within this turn."""
        outbox = self.outbox
        outbox.due -= 1
        # While one closes, what it has yet to send still goes out, and what comes behind it until then.
        if outbox.due > 0 and not self._transport.is_closing():
            self._hold(data)
        else:
            outbox.due = max(outbox.due, 0)
            # Among which may be what was written here before.
            outbox.flush()
            self._transport.write(data)

    def _hold(self, data: bytes) -> None:
        before = self._held
        # Hardly ever is anything held already.
        held = self._held = before + data if before else data
        if len(held) > MOST_BYTES:
            self.flush()
        elif not before:
            self.outbox.hold(self)

    def flush(self) -> None:
        """Write what is held here, unless the other end has gone."""
        if held := self._held:
            self._held = b""
            if not self._transport.is_closing():
                self._transport.write(held)

    def close(self) -> None:
        """As asyncio's: what was written still goes out."""
        self.flush()
        self._transport.close()

    def abort(self) -> None:
        """As asyncio's: what was not sent is dropped."""
        self._held = b""
        self._transport.abort()

    def get_write_buffer_size(self) -> int:
        """As asyncio's: bytes that the kernel has not taken yet."""
        return len(self._held) + self._transport.get_write_buffer_size()

    def is_closing(self) -> bool:
        """As asyncio's."""
        return self._transport.is_closing()

    def pause_reading(self) -> None:
        """As asyncio's."""
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        """As asyncio's."""
        self._transport.resume_reading()


_outboxes: WeakKeyDictionary[asyncio.AbstractEventLoop, Outbox] = WeakKeyDictionary()


def _outbox(loop: asyncio.AbstractEventLoop) -> Outbox:
    found = _outboxes.get(loop)
    if found is None:
        found = _outboxes[loop] = Outbox()
    return found
