"""One connection to a client, bounded: how much of a request may come, how long that may take, and who reads nothing.

uvicorn's own protocol with what it leaves open. Knows HTTP's outside and the clock; no route, no body.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from proxy.errors import HeadersTooLarge, HeadersTooSlow, NotHttp, ProxyError, TooManyConnections, UrlTooLong
from whetstone.settings import ProxySettings

MOST_PIPELINED = 16
"""Requests that a client may send before it has read its answers."""


def connections(limits: ProxySettings) -> Callable[..., "Connection"]:
    """What makes connections with these limits, for uvicorn."""

    def connect(**values: Any) -> Connection:
        return Connection(limits, **values)

    return connect


class Connection(HttpToolsProtocol):
    """uvicorn makes one for each client; `look` is called again and again, `give_up` at the end."""

    def __init__(self, limits: ProxySettings, **values: Any) -> None:
        super().__init__(**values)
        self._limits = limits
        self._refusal: ProxyError | None = None
        """Why the parser was stopped."""
        self._unclaimed = 0
        """Bytes since the last that were of use: a request's headers, or what stands around its body."""
        self._begun = False
        """A request's headers have begun to come and are not whole."""
        self._heads_since_s: float | None = None
        """When the headers that are due began to come (monotonic); None while a request is served, or nothing came
        since the last."""
        self._answered_s = 0.0
        """When the last answer was out (monotonic)."""
        self._unread = 0
        """Bytes of answers that the client had not taken in at the last look."""
        self._read_at_s = 0.0
        """When it was last seen to take some in (monotonic)."""

    @property
    def serving(self) -> bool:
        """A request is being answered."""
        return self.cycle is not None and not self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._heads_since_s = time.monotonic()
        if len(self.connections) > self._limits.max_connections:
            self._make_room()

    def data_received(self, data: bytes) -> None:
        self._unclaimed += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._unclaimed > self._limits.max_header_bytes + self._limits.max_url_bytes:
            self._refuse(_headers_too_large(self._limits))
        elif self._heads_since_s is None and not self.serving:
            self._heads_since_s = time.monotonic()

    def on_message_begin(self) -> None:
        self._begun = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        limits = self._limits
        if len(self.url) > limits.max_url_bytes:
            self._stop(UrlTooLong(f"the URL is over {limits.max_url_bytes} bytes (setting proxy.max_url_bytes)"))
        size = sum(len(name) + len(value) for name, value in self.headers)
        if len(self.headers) > limits.max_headers or size > limits.max_header_bytes:
            self._stop(_headers_too_large(limits))
        if len(self.pipeline) >= MOST_PIPELINED:
            self._stop(NotHttp(f"more than {MOST_PIPELINED} requests were sent ahead; read the answers first"))
        super().on_headers_complete()
        # What comes as trailers after a body must not pass as headers, which the scope shares with the parser.
        self.headers = []
        self._unclaimed, self._begun = 0, False
        self._heads_since_s = None

    def on_body(self, body: bytes) -> None:
        self._unclaimed = 0
        super().on_body(body)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._answered_s = time.monotonic()
        if self._begun and not self.serving:
            self._heads_since_s = self._answered_s

    def send_400_response(self, msg: str) -> None:
        """What uvicorn calls when the parser has stopped."""
        self._refuse(self._refusal or NotHttp("this is no HTTP/1.1 request that can be read; check the client"))

    def look(self, now_s: float) -> None:
        """Give up on a client that is too slow: in asking, or in taking in its answer. Seconds are monotonic."""
        unread = self.transport.get_write_buffer_size()
        if not unread or unread < self._unread:
            self._read_at_s = now_s
        self._unread = unread
        limits = self._limits
        if unread and now_s - self._read_at_s > limits.write_timeout_s:
            self.transport.abort()
        elif self._heads_since_s is not None and now_s - self._heads_since_s > limits.headers_timeout_s:
            if self._begun:
                after = f"after {limits.headers_timeout_s:g} s (setting proxy.headers_timeout_s)"
                self._refuse(HeadersTooSlow(f"the request's headers were not there {after}"))
            else:
                self.transport.close()

    def give_up(self) -> None:
        """End it now, whatever is being said: an app sees that its answer broke off."""
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            self.transport.close()

    def _make_room(self) -> None:
        """Hang up on who has asked nothing for longest; where nobody is idle, on this one."""
        idle = [
            one
            for one in self.connections
            if isinstance(one, Connection) and one.timeout_keep_alive_task and not one.transport.is_closing()
        ]
        if idle:
            min(idle, key=lambda one: one._answered_s).transport.close()
        else:
            most = f"over {self._limits.max_connections} connections (setting proxy.max_connections); try again soon"
            self._refuse(TooManyConnections(most))

    def _stop(self, refusal: ProxyError) -> None:
        """Stop the parser, from within."""
        self._refusal = refusal
        raise refusal

    def _refuse(self, error: ProxyError) -> None:
        """Answer, and hang up. What is wrong behind a request that is being served only ends the connection."""
        if not self.serving and not self.transport.is_closing():
            body = error.body()
            headers = [*self.server_state.default_headers, *error.headers(), (b"content-length", b"%d" % len(body))]
            lines = [b"%s: %s\r\n" % header for header in headers]
            self.transport.write(b"".join([STATUS_LINE[error.status], *lines, b"\r\n", body]))
        self.transport.close()


def _headers_too_large(limits: ProxySettings) -> HeadersTooLarge:
    return HeadersTooLarge(
        f"the headers are over {limits.max_headers} or over {limits.max_header_bytes} bytes (settings "
        "proxy.max_headers, proxy.max_header_bytes)"
    )
