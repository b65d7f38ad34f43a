"""Batch writes to connections: send at once, or together with others of the same iteration of the event loop.

Each write wakes the reader at the other end. If the reader sleeps on its own core, waking it takes longer than writing,
and it may sleep again before the next write: of sixteen requests that arrived together, each would wake the server that
has to answer. When they are written one right after the other, the first one wakes it for all.
"""

import asyncio
import logging
from weakref import WeakKeyDictionary

MOST_QUEUED = 16
"""Most connections whose writes wait for one another. More would gain nothing, and the first would wait longer."""
MOST_BYTES = 64 * 2**10
"""Most bytes waiting on one connection. asyncio's transports use the same figure: above it they ask the writer to
pause."""

log = logging.getLogger(__name__)


class WriteBatcher:
    """The write batch of one event loop: counts the writers expected in this iteration and holds their writes."""

    def __init__(self) -> None:
        self.due = 0
        """Pieces that were read and not yet followed by a write."""
        self._read = self._read_before = 0
        """Pieces read in total: until now, and until the end of this iteration was scheduled."""
        self._queued: list[BatchedTransport] = []
        self._ends = False
        """The end of this iteration is scheduled."""

    def read(self) -> None:
        """Count a piece that was read: its receiver is likely to write."""
        self._read += 1
        self.due += 1

    def hold(self, one: "BatchedTransport") -> None:
        """Queue a transport, to flush it with others, at the latest when this iteration ends."""
        self._queued.append(one)
        if len(self._queued) == MOST_QUEUED:
            self.flush()
        elif not self._ends:
            self._ends, self._read_before = True, self._read
            one.loop.call_soon(self._end)

    def flush(self) -> None:
        """Flush every queued transport."""
        queued, self._queued = self._queued, []
        for one in queued:
            try:
                one.flush()
            except Exception:  # a failed write must not hold up the other connections
                log.exception("the data queued for a connection cannot be written")
                one.abort()

    def _end(self) -> None:
        # Stop waiting for the receivers of earlier pieces that have written nothing.
        self._ends, self.due = False, self._read - self._read_before
        self.flush()


_outboxes: WeakKeyDictionary[asyncio.AbstractEventLoop, WriteBatcher] = WeakKeyDictionary()


class BatchedTransport(asyncio.Transport):
    """A transport that may delay what is written to it, in order."""

    __slots__ = ("_queued", "_transport", "loop", "outbox")

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self.loop = loop
        self.outbox = _outboxes.setdefault(loop, WriteBatcher())
        self._queued = b""

    def write(self, data: bytes) -> None:  # type: ignore[override]
        """Write as asyncio's transports do. Write at once if no other write is due in this iteration."""
        outbox = self.outbox
        outbox.due -= 1
        # A closing transport still sends what it has buffered, and what is written to it until it is closed.
        if outbox.due <= 0 or self._transport.is_closing():
            outbox.due = max(outbox.due, 0)
            # That may include earlier data of this transport.
            outbox.flush()
            self._transport.write(data)
            return
        before = self._queued
        # Usually nothing is waiting yet.
        queued = self._queued = before + data if before else data
        if len(queued) > MOST_BYTES:
            self.flush()
        elif not before:
            outbox.hold(self)

    def flush(self) -> None:
        """Write what is waiting here, unless the transport is closing."""
        if queued := self._queued:
            self._queued = b""
            if not self._transport.is_closing():
                self._transport.write(queued)

    def close(self) -> None:
        """Close as asyncio's transports do: buffered data still goes out."""
        self.flush()
        self._transport.close()

    def abort(self) -> None:
        """Abort as asyncio's transports do: unsent data is dropped."""
        self._queued = b""
        self._transport.abort()

    def get_write_buffer_size(self) -> int:
        """Return the bytes that the kernel has not taken yet, as asyncio's transports do."""
        return len(self._queued) + self._transport.get_write_buffer_size()

    def is_closing(self) -> bool:
        """Return what asyncio's transport returns."""
        return self._transport.is_closing()

    def pause_reading(self) -> None:
        """Pause the transport."""
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Resume the transport."""
        self._transport.resume_reading()
