"""One request and its answer on a connection, for ASGI. Knows HTTP's framing; no limit, no route.

It stands for uvicorn's own cycle, which costs several times as much: an answer in one piece is one write, and an app
that hangs up is told at once to whoever serves it.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from functools import lru_cache
from operator import itemgetter
from typing import Any

from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from proxy.asgi import EXCHANGE, Header, Scope, headers_in

Message = MutableMapping[str, Any]
_LINE, _NAME = b": ".join, itemgetter(0)
"""Of a header."""
_FRAMING = frozenset({b"content-length", b"transfer-encoding", b"connection"})
_NO_LENGTH = 204
"""Status of answers that never tell a length (RFC 9110, 8.6)."""
_BODILESS = (_NO_LENGTH, 304)
"""Statuses of answers without a body."""
OPENINGS_KEPT = 64
"""Statuses with headers that many answers have alike: the date is another each second."""
_LF, _CR, _NUL = b"\n\r\0"
"""As numbers: looking for bytes in bytes, Python first raises an error and drops it."""

log = logging.getLogger(__name__)


class Exchange:
    """Made when a request's headers are there; its connection tells it what comes."""

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
        """`on_response`: told when the answer is out."""
        scope[EXCHANGE] = self
        self.scope = scope
        self._transport = transport
        self._flow = flow
        self._default_headers = default_headers
        self._on_response = on_response
        self._expects_continue = expects_continue
        self.task: asyncio.Task[None] | None = None
        """Who runs it, where its connection has told."""
        self.on_end: Callable[[Any], object] = _nothing
        """Told of that task when the app has done with it."""
        self.keep_alive = keep_alive
        self._parts: list[bytes] = []
        self._size = 0
        self._news = False
        """Something came that nobody has received."""
        self.more_body = True
        """Not all of the request is there."""
        self.disconnected = False
        self.response_complete = False
        self._head: bytes | None = None
        """What waits for the answer's first bytes."""
        self._started = False
        self._chunked = self._bodiless = self._unframed = False
        self._left_bytes = 0
        """Of the length that the answer's headers tell."""
        self._told: asyncio.Event | None = None
        """For whoever waits for news; None until somebody does."""
        self._cancels = False
        """Its task is to be cancelled when the app hangs up."""

    async def run(self, app: Callable[..., Awaitable[None]]) -> None:
        """Have the app answer."""
        try:
            await app(self.scope, self.receive, self)
        except BaseException as error:
            log.error("an exception in the app", exc_info=error)
            if self._started or self.disconnected:
                self._transport.close()
            else:
                await self._fail()
        else:
            if not self.response_complete and not self.disconnected:
                log.error("a request was left without its answer, or its end")
                self._transport.close()
        finally:
            self.on_end(self.task)
            self.forget()

    # From the connection.

    def heard(self, part: bytes) -> None:
        """A piece of the request's body."""
        self._parts.append(part)
        self._size += len(part)
        if self._size > HIGH_WATER_LIMIT:
            self._flow.pause_reading()
        self._tell()

    def came(self, body: bytes) -> None:
        """All of the request's body, before anybody has asked for any."""
        self._parts, self._size = [body], len(body)
        if self._size > HIGH_WATER_LIMIT:
            self._flow.pause_reading()
        self.more_body, self._news = False, True

    def end(self) -> None:
        """The request is whole."""
        self.more_body = False
        self._tell()

    def lost(self) -> None:
        """The app has hung up."""
        if not self.response_complete:
            self.disconnected = True
            if self._cancels:
                self._cancel()
        self._tell()

    def forget(self) -> None:
        """Let go of everything: scope and exchange name one another, and nothing is to wait for the collector."""
        self._on_response, self.on_end, self._cancels, self.task = _nothing, _nothing, False, None
        self._parts, self._size = [], 0
        self.scope.pop(EXCHANGE, None)

    # For the app.

    def cancel_when_gone(self) -> None:
        """Have the task that serves it cancelled when the app hangs up before its answer is out; at once if it has."""
        if self.task is None:
            self.task = asyncio.current_task()
        self._cancels = True
        # Who is not read from is not seen to leave.
        if self._flow.read_paused:
            self._flow.resume_reading()
        if self.disconnected:
            self._cancel()

    def never_mind(self) -> None:
        """Have nobody cancelled any more."""
        self._cancels = False

    def spared(self, error: BaseException) -> bool:
        """Whether this is how it was cancelled because the app has hung up: then whoever serves it goes on."""
        if not self.disconnected or self.task is None or not isinstance(error, asyncio.CancelledError):
            return False
        self.task.uncancel()
        return True

    def whole_bytes(self) -> int | None:
        """Size of the request's body, if all of it is there and nobody has received any."""
        return None if self.more_body or self.disconnected or not self._news else self._size

    def whole_body(self, limit_bytes: int) -> bytes | None:
        """That body, which counts as received; None where it is not there, or over the limit."""
        if self.more_body or self.disconnected or not self._news or self._size > limit_bytes:
            return None
        return self._take()

    async def receive(self) -> Message:
        """ASGI's."""
        if self._expects_continue and not self._transport.is_closing():
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self._expects_continue = False
        while not (self._news or self.disconnected or self.response_complete):
            self._flow.resume_reading()
            self._told = self._told or asyncio.Event()
            self._told.clear()
            await self._told.wait()
        if self.disconnected or self.response_complete:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": self._take(), "more_body": self.more_body}

    async def send(self, message: Message) -> None:
        """ASGI's.

        Raises:
            RuntimeError: it is not the message's turn, or its headers are none.
        """
        if self._flow.write_paused and not self.disconnected:
            await self._flow.drain()
        if self.disconnected:
            return
        if message["type"] == "http.response.start" and self._head is None and not self._started:
            self._head = self._begun(message["status"], message.get("headers", ()))
        elif message["type"] == "http.response.body" and (self._head is not None or self._started):
            self._say(message.get("body", b""), more=message.get("more_body", False))
        else:
            raise RuntimeError(f"ASGI message {message['type']!r} is out of turn")

    __call__ = send

    def more(self, piece: bytes) -> bool:
        """Send another piece of an answer in chunks, which has begun, where nothing is in its way: what each event of a
        stream would otherwise need a message and a coroutine for. Whether it was sent; else `send` waits, or tells why
        not."""
        if not (self._started and self._chunked and piece) or self.response_complete:
            return False
        if self.disconnected or self._flow.write_paused:
            return False
        self._transport.write(_chunk(piece))
        return True

    async def whole(self, status: int, headers: list[Header], body: bytes, lines: bytes = b"") -> None:
        """Send an answer in one piece: what it takes ASGI two messages to say. `lines`: more headers, as `send_whole`
        has them.

        Raises:
            RuntimeError: it has begun already, or its headers are none.
        """
        if self._flow.write_paused and not self.disconnected:
            await self._flow.drain()
        if self.disconnected:
            return
        if self._head is not None or self._started:
            raise RuntimeError("the answer has begun already")
        said = self._plainly(status, headers, body, lines)
        if said is None:
            self._head = self._begun(status, [*headers, *headers_in(lines)], len(body))
            self._say(body, more=False)
        else:
            self._expects_continue, self._started = False, True
            self._transport.write(said)
            self._complete()

    def _cancel(self) -> None:
        if self.task is not None:
            self.task.cancel()

    def _take(self) -> bytes:
        body = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts, self._size = [], 0
        self._news = False
        return body

    def _plainly(self, status: int, headers: list[Header], body: bytes, lines: bytes) -> bytes | None:
        """All of an answer that is framed as most are; None: it is another (`_begun`)."""
        if not headers or not self.keep_alive or self.scope["method"] == "HEAD":
            return None
        opening = _opening(status, *self._default_headers, *headers)
        if opening is None:
            return None
        return b"%b%bcontent-length: %d\r\n\r\n%b" % (opening, lines, len(body), body)

    def _begun(self, status: int, headers: Iterable[Header], size: int | None = None) -> bytes:
        """The status line and the headers; behind them that the answer has this size, if that is given."""
        self._expects_continue = False
        length = size
        every = [*self._default_headers, *headers]
        if not _FRAMING.isdisjoint(map(_NAME, every)):
            every, told = self._framed(every, status)
            length = told if size is None else size
        lines = [*map(_LINE, every)]
        if size is not None and status != _NO_LENGTH:
            lines.append(b"content-length: %d" % size)
        _check(b"".join(lines))
        if not self.keep_alive:
            lines.append(b"connection: close")
        self._bodiless = status in _BODILESS or self.scope["method"] == "HEAD"
        self._unframed = self._chunked = False
        if length is None:
            # Where there are no chunks, the end of the connection is that of the answer.
            self._unframed = self.scope.get("http_version") == "1.0"
            self._chunked = not self._bodiless and not self._unframed
            if self._chunked:
                lines.append(b"transfer-encoding: chunked")
        self._left_bytes = 0 if length is None or self._bodiless else length
        return STATUS_LINE[status] + b"\r\n".join((*lines, b"", b""))

    def _framed(self, headers: list[Header], status: int) -> tuple[list[Header], int | None]:
        """Do as the headers tell that say how the answer is framed: those of them that go out, and its length."""
        kept: list[Header] = []
        length: int | None = None
        for name, value in headers:
            if name == b"connection" and b"close" in value.lower():
                self.keep_alive = False
            if name == b"content-length":
                length = int(value)
            if name not in _FRAMING or (name == b"content-length" and status != _NO_LENGTH):
                kept.append((name, value))
        return kept, length

    def _say(self, body: bytes, *, more: bool) -> None:
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
        """The answer is out."""
        self.response_complete = self._news = True
        if self._told is not None:
            self._told.set()
        if not self.keep_alive:
            self._transport.close()
        self._on_response()

    async def _fail(self) -> None:
        self._head = None
        body = b"Internal Server Error"
        kept = [(b"content-type", b"text/plain; charset=utf-8"), (b"connection", b"close")]
        headers = [*kept, (b"content-length", b"%d" % len(body))]
        await self.send({"type": "http.response.start", "status": 500, "headers": headers})
        await self.send({"type": "http.response.body", "body": body})

    def _tell(self) -> None:
        self._news = True
        if self._told is not None:
            self._told.set()


@lru_cache(OPENINGS_KEPT)
def _opening(status: int, *headers: Header) -> bytes | None:
    """How an answer of a known length begins, up to that; None: its headers say how it is framed, or it has no body.

    Raises:
        RuntimeError: they are none.
    """
    if status in _BODILESS or not _FRAMING.isdisjoint(map(_NAME, headers)):
        return None
    _check(b"".join(map(_LINE, headers)))
    return STATUS_LINE[status] + b"".join([b"%b: %b\r\n" % header for header in headers])


def _chunk(piece: bytes) -> bytes:
    """A piece as it goes out where the answer's length is not told (RFC 9112, 7.1); an empty one would end it."""
    return b"%x\r\n%b\r\n" % (len(piece), piece)


def _check(said: bytes) -> None:
    """See that headers are none but those: what would begin a line is somebody's who would say what comes next.

    Raises:
        RuntimeError: there are more.
    """
    if _LF in said or _CR in said or _NUL in said:
        raise RuntimeError("a header has a line break or a NUL")


def _nothing(*_told: object) -> None:
    pass
