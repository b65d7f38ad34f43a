"""HTTP/1.1 to one server, over connections that are kept. Knows sockets and HTTP's framing; no route, no dialect.

What comes of an answer its `Response` keeps.

One request at a time on each connection. Its errors are the proxy's own: this is the edge to the servers that answer.
"""

import asyncio
import math
import socket
import ssl
import time
from contextlib import suppress
from urllib.parse import urlsplit

import httptools

from proxy.client_response import Response, down
from proxy.errors import NotReached, UpstreamDown
from proxy.known_answer import KnownAnswer, learn
from proxy.outgoing import Outgoing

CONNECT_TIMEOUT_S = 5.0
KEEPALIVE_S = 4.0
"""Idle connections are closed by us: vLLM closes them after 5 s, and a request on its way then would be lost."""
MAX_HEAD_BYTES = 64 * 2**10
"""Of an answer's headers."""
LOOK_EVERY_S = 1.0
"""How exactly connections are found to be silent or idle for too long."""
JOINED_BYTES = 64 * 2**10
"""A body up to this size goes out in one piece with its headers: copied sooner than written twice."""
LEARN_EVERY_S = 1.0
"""At most; twice as long each time where the head learned before did not come again: a server's may never be alike."""
LAST_STATUS = 599
_PLAIN = (b"", b"identity")
"""Content encodings that are none."""


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
        self.idle: list[_Connection] = []
        """The one used last at the end: those that are not needed grow old at the front."""
        self.known: KnownAnswer | None = None
        """The head that its answers have, as far as they are whole and alike."""
        self.learns_s = -math.inf
        """When it may be learned again (monotonic)."""
        self._learns_every_s = LEARN_EVERY_S
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
        kept = self.begin(head, body)
        response = kept or await self.connect(head, body)
        try:
            while not response.status:
                await response.news()
        except UpstreamDown:
            response.leave()
            if not repeatable or kept is None or response.any:
                raise
            return await self.send(head, body, repeatable=True)
        except BaseException:
            response.leave()
            raise
        return response

    def begin(self, head: bytes, body: bytes) -> Response | None:
        """Send a request on a connection that was kept: its answer, of which nothing has come; None: none is kept."""
        while self.idle:
            connection = self.idle.pop()
            now_s = time.monotonic()
            if now_s - connection.heard_s < KEEPALIVE_S and not connection.transport.is_closing():
                return connection.ask(head, body, now_s)
            connection.drop()
        return None

    async def connect(self, head: bytes, body: bytes) -> Response:
        """Send a request on a new connection: its answer, of which nothing has come.

        Raises:
            NotReached: nothing was sent.
        """
        return (await self._connect()).ask(head, body, time.monotonic())

    def learn(self, data: bytes, response: Response, now_s: float) -> None:
        """Know the next answers by the head of this one: all of `data`, behind which its connection was kept."""
        if now_s >= self.learns_s:
            known = self.known
            self._learns_every_s = LEARN_EVERY_S if known is None or known.came_again else 2 * self._learns_every_s
            self.learns_s = now_s + self._learns_every_s
            self.known = learn(data, response.headers, response.content_type) or known

    def close(self) -> None:
        """Close every connection."""
        self._closed = True
        if self._looking is not None:
            self._looking.cancel()
        for connection in list(self._open):
            connection.drop()

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

    def forget(self, connection: "_Connection") -> None:
        self._open.discard(connection)
        with suppress(ValueError):
            self.idle.remove(connection)

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
        self.server, self.loop = client.server, client.loop
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
        self.transport = Outgoing(transport, self.loop)  # type: ignore[arg-type]
        self._outbox = self.transport.outbox

    def ask(self, head: bytes, body: bytes, now_s: float) -> Response:
        response = self.response = Response(self)
        self.heard_s = now_s
        self._head_bytes = 0
        if len(body) <= JOINED_BYTES:
            self.transport.write(head + body)
        else:
            self.transport.write(head)
            self.transport.write(body)
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
        self._outbox.read()
        response = self.response
        if response is None:  # nobody asked
            self.drop()
            return
        self.heard_s = time.monotonic()
        begins = not self._head_bytes
        if begins and (known := self.client.known) is not None and (body := known.body(data)) is not None:
            self._over(True)
            response.came(known, body)
            return
        if not response.status:
            self._head_bytes += len(data)
        fault: Exception | None = None
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            fault = error
        except httptools.HttpParserUpgrade:
            fault = ConnectionError("it speaks another protocol")
        if not response.status and self._head_bytes > MAX_HEAD_BYTES:
            fault = ConnectionError(f"its headers are over {MAX_HEAD_BYTES} bytes")
        if fault is not None or self._unasked:
            self.drop(fault)
        elif begins and response.done and response.status == 200 and self in self.client.idle[-1:]:
            self.client.learn(data, response, self.heard_s)
        # Also where what came behind a whole answer is none.
        response.tell()

    def connection_lost(self, error: Exception | None) -> None:
        self.client.forget(self)
        response, self.response = self.response, None
        if response is not None:
            response.broke(error)

    def _over(self, stays: bool) -> None:
        """The answer is whole: keep the connection, where it `stays` and may be used again."""
        self.response, transport = None, self.transport
        # Not where the server has answered before it had read all of what it was asked.
        if stays and not (self._held or transport.is_closing() or transport.get_write_buffer_size()):
            self.client.idle.append(self)
        else:
            self.client.forget(self)
            transport.abort()

    # What the parser finds.

    def on_message_begin(self) -> None:
        self._unasked = self.response is None

    def on_header(self, name: bytes, value: bytes) -> None:
        response = self.response
        if response is not None and not response.status:
            response.headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        status, response = self._parser.get_status_code(), self.response
        if response is None:
            return
        if status < 200:  # something to expect, and then the answer
            response.headers.clear()
            return
        encoding = response.headers.get(b"content-encoding")
        if encoding is not None and encoding.lower() not in _PLAIN:
            told = "the model server compresses its answers, unasked; have it send them plain"
            response.fails(UpstreamDown(told))
        elif status > LAST_STATUS:
            response.fails(UpstreamDown(f"the model server answers with the status {status}, which HTTP does not have"))
        else:
            response.begins(status)

    def on_body(self, body: bytes) -> None:
        if self.response is not None and self.response.heard(body) and not self.paused:
            self.paused = self._held = True
            self.transport.pause_reading()

    def on_message_complete(self) -> None:
        response = self.response
        if response is None or not response.status:
            return
        response.done = True
        if self.paused:
            self.go_on()
        # vLLM's server closes a connection after an error of its own without saying so: nobody's request may go there.
        self._over(self._parser.should_keep_alive() and response.status < 500)
