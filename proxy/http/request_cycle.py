"""Run one request of a connection through the ASGI app and write its answer.

This replaces uvicorn's own cycle, which costs several times as much. Here an answer in one piece is one write, and the
serving task learns of a disconnect at once.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from functools import lru_cache
from operator import itemgetter
from typing import Any

from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from proxy.http.asgi import EXCHANGE, Header, Scope, headers_in

Message = MutableMapping[str, Any]
_LINE, _NAME = b": ".join, itemgetter(0)
"""Join a header into a line; get its name."""
_FRAMING = frozenset({b"content-length", b"transfer-encoding", b"connection"})
_NO_LENGTH = 204
"""Status of answers that never have a length (RFC 9110, 8.6)."""
_BODILESS = (_NO_LENGTH, 304)
"""Statuses of answers without a body."""
MOST_OPENINGS = 64
"""Number of cached pairs of a status and the headers that many answers share. The date changes each second."""
_LF, _CR, _NUL = b"\n\r\0"
"""As numbers: when looking for bytes in bytes, Python first raises an error and drops it."""

log = logging.getLogger(__name__)


class RequestCycle:
    """One request and its answer. Created once the request's headers have arrived; its connection feeds it the rest."""

    def __init__(
        self,
        scope: Scope,
        transport: asyncio.Transport,
        flow: FlowControl,
        default_headers: list[Header],
        on_response: Callable[[], None],
        keep_alive: bool,
        expects_continue: bool,
    ) -> None:
        """`on_response` is called when the answer is sent."""
        scope[EXCHANGE] = self
        self.scope = scope
        self._transport = transport
        self._flow = flow
        self._default_headers = default_headers
        self._on_response = on_response
        self._expects_continue = expects_continue
        self.task: asyncio.Task[None] | None = None
        """The task that runs it, if its connection has set one."""
        self.on_end: Callable[[Any], object] = _nothing
        """Called with that task when the app is finished."""
        self.keep_alive = keep_alive
        self._parts: list[bytes] = []
        self._size = 0
        self._news = False
        """Something has arrived that was not received yet."""
        self.more_body = True
        """Part of the request is still missing."""
        self.disconnected = False
        self.response_complete = False
        self._head: bytes | None = None
        """The answer's head, which waits for the first bytes of the body."""
        self._started = False
        self._chunked = self._bodiless = self._unframed = False
        self._left_bytes = 0
        """Bytes still missing of the length in the answer's headers."""
        self._changed: asyncio.Event | None = None
        """Set when there is news. None until a task waits for it."""
        self._cancels = False
        """Cancel the task when the app disconnects."""

    async def run(self, app: Callable[..., Awaitable[None]]) -> None:
        """Run the app, and answer with 500 if it fails before it has started an answer."""
        try:
            await app(self.scope, self.receive, self)
        except BaseException as error:
            log.error("an exception in the app", exc_info=error)
            if self._started or self.disconnected:
                self._transport.close()
            else:
                self._head = None
                await self.whole(
                    500,
                    [(b"content-type", b"text/plain; charset=utf-8"), (b"connection", b"close")],
                    b"Internal Server Error",
                )
        else:
            if not self.response_complete and not self.disconnected:
                log.error("a request was left without its answer, or its end")
                self._transport.close()
        finally:
            self.on_end(self.task)
            self.forget()

    # Called by the connection.

    def feed_body(self, part: bytes) -> None:
        """Add a piece of the request's body."""
        self._parts.append(part)
        self._size += len(part)
        if self._size > HIGH_WATER_LIMIT:
            self._flow.pause_reading()
        self._notify()

    def end(self) -> None:
        """Mark the request as whole."""
        self.more_body = False
        self._notify()

    def lost(self) -> None:
        """Mark the app as disconnected."""
        if not self.response_complete:
            self.disconnected = True
            if self._cancels and self.task is not None:
                self.task.cancel()
        self._notify()

    def forget(self) -> None:
        """Release everything: scope and exchange refer to each other, and nothing should wait for the garbage
        collector."""
        self._on_response, self.on_end, self._cancels, self.task = _nothing, _nothing, False, None
        self._parts, self._size = [], 0
        self.scope.pop(EXCHANGE, None)

    # Called by the app.

    def cancel_when_gone(self) -> None:
        """Cancel the serving task when the app disconnects before its answer is sent; at once if it already has."""
        self.task = self.task or asyncio.current_task()
        self._cancels = True
        # While reading is paused, a disconnect goes unnoticed.
        if self._flow.read_paused:
            self._flow.resume_reading()
        if self.disconnected and self.task is not None:
            self.task.cancel()

    def stop_cancelling(self) -> None:
        """Stop cancelling the task on a disconnect."""
        self._cancels = False

    def was_client_disconnect(self, error: BaseException) -> bool:
        """Return whether this error is the cancellation that a disconnect caused. If so, the serving task continues."""
        if not self.disconnected or self.task is None or not isinstance(error, asyncio.CancelledError):
            return False
        self.task.uncancel()
        return True

    def whole_bytes(self) -> int | None:
        """Return the size of the request's body if the whole body has arrived and nothing was received yet, else
        None."""
        return None if self.more_body or self.disconnected or not self._news else self._size

    def whole_body(self, limit_bytes: int) -> bytes | None:
        """Return that body and mark it as received. None if it has not arrived, or is over the limit."""
        if self.more_body or self.disconnected or not self._news or self._size > limit_bytes:
            return None
        return self._take()

    async def receive(self) -> Message:
        """Receive ASGI's next message."""
        if self._expects_continue and not self._transport.is_closing():
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self._expects_continue = False
        while not (self._news or self.disconnected or self.response_complete):
            self._flow.resume_reading()
            self._changed = self._changed or asyncio.Event()
            self._changed.clear()
            await self._changed.wait()
        if self.disconnected or self.response_complete:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": self._take(), "more_body": self.more_body}

    async def send(self, message: Message) -> None:
        """Send an ASGI message.

        Raises:
            RuntimeError: the message is out of turn, or its headers are invalid.
        """
        if self._flow.write_paused and not self.disconnected:
            await self._flow.drain()
        if self.disconnected:
            return
        if message["type"] == "http.response.start" and self._head is None and not self._started:
            self._head = self._head_of(message["status"], message.get("headers", ()))
        elif message["type"] == "http.response.body" and (self._head is not None or self._started):
            self._write_body(message.get("body", b""), more=message.get("more_body", False))
        else:
            raise RuntimeError(f"ASGI message {message['type']!r} is out of turn")

    __call__ = send

    def more(self, piece: bytes) -> bool:
        """Send another piece of a chunked answer that has started, if nothing blocks it. Return whether it was sent; if
        not, `send` waits or raises.

        Each event of a stream would otherwise need a message and a coroutine.
        """
        if not (self._started and self._chunked and piece) or (
            self.response_complete or self.disconnected or self._flow.write_paused
        ):
            return False
        self._transport.write(_chunk(piece))
        return True

    async def whole(self, status: int, headers: list[Header], body: bytes, lines: bytes = b"") -> None:
        """Send an answer in one piece, for which ASGI needs two messages. `lines`: more headers, as in `send_whole`.

        Raises:
            RuntimeError: the answer has already started, or its headers are invalid.
        """
        if self._flow.write_paused and not self.disconnected:
            await self._flow.drain()
        if self.disconnected:
            return
        if self._head is not None or self._started:
            raise RuntimeError("the answer has begun already")
        response_bytes = self._plain_response(status, headers, body, lines)
        if response_bytes is None:
            self._head = self._head_of(status, [*headers, *headers_in(lines)], len(body))
            self._write_body(body, more=False)
        else:
            self._expects_continue, self._started = False, True
            self._transport.write(response_bytes)
            self._complete()

    def _take(self) -> bytes:
        body = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts, self._size = [], 0
        self._news = False
        return body

    def _plain_response(self, status: int, headers: list[Header], body: bytes, lines: bytes) -> bytes | None:
        """Return the bytes of an answer with the usual framing, or None if it needs `_head_of`."""
        if not headers or not self.keep_alive or self.scope["method"] == "HEAD":
            return None
        opening = _opening(status, *self._default_headers, *headers)
        if opening is None:
            return None
        return b"%b%bcontent-length: %d\r\n\r\n%b" % (opening, lines, len(body), body)

    def _head_of(self, status: int, headers: Iterable[Header], size: int | None = None) -> bytes:
        """Return the status line and headers of an answer, with its length if `size` is given."""
        self._expects_continue = False
        length = size
        every = [*self._default_headers, *headers]
        if not _FRAMING.isdisjoint(map(_NAME, every)):
            every, declared = self._framed(every, status)
            length = declared if size is None else size
        lines = [*map(_LINE, every)]
        if size is not None and status != _NO_LENGTH:
            lines.append(b"content-length: %d" % size)
        _check(b"".join(lines))
        if not self.keep_alive:
            lines.append(b"connection: close")
        self._bodiless = status in _BODILESS or self.scope["method"] == "HEAD"
        # Without chunks, the answer ends when the connection does.
        self._unframed = length is None and self.scope.get("http_version") == "1.0"
        self._chunked = length is None and not self._bodiless and not self._unframed
        if self._chunked:
            lines.append(b"transfer-encoding: chunked")
        self._left_bytes = 0 if length is None or self._bodiless else length
        return STATUS_LINE[status] + b"\r\n".join((*lines, b"", b""))

    def _framed(self, headers: list[Header], status: int) -> tuple[list[Header], int | None]:
        """Apply the framing headers. Return the headers to send, and the answer's length."""
        passed_on: list[Header] = []
        length: int | None = None
        for name, value in headers:
            if name == b"connection" and b"close" in value.lower():
                self.keep_alive = False
            if name == b"content-length":
                length = int(value)
            if name not in _FRAMING or (name == b"content-length" and status != _NO_LENGTH):
                passed_on.append((name, value))
        return passed_on, length

    def _write_body(self, body: bytes, *, more: bool) -> None:
        if self.response_complete:
            raise RuntimeError("the answer is complete already")
        if self._bodiless:
            body = b""
        elif self._chunked:
            if body:
                body = _chunk(body)
            if not more:
                body += b"0\r\n\r\n"
        elif not self._unframed:
            self._left_bytes -= len(body)
            if self._left_bytes < 0 or (self._left_bytes and not more):
                raise RuntimeError("the answer has another length than its headers say")
        head, self._head = self._head, None
        self._started = True
        if head is not None:
            body = head + body
        if body:
            self._transport.write(body)
        if not more:
            self._complete()

    def _complete(self) -> None:
        """Mark the answer as sent."""
        self.response_complete = self._news = True
        if self._changed is not None:
            self._changed.set()
        if not self.keep_alive:
            self._transport.close()
        self._on_response()

    def _notify(self) -> None:
        self._news = True
        if self._changed is not None:
            self._changed.set()


@lru_cache(MOST_OPENINGS)
def _opening(status: int, *headers: Header) -> bytes | None:
    """Return the head of an answer of known length, up to that length. None if its headers set the framing, or it has
    no body.

    Raises:
        RuntimeError: the headers are invalid.
    """
    if status in _BODILESS or not _FRAMING.isdisjoint(map(_NAME, headers)):
        return None
    _check(b"".join(map(_LINE, headers)))
    return STATUS_LINE[status] + b"".join([b"%b: %b\r\n" % header for header in headers])


def _chunk(piece: bytes) -> bytes:
    """Return a piece in chunked coding, for an answer of unknown length (RFC 9112, 7.1). An empty chunk would end
    it."""
    return b"%x\r\n%b\r\n" % (len(piece), piece)


def _check(lines: bytes) -> None:
    """Check that no header holds a line break or a NUL, which would let its value inject more headers.

    Raises:
        RuntimeError: one does.
    """
    if _LF in lines or _CR in lines or _NUL in lines:
        raise RuntimeError("a header has a line break or a NUL")


def _nothing(*_changed: object) -> None:
    pass
