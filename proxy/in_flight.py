"""How much is served at once: so many requests, so many bytes of theirs, none encoded. Knows no route, no key."""

from collections.abc import MutableMapping
from typing import Any

from proxy.asgi import EXCHANGE, Exchanged, Receive, Routes, Scope, Send, exchange_of, headers_of
from proxy.errors import Busy, Encoded
from whetstone.serving import ProxySettings

READS = frozenset({"GET", "HEAD", "OPTIONS"})
"""Methods without a body that anybody reads: what asks how the proxy is must pass when nothing else does."""


class InFlight:
    """Counts what is in flight. Used from one event loop."""

    def __init__(self, settings: ProxySettings) -> None:
        self._most, self._most_bytes = settings.max_in_flight, settings.max_in_flight_bytes
        self.requests = 0
        self.bytes = 0
        """Of their bodies, as far as they came."""

    async def serve(self, app: Routes, scope: Scope, receive: Receive, send: Send) -> None:
        """Have a request served, counted while that lasts.

        Raises:
            Encoded: its body would have to be decompressed, to whatever size.
            Busy: too many are in flight; so does reading, where their bodies are too long together.
        """
        if scope["method"] in READS:
            await app(scope, receive, send)
            return
        if b"content-encoding" in headers_of(scope):
            _check_encoding(scope)
        if self.requests >= self._most:
            raise Busy(f"{self._most} requests are in flight (setting proxy.max_in_flight); try again soon")
        exchange = exchange_of(scope)
        # Of a body that is there already nothing more will come.
        whole = None if exchange is None else exchange.whole_bytes()
        self.requests += 1
        try:
            if whole is None:
                await self._serve_coming(app, scope, receive, send)
            else:
                try:
                    self.take(whole)
                    await app(scope, receive, send)
                finally:
                    self.bytes -= whole
        finally:
            self.requests -= 1

    def enter(self, scope: Scope) -> int | None:
        """Count a plain request (`is_plain`), as nearly all are, whose body is there, and for which there is room: its
        size, until `leave`. None: it is not counted, and is to be served by `serve`, which also tells why not."""
        exchange: Exchanged | None = scope.get(EXCHANGE)
        size = None if exchange is None else exchange.whole_bytes()
        if size is None or self.requests >= self._most or self.bytes + size > self._most_bytes:
            return None
        self.requests += 1
        self.bytes += size
        return size

    def leave(self, size: int) -> None:
        """The request that entered with this size is over."""
        self.requests -= 1
        self.bytes -= size

    def take(self, size: int) -> None:
        """Count so much of a body.

        Raises:
            Busy: that is too much, together; it counts all the same, until its request is over.
        """
        self.bytes += size
        if size and self.bytes > self._most_bytes:
            told = f"the bodies of all requests are over {self._most_bytes} bytes"
            raise Busy(f"{told} (setting proxy.max_in_flight_bytes); try again soon")

    async def _serve_coming(self, app: Routes, scope: Scope, receive: Receive, send: Send) -> None:
        """Have a request served whose body is counted as it comes."""
        counted = _Counted(self, receive)
        try:
            await app(scope, counted.receive, send)
        finally:
            self.bytes -= counted.held


class _Counted:
    """A request's body, as far as it came."""

    __slots__ = ("_all", "_receive", "held")

    def __init__(self, all_: InFlight, receive: Receive) -> None:
        self._all, self._receive = all_, receive
        self.held = 0

    async def receive(self) -> MutableMapping[str, Any]:
        message = await self._receive()
        size = len(message.get("body", b""))
        self.held += size
        self._all.take(size)
        return message


def is_plain(scope: Scope) -> bool:
    """Whether a request is one that has a body, and none that would have to be decoded: its head tells."""
    return scope["method"] not in READS and b"content-encoding" not in headers_of(scope)


def _check_encoding(scope: Scope) -> None:
    encoding = headers_of(scope).get(b"content-encoding", b"").strip().lower()
    if encoding not in (b"", b"identity"):
        told = encoding.decode("latin-1")[:100]
        raise Encoded(f"a body in the encoding {told!r} is not read; send it as it is", param="content-encoding")
