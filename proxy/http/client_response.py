"""Hold a server's answer as it arrives, and let one reader wait for more of it.

The connection fills the answer; the caller that sent the request reads it.
"""

import asyncio
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Protocol

from proxy.errors import UpstreamDown

if TYPE_CHECKING:
    from proxy.http.client import Connection

MOST_UNREAD_BYTES = 256 * 2**10
"""Most bytes of an answer that may wait unread; beyond it the server has to wait."""
SHORT_BYTES = 64 * 2**10
"""Up to this length the reader is not woken before the whole answer has arrived. The end follows at once, so the reader
is woken once, not twice."""
EVENT_STREAM = "text/event-stream"
MOST_TYPES = 64
"""Number of content types cached in parsed form: a server uses the same few again and again."""


class Counting(Protocol):
    """A counter that is notified when an answer is released."""

    def is_through(self, name: str, broken: bool = False) -> None:
        """Record that the request counted under this name has ended. `broken`: the server broke the answer off."""
        ...


class Response:
    """A server's answer. Use it in a `with`, which releases it: if the answer was not read to its end, its connection
    is closed and the server aborts."""

    __slots__ = (
        "_error", "_parts", "_short", "_size", "_source", "_take", "_waiter", "_whole", "content_type", "counting",
        "done", "headers", "name", "server", "status",
    )  # fmt: skip

    def __init__(self, source: "Connection") -> None:
        self._source: Connection | None = source
        self._error: UpstreamDown | None = None
        self._parts: list[bytes] = []
        self._size = 0
        self._waiter: asyncio.Future[None] | None = None
        self._take: Callable[[bytes], bool] | None = None
        """Takes the data that arrives while the reader waits."""
        self._whole = False
        self._short: bool
        """At most `SHORT_BYTES` long and not an event stream, whose events pass at once. Set with the headers."""
        self.done = False
        """The whole answer has arrived."""
        self.status = 0
        """0 until the headers have arrived."""
        self.headers: dict[bytes, bytes] = {}
        """By name in lower case; of a repeated header the last one counts."""
        self.content_type = ""
        """The body's media type, in lower case and without parameters."""
        self.server = source.server
        """Host and port of the server that answers."""
        self.counting: Counting | None = None
        """Notified once, with `name`, when the answer is released."""
        self.name: str
        """The name that the request is counted under; set where `counting` is."""

    def __enter__(self) -> "Response":
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self.release(broken=isinstance(error, UpstreamDown))

    def release(self, *, broken: bool = False) -> None:
        """Release the answer. Calling it again does nothing."""
        if not self.done:
            source, self._source = self._source, None
            if source is not None:
                source.drop()
            # Its traceback holds this response and everything on the call's stack.
            self._error = None
        counting, self.counting = self.counting, None
        if counting is not None:
            counting.is_through(self.name, broken)

    def whole(self, most_bytes: int) -> bytes | None:
        """Return the whole body, as `read` does, if it has arrived in one piece, else None."""
        return self._parts[0] if self.done and len(self._parts) == 1 and self._size <= most_bytes else None

    async def read(self, most_bytes: int) -> bytes:
        """Return the whole body. May be called again.

        Raises:
            UpstreamDown: it has more than `most_bytes`, or was broken off.
        """
        self._whole = True
        while not self.done and self._size <= most_bytes:
            self._go_on()
            await self.wait_more()
        if self._size > most_bytes:
            raise too_long(most_bytes)
        if len(self._parts) != 1:
            self._parts = [b"".join(self._parts)]
        return self._parts[0]

    def read_available(self) -> bytes | None:
        """Return the part of the body that has arrived since the last call, and b"" at its end. None means: wait for
        more (`wait_more`)."""
        parts, size = self._parts, self._size
        if not parts:
            return b"" if self.done else None
        self._parts, self._size = [], 0
        # With less than that the server never had to wait.
        if size > MOST_UNREAD_BYTES and not self.done:
            self._go_on()
        return parts[0] if len(parts) == 1 else b"".join(parts)

    # Called by the connection.

    def begins(self, status: int) -> None:
        """Record that the headers have arrived."""
        self.status = status
        self.content_type = _without_parameters(self.headers.get(b"content-type", b""))
        length = self.headers.get(b"content-length", b"")
        self._short = length.isdigit() and int(length) <= SHORT_BYTES and self.content_type != EVENT_STREAM

    def add_body(self, part: bytes) -> bool:
        """Store a piece of the body. Return whether reading should pause."""
        self._parts.append(part)
        self._size += len(part)
        return self._size > MOST_UNREAD_BYTES and not self._whole

    def broke(self, error: Exception | None) -> None:
        """Record that the connection is gone. That is the normal end of an answer without a length."""
        framed = b"content-length" in self.headers or b"transfer-encoding" in self.headers
        if self.status and not framed and error is None:
            self.done = True
        elif not self.done and self._error is None:
            self._error = down(error or ConnectionResetError("it hung up"))
        self.wake()

    def fails(self, error: UpstreamDown) -> None:
        """Record that the answer cannot be passed on."""
        self._error = error
        self.wake()

    def tell(self) -> None:
        """Wake the reader if there is something for it, or schedule passing it on."""
        if self._take is not None:
            # Pass on only after the data of other connections is read too: then everything goes out together.
            assert self._source is not None
            self._source.loop.call_soon(self._pass)
        elif self.done or (self.status and not self._short):
            self.wake()

    def wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def wait_more(self, take: Callable[[bytes], bool] | None = None) -> "asyncio.Future[None]":
        """Return a future that completes when more has arrived (of a short answer: all), or never will.

        `take` is called with data that arrives in the meantime, from the event loop and without a context. The awaiting
        task is woken when `take` returns False, or at the end: waking a task for each event of a stream costs more than
        passing the event on.

        Raises:
            UpstreamDown: the answer was broken off. Awaiting the future raises what `take` raises.
        """
        if self._error is not None:
            raise self._error
        assert self._source is not None
        waiter = self._waiter = self._source.loop.create_future()
        self._take = take
        return waiter

    def _pass(self) -> None:
        """Pass what has arrived to `take`."""
        waiter, take = self._waiter, self._take
        # A task that was already woken, even if only for a disconnect, reads for itself.
        if take is None or waiter is None or waiter.done():
            return
        try:
            data = self.read_available()
            goes_on = not data or take(data)
        except Exception as error:
            # The error holds the frames it came through, so none of these frames may hold the error.
            self._waiter = None
            waiter.set_exception(error)
            del waiter
        else:
            if self.done or not goes_on:
                self.wake()

    def _go_on(self) -> None:
        if self._source is not None:
            self._source.go_on()


@lru_cache(MOST_TYPES)
def _without_parameters(content_type: bytes) -> str:
    return content_type.split(b";", 1)[0].strip().lower().decode("latin-1")


def too_long(most_bytes: int) -> UpstreamDown:
    """Return the error for an answer that is over the size limit."""
    return UpstreamDown(f"the model server's answer is over {most_bytes} bytes (setting proxy.max_answer_bytes)")


def down(error: Exception, kind: type[UpstreamDown] = UpstreamDown) -> UpstreamDown:
    """Return the error for a failure on the way to the server."""
    made = kind(f"the model server does not answer ({type(error).__name__}); it may be starting, try again soon")
    made.__cause__ = error
    return made
