"""An answer of a server's as it comes: what of it is there, and who waits for more. Knows no socket and no framing.

Its connection fills it, one request's asker reads it.
"""

import asyncio
from collections.abc import Callable
from functools import lru_cache
from typing import Protocol

from proxy.errors import UpstreamDown
from proxy.known_answer import KnownAnswer

MOST_UNREAD_BYTES = 256 * 2**10
"""Of an answer that its app does not take in; beyond it the server has to wait."""
SHORT_BYTES = 64 * 2**10
"""Up to this length nobody is told of an answer before all of it is there: its end follows at once, and whoever waits
is woken once and not twice."""
EVENT_STREAM = "text/event-stream"
TYPES_KEPT = 64
"""Content types that are known with their meaning: a server says the same few again and again."""


class Source(Protocol):
    """What an answer comes over."""

    server: tuple[str, int]
    """Host and port of who answers."""
    loop: asyncio.AbstractEventLoop

    def drop(self) -> None:
        """Hang up at once."""
        ...

    def go_on(self) -> None:
        """Have the server go on, if it was to wait."""
        ...


class Counting(Protocol):
    """Who wants to know when an answer is given up."""

    def is_through(self, name: str, broken: bool = False) -> None:
        """The one that was asked for under this name is; `broken`: the server broke it off."""
        ...


class Response:
    """An answer, its headers read. `with` gives it up: what was not read to its end closes the connection, and the
    server aborts."""

    __slots__ = (
        "_error", "_parts", "_short", "_size", "_source", "_take", "_waiter", "_whole", "content_type", "counting",
        "done", "headers", "name", "server", "status",
    )  # fmt: skip

    def __init__(self, source: Source) -> None:
        self._source: Source | None = source
        self._error: UpstreamDown | None = None
        self._parts: list[bytes] = []
        self._size = 0
        self._waiter: asyncio.Future[None] | None = None
        self._take: Callable[[bytes], bool] | None = None
        """Takes what comes while somebody waits."""
        self._whole = False
        self._short: bool
        """And no stream of events, each of which is passed on as it comes; known with its headers."""
        self.done = False
        """All of it is."""
        self.status = 0
        """0 until its headers are there."""
        self.headers: dict[bytes, bytes] = {}
        """By their names in lower case; of one that comes twice the last. Of a known head they are shared, without what
        is each answer's own."""
        self.content_type = ""
        """What its body is, in lower case and without parameters."""
        self.server = source.server
        """Host and port of who answers."""
        self.counting: Counting | None = None
        """Told once, with its `name`, when it is given up."""
        self.name: str
        """What it was asked for under; where somebody counts."""

    def __enter__(self) -> "Response":
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self.leave(broken=isinstance(error, UpstreamDown))

    @property
    def unread_bytes(self) -> int:
        """What has come of its body and was not taken in."""
        return self._size

    def leave(self, *, broken: bool = False) -> None:
        """Have done with it; once more does nothing."""
        if not self.done:
            source, self._source = self._source, None
            if source is not None:
                source.drop()
            # Its traceback holds this response, and all that the call has on its stack.
            self._error = None
        counting, self.counting = self.counting, None
        if counting is not None:
            counting.is_through(self.name, broken)

    def whole(self, most_bytes: int) -> bytes | None:
        """All of its body, as `read` gives it, where it is there in one piece; None where it is not."""
        return self._parts[0] if self.done and len(self._parts) == 1 and self._size <= most_bytes else None

    async def read(self, most_bytes: int) -> bytes:
        """All of its body; also once more.

        Raises:
            UpstreamDown: it has more than `most_bytes`, or was broken off.
        """
        self._whole = True
        while not self.done and self._size <= most_bytes:
            self._go_on()
            await self.news()
        if self._size > most_bytes:
            raise too_long(most_bytes)
        if len(self._parts) != 1:
            self._parts = [b"".join(self._parts)]
        return self._parts[0]

    def at_once(self) -> bytes | None:
        """What has come of its body since the last time; nothing at its end. None where more is to be waited for
        (`news`)."""
        parts, size = self._parts, self._size
        if not parts:
            return b"" if self.done else None
        self._parts, self._size = [], 0
        # With less than that the server never had to wait.
        if size > MOST_UNREAD_BYTES and not self.done:
            self._go_on()
        return parts[0] if len(parts) == 1 else b"".join(parts)

    # For the connection.

    @property
    def any(self) -> bool:
        """Something of it has come."""
        return bool(self.status or self.headers)

    def begins(self, status: int) -> None:
        """Its headers are there."""
        self.status = status
        self.content_type = _without_parameters(self.headers.get(b"content-type", b""))
        length = self.headers.get(b"content-length", b"")
        self._short = length.isdigit() and int(length) <= SHORT_BYTES and self.content_type != EVENT_STREAM

    def came(self, known: KnownAnswer, body: bytes) -> None:
        """All of it is there at once, its head one that came before."""
        self.status, self.headers, self.content_type = 200, known.headers, known.content_type
        self._parts, self._size, self.done = [body], len(body), True
        self.wake()

    def heard(self, part: bytes) -> bool:
        """Keep a piece of the body; whether the next is to wait."""
        self._parts.append(part)
        self._size += len(part)
        return self._size > MOST_UNREAD_BYTES and not self._whole

    def broke(self, error: Exception | None) -> None:
        """The connection is gone. Without a length that is how an answer ends."""
        framed = b"content-length" in self.headers or b"transfer-encoding" in self.headers
        if self.status and not framed and error is None:
            self.done = True
        elif not self.done and self._error is None:
            self._error = down(error or ConnectionResetError("it hung up"))
        self.wake()

    def fails(self, error: UpstreamDown) -> None:
        """It is none that can be passed on."""
        self._error = error
        self.wake()

    def tell(self) -> None:
        """Wake whoever waits, where there is something for it, or have it passed on."""
        if self._take is not None:
            # When what came for others is read too: what they all say then goes out together.
            assert self._source is not None
            self._source.loop.call_soon(self._pass)
        elif self.done or (self.status and not self._short):
            self.wake()

    def wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def news(self, take: Callable[[bytes], bool] | None = None) -> "asyncio.Future[None]":
        """To be awaited until more of it has come, of a short one all, or is known never to come.

        `take` is called with what comes in the meantime, from the event loop and in nobody's context, and whoever
        awaits this is woken when it answers that it takes no more, or at the end: to wake somebody for each event of a
        stream costs more than to pass it on.

        Raises:
            UpstreamDown: it was broken off. Awaited: what `take` raises.
        """
        if self._error is not None:
            raise self._error
        assert self._source is not None
        waiter = self._waiter = self._source.loop.create_future()
        self._take = take
        return waiter

    def _pass(self) -> None:
        """Give what has come to who takes it."""
        waiter, take = self._waiter, self._take
        # Whoever has been woken, if only to hear that nobody wants the answer, reads for itself.
        if take is None or waiter is None or waiter.done():
            return
        try:
            data = self.at_once()
            goes_on = not data or take(data)
        except Exception as error:
            # It holds the frames that it came through: none of them is to hold it.
            self._waiter = None
            waiter.set_exception(error)
            del waiter
        else:
            if self.done or not goes_on:
                self.wake()

    def _go_on(self) -> None:
        if self._source is not None:
            self._source.go_on()


@lru_cache(TYPES_KEPT)
def _without_parameters(content_type: bytes) -> str:
    return content_type.split(b";", 1)[0].strip().lower().decode("latin-1")


def too_long(most_bytes: int) -> UpstreamDown:
    """The error for an answer that does not end."""
    return UpstreamDown(f"the model server's answer is over {most_bytes} bytes (setting proxy.max_answer_bytes)")


def down(error: Exception, kind: type[UpstreamDown] = UpstreamDown) -> UpstreamDown:
    """The error for what has gone wrong on the way to the server."""
    made = kind(f"the model server does not answer ({type(error).__name__}); it may be starting, try again soon")
    made.__cause__ = error
    return made
