"""Send HTTP/1.1 requests to one server over a pool of reused connections.

A connection carries one request at a time; a `Response` holds the answer. This is the edge to the model servers, so
errors are translated here into the proxy's own.
"""

import asyncio
import socket
import ssl
import time
from contextlib import suppress
from urllib.parse import urlsplit

import httptools

from proxy.errors import NotReached, UpstreamDown
from proxy.http.client_response import Response, down
from proxy.http.write_batching import BatchedTransport

CONNECT_TIMEOUT_S = 5.0
KEEPALIVE_S = 4.0
"""Seconds after which we close idle connections. vLLM closes them after 5 s, and a request already on its way would be
lost."""
MAX_HEAD_BYTES = 64 * 2**10
"""Largest size of an answer's headers."""
LOOK_EVERY_S = 1.0
"""Interval, in seconds, between checks for connections that were silent or idle for too long."""
JOINED_BYTES = 64 * 2**10
"""A body up to this size goes out in one piece with its headers: copying it is faster than writing twice."""
LAST_STATUS = 599
_PLAIN = (b"", b"identity")
"""Content encodings that leave the body unchanged."""


class Client:
    """A pool of connections to one server, reused between requests. Create and use it on one event loop."""

    def __init__(self, url: str, silence_timeout_s: float) -> None:
        """`url` is the server's; its path is ignored. `silence_timeout_s`: how long the server may send nothing."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or not parts.netloc.isascii():
            raise ValueError(f"no http(s) URL, in ASCII: {url!r}")
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self.server = (parts.hostname, parts.port or (443 if self._tls else 80))
        """Host and port."""
        self.host = parts.netloc.rpartition("@")[2]
        """The value of the Host header."""
        self._silence_timeout_s = silence_timeout_s
        self.loop = asyncio.get_running_loop()
        self.idle: list[Connection] = []
        """The connection used last stands at the end, so unneeded connections age at the front."""
        self._open: set[Connection] = set()
        self._looking: asyncio.TimerHandle | None = None
        self._closed = False

    async def send(self, head: bytes, body: bytes = b"", *, repeatable: bool = False) -> Response:
        """Send a request and return its answer once the headers have arrived. `head`: request line, headers, empty
        line.

        `repeatable`: the request may be sent twice, in case the server closes a reused connection at that moment.

        Raises:
            NotReached: nothing was sent.
            UpstreamDown: the server hung up, was silent for too long, does not answer in HTTP, or compresses its
                answer, so that its size has no bound.
        """
        reused = self.begin(head, body)
        response = reused or await self.connect(head, body)
        try:
            while not response.status:
                await response.wait_more()
        except UpstreamDown:
            response.release()
            if not repeatable or reused is None or response.status or response.headers:
                raise
            return await self.send(head, body, repeatable=True)
        except BaseException:
            response.release()
            raise
        return response

    def begin(self, head: bytes, body: bytes) -> Response | None:
        """Send a request on an idle connection. Return its answer, still empty, or None if no connection is idle."""
        while self.idle:
            connection = self.idle.pop()
            now_s = time.monotonic()
            if now_s - connection.active_s < KEEPALIVE_S and not connection.transport.is_closing():
                return connection.ask(head, body, now_s)
            connection.drop()
        return None

    async def connect(self, head: bytes, body: bytes) -> Response:
        """Send a request on a new connection. Return its answer, still empty.

        Raises:
            NotReached: nothing was sent.
        """
        if self._closed:
            raise down(ConnectionError("the proxy stops"), NotReached)
        connection = await self._reach()
        self._open.add(connection)
        if self._looking is None:
            self._looking = self.loop.call_later(LOOK_EVERY_S, self._look)
        return connection.ask(head, body, time.monotonic())

    def close(self) -> None:
        """Close every connection."""
        self._closed = True
        if self._looking is not None:
            self._looking.cancel()
        for connection in list(self._open):
            connection.drop()

    async def _reach(self) -> "Connection":
        """Connect to the first address of the host that answers. One that does not answer may not use up all of the
        time."""
        host, port = self.server
        error: Exception = OSError(f"{host} has no address")
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                addresses = await self.loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            for address in dict.fromkeys(str(one[4][0]) for one in addresses):
                try:
                    async with asyncio.timeout(CONNECT_TIMEOUT_S / len(addresses)):
                        _, connection = await self.loop.create_connection(
                            lambda: Connection(self),
                            address,
                            port,
                            ssl=self._tls,
                            server_hostname=host if self._tls else None,
                        )
                        return connection
                except (OSError, TimeoutError) as failed:
                    error = failed
        except (OSError, TimeoutError, UnicodeError) as failed:
            error = failed
        raise down(error, NotReached) from error

    def forget(self, connection: "Connection") -> None:
        self._open.discard(connection)
        with suppress(ValueError):
            self.idle.remove(connection)

    def _look(self) -> None:
        """Drop connections whose server is silent, and close idle ones."""
        self._looking = None
        now_s = time.monotonic()
        for connection in list(self._open):
            silent_s = now_s - connection.active_s
            if connection.response is None:
                if silent_s >= KEEPALIVE_S:
                    connection.drop()
            elif not connection.paused and silent_s >= self._silence_timeout_s:
                connection.drop(TimeoutError(f"it was silent for {self._silence_timeout_s:g} s"))
        if self._open and not self._closed:
            self._looking = self.loop.call_later(LOOK_EVERY_S, self._look)


class Connection(asyncio.Protocol):
    """One connection, and the answer that comes on it."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.server, self.loop = client.server, client.loop
        self.response: Response | None = None
        """The answer in progress; None while the connection is idle."""
        self.active_s = time.monotonic()
        """When the server last sent something, or a request was sent to it (monotonic)."""
        self.paused = False
        """Reading is paused, so the server waits until more is consumed."""
        self._parser = httptools.HttpResponseParser(self)
        self._head_bytes = 0
        self._unasked = False
        self._was_paused = False
        """Reading was paused during this answer: the server may have closed the connection after it without our
        noticing."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = BatchedTransport(transport, self.loop)  # type: ignore[arg-type]
        self._outbox = self.transport.outbox

    def ask(self, head: bytes, body: bytes, now_s: float) -> Response:
        response = self.response = Response(self)
        self.active_s = now_s
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
            self.active_s = time.monotonic()
            self.transport.resume_reading()

    # Called by the transport.

    def data_received(self, data: bytes) -> None:
        self._outbox.read()
        response = self.response
        if response is None:  # no request is in progress
            self.drop()
            return
        self.active_s = time.monotonic()
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
        # Wake it even when invalid data follows a whole answer.
        response.tell()

    def connection_lost(self, error: Exception | None) -> None:
        self.client.forget(self)
        response, self.response = self.response, None
        if response is not None:
            response.broke(error)

    # Called by the parser.

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
        if status < 200:  # informational; the final answer follows
            response.headers.clear()
            return
        encoding = response.headers.get(b"content-encoding")
        if encoding is not None and encoding.lower() not in _PLAIN:
            response.fails(
                UpstreamDown("the model server compresses its answers without being asked to; turn its compression off")
            )
        elif status > LAST_STATUS:
            response.fails(UpstreamDown(f"the model server answers with the status {status}, which HTTP does not have"))
        else:
            response.begins(status)

    def on_body(self, body: bytes) -> None:
        if self.response is not None and self.response.add_body(body) and not self.paused:
            self.paused = self._was_paused = True
            self.transport.pause_reading()

    def on_message_complete(self) -> None:
        response = self.response
        if response is None or not response.status:
            return
        response.done = True
        if self.paused:
            self.go_on()
        self.response, transport = None, self.transport
        # vLLM closes a connection after one of its own errors without announcing it, so it must not be reused. Neither
        # may one be whose server answered before it had read the whole request.
        stays = self._parser.should_keep_alive() and response.status < 500
        if stays and not (self._was_paused or transport.is_closing() or transport.get_write_buffer_size()):
            self.client.idle.append(self)
        else:
            self.client.forget(self)
            transport.abort()
