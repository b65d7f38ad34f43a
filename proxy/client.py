"""HTTP/1.1 to one server, over connections that are kept. Knows sockets and HTTP's framing; no route, no dialect.

One request at a time on each connection. Its errors are the proxy's own: this is the edge to the servers that answer.
"""

import asyncio
import socket
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from urllib.parse import urlsplit

import httptools

from proxy.errors import NotReached, UpstreamDown

CONNECT_TIMEOUT_S = 5.0
KEEPALIVE_S = 4.0
"""Idle connections are closed by us: vLLM closes them after 5 s, and a request on its way then would be lost."""
MAX_HEAD_BYTES = 64 * 2**10
"""Of an answer's headers."""
MOST_UNREAD_BYTES = 256 * 2**10
"""Of an answer that its app does not take in; beyond it the server has to wait."""
LOOK_EVERY_S = 1.0
"""How exactly connections are found to be silent or idle for too long."""
JOINED_BYTES = 64 * 2**10
"""A body up to this size goes out in one piece with its headers: copied sooner than written twice."""
TYPES_KEPT = 64
"""Content types that are known with their meaning: a server says the same few again and again."""
_PLAIN = (b"", b"identity")
"""Content encodings that are none."""


class Response:
    """An answer, its headers read. `with` gives it up: what was not read to its end closes the connection, and the
    server aborts."""

    __slots__ = (
        "_connection", "_error", "_framed", "_parts", "_size", "_waiter", "_whole", "begun", "done", "headers",
        "on_left", "server", "status",
    )  # fmt: skip

    def __init__(self, connection: "_Connection") -> None:
        self._connection: _Connection | None = connection
        self._error: UpstreamDown | None = None
        self._framed = False
        self._parts: list[bytes] = []
        self._size = 0
        self._waiter: asyncio.Future[None] | None = None
        self._whole = False
        self.begun = False
        """Its headers are there."""
        self.done = False
        """All of it is."""
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        """By their names in lower case; of one that comes twice the last."""
        self.server = connection.client.server
        """Host and port of who answers."""
        self.on_left: Callable[[bool], None] | None = None
        """Told once when it is given up: whether the server broke it off."""

    def __enter__(self) -> "Response":
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self.leave(broken=isinstance(error, UpstreamDown))

    @property
    def content_type(self) -> str:
        """What its body is, in lower case and without parameters."""
        return _without_parameters(self.headers.get(b"content-type", b""))

    @property
    def unread_bytes(self) -> int:
        """What has come of its body and was not taken in."""
        return self._size

    def leave(self, *, broken: bool = False) -> None:
        """Have done with it."""
        connection, self._connection = self._connection, None
        if connection is not None and not self.done:
            connection.drop()
        # Its traceback holds this response, and all that the call has on its stack.
        self._error = None
        told, self.on_left = self.on_left, None
        if told is not None:
            told(broken)

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

    async def next(self) -> bytes:
        """What has come of its body since the last time; nothing at its end.

        Raises:
            UpstreamDown: it was broken off.
        """
        while not self._parts:
            if self.done:
                return b""
            await self.news()
        parts, self._parts = self._parts, []
        self._size = 0
        if not self.done:
            self._go_on()
        return parts[0] if len(parts) == 1 else b"".join(parts)

    # For the connection.

    @property
    def any(self) -> bool:
        """Something of it has come."""
        return self.begun or bool(self.headers)

    def begin(self, status: int) -> None:
        self.status = status
        self.begun = True
        self._framed = b"content-length" in self.headers or b"transfer-encoding" in self.headers

    def heard(self, part: bytes) -> bool:
        """Keep a piece of the body; whether the next is to wait."""
        self._parts.append(part)
        self._size += len(part)
        return self._size > MOST_UNREAD_BYTES and not self._whole

    def end(self) -> None:
        self.done = True

    def broke(self, error: Exception | None) -> None:
        """The connection is gone. Without a length that is how an answer ends."""
        if self.begun and not self._framed and error is None:
            self.done = True
        elif not self.done:
            self._error = down(error or ConnectionResetError("it hung up"))
        self.wake()

    def wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def news(self) -> "asyncio.Future[None]":
        """To be awaited until more of it has come, or is known never to come.

        Raises:
            UpstreamDown: it was broken off.
        """
        if self._error is not None:
            raise self._error
        assert self._connection is not None
        self._waiter = self._connection.client.loop.create_future()
        return self._waiter

    def _go_on(self) -> None:
        if self._connection is not None:
            self._connection.go_on()


class Client:
    """Connections to one server, each kept for the next request. Made and used on one event loop."""

    def __init__(self, url: str, silence_timeout_s: float) -> None:
        """`url`: of the server, its path left out; `silence_timeout_s`: how long it may say nothing."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or not parts.netloc.isascii():
            raise ValueError(f"no http(s) URL, in ASCII: {url!r}")
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self.server = (parts.hostname, parts.port or (443 if self._tls else 80))
        """Host and port."""
        self.host = parts.netloc.rpartition("@")[2]
        """As its header says it."""
        self._silence_timeout_s = silence_timeout_s
        self.loop = asyncio.get_running_loop()
        self._idle: list[_Connection] = []
        """The one used last at the end: those that are not needed grow old at the front."""
        self._open: set[_Connection] = set()
        self._looking: asyncio.TimerHandle | None = None
        self._closed = False

    async def send(self, head: bytes, body: bytes = b"", *, repeatable: bool = False) -> Response:
        """Send a request and give its answer, headers read. `head`: its first line and headers, the empty line too.

        `repeatable`: it may be asked twice, where the server closed a kept connection just then.

        Raises:
            NotReached: nothing was sent.
            UpstreamDown: it hung up, was silent for too long, speaks no HTTP, or compresses its answer, to whatever
                size.
        """
        kept = self._kept()
        response = (kept or await self._connect()).ask(head, body)
        try:
            while not response.begun:
                await response.news()
        except UpstreamDown:
            response.leave()
            if not repeatable or kept is None or response.any:
                raise
            return await self.send(head, body, repeatable=True)
        except BaseException:
            response.leave()
            raise
        encoding = response.headers.get(b"content-encoding")
        if encoding is not None and encoding.lower() not in _PLAIN:
            response.leave()
            raise UpstreamDown("the model server compresses its answers, unasked; have it send them plain")
        return response

    def close(self) -> None:
        """Close every connection."""
        self._closed = True
        if self._looking is not None:
            self._looking.cancel()
        for connection in list(self._open):
            connection.drop()

    def _kept(self) -> "_Connection | None":
        while self._idle:
            connection = self._idle.pop()
            if time.monotonic() - connection.heard_s < KEEPALIVE_S and not connection.transport.is_closing():
                return connection
            connection.drop()
        return None

    async def _connect(self) -> "_Connection":
        if self._closed:
            raise down(ConnectionError("the proxy stops"), NotReached)
        connection = await self._reach()
        self._open.add(connection)
        if self._looking is None:
            self._looking = self.loop.call_later(LOOK_EVERY_S, self._look)
        return connection

    async def _reach(self) -> "_Connection":
        """Connect to the first of the host's addresses that answers: one that does not must not take all the time."""
        host, port = self.server
        name = host if self._tls else None
        error: Exception = OSError(f"{host} has no address")
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                found = await self.loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            for address in dict.fromkeys(str(one[4][0]) for one in found):
                try:
                    async with asyncio.timeout(CONNECT_TIMEOUT_S / len(found)):
                        _, connection = await self.loop.create_connection(
                            lambda: _Connection(self), address, port, ssl=self._tls, server_hostname=name
                        )
                        return connection
                except (OSError, TimeoutError) as failed:
                    error = failed
        except (OSError, TimeoutError, UnicodeError) as failed:
            error = failed
        raise down(error, NotReached) from error

    def keep(self, connection: "_Connection") -> None:
        self._idle.append(connection)

    def forget(self, connection: "_Connection") -> None:
        self._open.discard(connection)
        with suppress(ValueError):
            self._idle.remove(connection)

    def _look(self) -> None:
        """Give up on who is silent, hang up on who is idle."""
        self._looking = None
        now_s = time.monotonic()
        for connection in list(self._open):
            silent_s = now_s - connection.heard_s
            if connection.response is None:
                if silent_s >= KEEPALIVE_S:
                    connection.drop()
            elif not connection.paused and silent_s >= self._silence_timeout_s:
                connection.drop(TimeoutError(f"it said nothing for {self._silence_timeout_s:g} s"))
        if self._open and not self._closed:
            self._looking = self.loop.call_later(LOOK_EVERY_S, self._look)


class _Connection(asyncio.Protocol):
    """One connection, and the answer that comes on it."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.response: Response | None = None
        """What is being answered; None while it is idle."""
        self.heard_s = time.monotonic()
        """When it last said something, or was asked (monotonic)."""
        self.paused = False
        """The server waits until more is taken in."""
        self._parser = httptools.HttpResponseParser(self)
        self._head_bytes = 0
        self._unasked = False
        self._held = False
        """The server had to wait: it may have hung up behind its answer, unseen."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: asyncio.Transport = transport  # type: ignore[assignment]

    def ask(self, head: bytes, body: bytes) -> Response:
        response = self.response = Response(self)
        self.heard_s = time.monotonic()
        self._head_bytes = 0
        if len(body) <= JOINED_BYTES:
            self.transport.write(head + body)
        else:
            self.transport.writelines((head, body))
        return response

    def drop(self, error: Exception | None = None) -> None:
        """Hang up at once."""
        self.client.forget(self)
        response, self.response = self.response, None
        if response is not None and not response.done:
            response.broke(error or ConnectionAbortedError("we hung up"))
        self.transport.abort()

    def go_on(self) -> None:
        if self.paused:
            self.paused = False
            self.heard_s = time.monotonic()
            self.transport.resume_reading()

    # What comes.

    def data_received(self, data: bytes) -> None:
        response = self.response
        if response is None:  # nobody asked
            self.drop()
            return
        self.heard_s = time.monotonic()
        if not response.begun:
            self._head_bytes += len(data)
        fault: Exception | None = None
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            fault = error
        except httptools.HttpParserUpgrade:
            fault = ConnectionError("it speaks another protocol")
        if not response.begun and self._head_bytes > MAX_HEAD_BYTES:
            fault = ConnectionError(f"its headers are over {MAX_HEAD_BYTES} bytes")
        if fault is not None or self._unasked:
            self.drop(fault)
        # Also where what came behind a whole answer is none.
        response.wake()

    def connection_lost(self, error: Exception | None) -> None:
        self.client.forget(self)
        response, self.response = self.response, None
        if response is not None:
            response.broke(error)

    # What the parser finds.

    def on_message_begin(self) -> None:
        self._unasked = self.response is None

    def on_header(self, name: bytes, value: bytes) -> None:
        response = self.response
        if response is not None and not response.begun:
            response.headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if self.response is None:
            return
        if status < 200:  # something to expect, and then the answer
            self.response.headers.clear()
        else:
            self.response.begin(status)

    def on_body(self, body: bytes) -> None:
        if self.response is not None and self.response.heard(body) and not self.paused:
            self.paused = self._held = True
            self.transport.pause_reading()

    def on_message_complete(self) -> None:
        response = self.response
        if response is None or not response.begun:
            return
        response.end()
        self.response = None
        self.go_on()
        # vLLM's server closes a connection after an error of its own without saying so: nobody's request may go there.
        fit = self._parser.should_keep_alive() and response.status < 500 and not self.transport.is_closing()
        # Nor where the server has answered before it had read all of what it was asked.
        if fit and not self._held and not self.transport.get_write_buffer_size():
            self.client.keep(self)
        else:
            self.client.forget(self)
            self.transport.abort()


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
