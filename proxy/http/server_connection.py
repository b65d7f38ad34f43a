"""Serve one client connection within limits: on a request's size, on its duration, and on clients that do not read.

It extends uvicorn's own protocol with the limits that uvicorn lacks.
"""

import asyncio
import contextvars
import time
from collections import deque
from functools import lru_cache
from typing import Any
from urllib.parse import unquote

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from proxy.errors import HeadersTooLarge, HeadersTooSlow, NotHttp, ProxyError, TooManyConnections, UrlTooLong
from proxy.http.request_cycle import RequestCycle
from proxy.http.write_batching import BatchedTransport
from whetstone.config.proxy import ProxySettings

MOST_PIPELINED = 16
"""Most requests that a client may send before it has read its answers."""
MOST_URLS = 64
"""Number of URLs cached with their parts: an app requests the same few again and again."""


class Connection(HttpToolsProtocol):
    """A client's connection, created by uvicorn. `look` is called periodically, `give_up` at the end."""

    def __init__(self, limits: ProxySettings, **values: Any) -> None:
        super().__init__(**values)
        self._limits = limits
        self._answered: RequestCycle | None = None
        """The request that is being answered, or was last."""
        self._waiting: deque[RequestCycle] = deque()
        """Pipelined requests, sent before that answer."""
        self._again: bytes | None = None
        """The head of a request that is parsed once more."""
        self._latest: RequestCycle | None = None
        """The request that came last."""
        self._unclaimed = 0
        """Bytes since the last useful byte. They can only be a request's headers, or the framing around its body."""
        self._came = 0
        """Size of the data that came last."""
        self._head_bytes = 0
        """Bytes since a request's headers began, with what came before them in the same read: an upper bound on their
        size."""
        self._begun = False
        """A request's headers have started to arrive and are not complete."""
        self._heads_since_s: float | None = None
        """When the headers that are due began to arrive (monotonic). None while a request is served, or if nothing has
        come since the last one."""
        self._answered_s = 0.0
        """When the last answer was sent (monotonic)."""
        self._unread = 0
        """Bytes of answers that the client had not read at the last look."""
        self._read_at_s = 0.0
        """When the client was last seen to read, or had nothing to read (monotonic)."""

    def serving(self) -> bool:
        """Return whether a request is being answered."""
        return self._answered is not None and not self._answered.response_complete

    @property
    def idle(self) -> bool:
        """Whether the last request is answered and nothing has come since."""
        return self._answered is not None and self._answered.response_complete and not self._begun

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.transport: BatchedTransport = BatchedTransport(transport, self.loop)
        self._outbox = self.transport.outbox
        self._scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": self.asgi_version, "spec_version": "2.3"},
            "server": self.server,
            "client": self.client,
            "scheme": self.scheme,
            "root_path": "",
        }
        """What the scopes of all its requests have in common."""
        self._heads_since_s = time.monotonic()
        if len(self.connections) > self._limits.max_connections:
            self._make_room()

    def data_received(self, data: bytes) -> None:
        self._outbox.read()
        self._came = size = len(data)
        self._unclaimed += size
        self._head_bytes += size
        try:
            self._feed(data)
        except httptools.HttpParserError as error:
            why = error.__context__  # what one of the parser's callbacks raised
            if not isinstance(why, ProxyError):
                why = NotHttp("this is no HTTP/1.1 request that can be read; check the client")
            self._refuse(why)
        if self.transport.is_closing():
            return
        if self._unclaimed > self._limits.max_header_bytes + self._limits.max_url_bytes:
            self._refuse(_headers_too_large(self._limits))
        elif self._heads_since_s is None and not self.serving():
            self._heads_since_s = time.monotonic()

    def eof_received(self) -> None:
        # The transport then closes itself.
        self.transport.flush()

    def connection_lost(self, error: Exception | None) -> None:
        self.connections.discard(self)
        if self._answered is not None:
            self._answered.lost()
        for exchange in self._waiting:
            exchange.forget()
        self.flow.resume_writing()
        self.transport.close()
        self.parser = None  # type: ignore[assignment]

    def _feed(self, data: bytes) -> None:
        """Feed the parser. It declines an offer to switch protocols (RFC 9110, 7.8): the parser would read what follows
        as that protocol, so the request is parsed once more without the offer.

        Raises:
            HttpParserError: it is not an HTTP/1.1 request.
        """
        while True:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as stopped:
                head, self._again = self._again or b"", None
                self.parser = httptools.HttpRequestParser(self)
                # As uvicorn does: answer what was sent after a request that ends the connection.
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
                data = head + data[stopped.args[0] :]

    def on_message_begin(self) -> None:
        self._begun = True
        self._head_bytes = self._came
        self.url = b""
        self.expect_100_continue = False
        self.headers = []

    def on_headers_complete(self) -> None:
        limits = self._limits
        if self.parser.should_upgrade():
            if self.parser.get_method() == b"CONNECT":
                raise NotHttp("there are no tunnels here")
            first = (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
            lines = (b"%b: %b\r\n" % header for header in self.headers if header[0] != b"upgrade")
            self._again = b"".join((b"%b %b HTTP/%b\r\n" % first, *lines, b"\r\n"))
            return
        if len(self.url) > limits.max_url_bytes:
            raise UrlTooLong(f"the URL is over {limits.max_url_bytes} bytes (setting proxy.max_url_bytes)")
        if len(self.headers) > limits.max_headers or (
            self._head_bytes > limits.max_header_bytes
            and sum(len(name) + len(value) for name, value in self.headers) > limits.max_header_bytes
        ):
            raise _headers_too_large(limits)
        if len(self._waiting) >= MOST_PIPELINED:
            raise NotHttp(f"more than {MOST_PIPELINED} requests were sent ahead; read the answers first")
        version = self.parser.get_http_version()
        # With two Host headers, one could pass the check while a proxy before us used the other (RFC 9112, 3.2).
        hosts = [name for name, _ in self.headers].count(b"host")
        if hosts > 1 or (hosts == 0 and version != "1.0"):
            raise NotHttp(f"a request needs one Host header, this one has {hosts}; check the client")
        scope = self._scope.copy()
        scope["path"], scope["raw_path"], scope["query_string"] = _parts_of(self.url)
        scope["http_version"] = version
        scope["method"] = self.parser.get_method().decode("ascii")
        scope["headers"] = self.headers
        scope["state"] = {}
        self._latest = exchange = RequestCycle(
            scope,
            self.transport,
            self.flow,
            self.server_state.default_headers,
            self.on_response_complete,
            version != "1.0" and self.parser.should_keep_alive(),
            self.expect_100_continue and version != "1.0",
        )
        if self.serving():
            self._waiting.append(exchange)
            # Not earlier: while reading is paused, a disconnect goes unnoticed.
            if len(self._waiting) > MOST_PIPELINED // 2:
                self.flow.pause_reading()
        else:
            self._start(exchange)
        # Trailers after a body must not pass as headers, and the scope shares this list with the parser.
        self.headers = []
        self._unclaimed, self._begun = 0, False
        self._heads_since_s = None

    def _start(self, exchange: RequestCycle) -> None:
        self._answered = exchange
        # In a context of its own, because a pipelined request starts inside the request before it. A fixed name saves
        # making one for each task.
        task = exchange.task = asyncio.Task(
            exchange.run(self.app), loop=self.loop, name="request", context=contextvars.Context()
        )
        self.tasks.add(task)
        # Not as a callback of the task: that would cost another iteration of the event loop.
        exchange.on_end = self.tasks.discard

    def on_body(self, body: bytes) -> None:
        self._unclaimed = 0
        if self._latest is not None and not self._latest.response_complete:
            self._latest.feed_body(body)

    def on_message_complete(self) -> None:
        if self._again is None and self._latest is not None and not self._latest.response_complete:
            self._latest.end()

    def on_response_complete(self) -> None:
        self.server_state.total_requests += 1
        self._answered_s = time.monotonic()
        if not self.transport.is_closing():
            if self.flow.read_paused:
                self.flow.resume_reading()
            if self._waiting:
                self._start(self._waiting.popleft())
        if self._begun and not self.serving():
            self._heads_since_s = self._answered_s

    def shutdown(self) -> None:
        """Close the connection when the server stops: now, or after the current answer."""
        if self._answered is None or self._answered.response_complete:
            self.transport.close()
        else:
            for exchange in (self._answered, *self._waiting):
                exchange.keep_alive = False

    def look(self, now_s: float) -> None:
        """Drop a client that is too slow to send its request or to read its answer. Seconds are monotonic."""
        unread = self.transport.get_write_buffer_size()
        if not self._unread or unread < self._unread:
            self._read_at_s = now_s
        self._unread = unread
        limits = self._limits
        if unread and now_s - self._read_at_s > limits.write_timeout_s:
            self.transport.abort()
        elif self._heads_since_s is not None and now_s - self._heads_since_s > limits.headers_timeout_s:
            if self._begun:
                self._refuse(
                    HeadersTooSlow(
                        f"the request's headers were not there after {limits.headers_timeout_s:g} s (setting "
                        "proxy.headers_timeout_s)"
                    )
                )
            else:
                self.transport.close()
        elif self.idle and now_s - self._answered_s > limits.keep_alive_s:
            self.transport.close()

    def give_up(self) -> None:
        """Close now, even during an answer: the app sees that its answer broke off."""
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            self.transport.close()

    def _make_room(self) -> None:
        """Close the connection that was idle for longest. If none is idle, refuse this one."""
        idle = [
            one
            for one in self.connections
            if isinstance(one, Connection) and one.idle and not one.transport.is_closing()
        ]
        if idle:
            min(idle, key=lambda one: one._answered_s).transport.close()
        else:
            most = self._limits.max_connections
            self._refuse(TooManyConnections(f"over {most} connections (setting proxy.max_connections); try again soon"))

    def _refuse(self, error: ProxyError) -> None:
        """Send the error and hang up. If a request is being served, an error in what follows it only closes the
        connection."""
        if not self.serving() and not self.transport.is_closing():
            body = error.body()
            headers = [*self.server_state.default_headers, *error.headers(), (b"content-length", b"%d" % len(body))]
            head = b"".join([STATUS_LINE[error.status], *(b"%s: %s\r\n" % header for header in headers)])
            self.transport.write(head + b"\r\n" + body)
        self.transport.close()


@lru_cache(MOST_URLS)
def _parts_of(url: bytes) -> tuple[str, bytes, bytes]:
    """Return a URL's path, its path as it came, and its query.

    Raises:
        HttpParserError: it is not a URL.
    """
    parsed = httptools.parse_url(url)
    path = parsed.path.decode("ascii")
    return unquote(path) if "%" in path else path, parsed.path, parsed.query or b""


def _headers_too_large(limits: ProxySettings) -> HeadersTooLarge:
    return HeadersTooLarge(
        f"the headers are over {limits.max_headers} or over {limits.max_header_bytes} bytes (settings "
        "proxy.max_headers, proxy.max_header_bytes)"
    )
