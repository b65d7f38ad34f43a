"""Limit how many requests, and how many bytes of their bodies, are in flight. Refuse encoded bodies."""

from collections.abc import Mapping, MutableMapping
from typing import Any

from proxy.errors import Busy, UnsupportedEncoding
from proxy.http.asgi import EXCHANGE, Receive, RequestAccess, Routes, Scope, Send, exchange_of, headers_of
from whetstone.config.proxy import ProxySettings

READS = frozenset({"GET", "HEAD", "OPTIONS"})
"""Methods whose bodies are not read. They are not limited, as health checks must pass when nothing else does."""


class ConcurrencyLimit:
    """Counts what is in flight. Used from one event loop."""

    def __init__(self, settings: ProxySettings) -> None:
        self._most, self._most_bytes = settings.max_in_flight, settings.max_in_flight_bytes
        self.requests = 0
        self.bytes = 0
        """Bytes of their bodies, as far as they have arrived."""

    async def serve(self, app: Routes, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request, and count it until it ends.

        Raises:
            UnsupportedEncoding: its body would have to be decompressed, with no bound on its size.
            Busy: too many requests are in flight. Reading the body raises it too, if all bodies together are too long.
        """
        if scope["method"] in READS:
            await app(scope, receive, send)
            return
        if b"content-encoding" in headers_of(scope):
            _check_encoding(scope)
        if self.requests >= self._most:
            raise Busy(f"{self._most} requests are in flight (setting proxy.max_in_flight); try again soon")
        exchange = exchange_of(scope)
        # A body that has already arrived will not grow.
        whole = None if exchange is None else exchange.whole_bytes()
        self.requests += 1
        try:
            if whole is None:
                await self._serve_coming(app, scope, receive, send)
            else:
                try:
                    self.add_bytes(whole)
                    await app(scope, receive, send)
                finally:
                    self.bytes -= whole
        finally:
            self.requests -= 1

    def try_acquire(self, scope: Scope, headers: Mapping[bytes, bytes]) -> int | None:
        """Count a plain request, as nearly all are: its body has arrived, is not encoded, and there is room for it.
        Return the body's size; pass it to `release`. None: it is not counted; call `serve`, which raises if there is no
        room."""
        if scope["method"] in READS or b"content-encoding" in headers:
            return None
        exchange: RequestAccess | None = scope.get(EXCHANGE)
        size = None if exchange is None else exchange.whole_bytes()
        if size is None or self.requests >= self._most or self.bytes + size > self._most_bytes:
            return None
        self.requests += 1
        self.bytes += size
        return size

    def release(self, size: int) -> None:
        """Stop counting a request whose body has this size."""
        self.requests -= 1
        self.bytes -= size

    def add_bytes(self, size: int) -> None:
        """Count this many bytes of a body.

        Raises:
            Busy: the total is too large. The bytes still count until their request is over.
        """
        self.bytes += size
        if size and self.bytes > self._most_bytes:
            limit = f"{self._most_bytes} bytes (setting proxy.max_in_flight_bytes)"
            raise Busy(f"the bodies of all requests are over {limit}; try again soon")

    async def _serve_coming(self, app: Routes, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request, and count its body as it arrives."""
        counted = _BodyCounter(self, receive)
        try:
            await app(scope, counted.receive, send)
        finally:
            self.bytes -= counted.counted_bytes


class _BodyCounter:
    """Counts a request's body as it arrives."""

    __slots__ = ("_all", "_receive", "counted_bytes")

    def __init__(self, all_: ConcurrencyLimit, receive: Receive) -> None:
        self._all, self._receive = all_, receive
        self.counted_bytes = 0

    async def receive(self) -> MutableMapping[str, Any]:
        message = await self._receive()
        size = len(message.get("body", b""))
        self.counted_bytes += size
        self._all.add_bytes(size)
        return message


def _check_encoding(scope: Scope) -> None:
    encoding = headers_of(scope).get(b"content-encoding", b"").strip().lower()
    if encoding not in (b"", b"identity"):
        shown = encoding.decode("latin-1")[:100]
        raise UnsupportedEncoding(
            f"a body in the encoding {shown!r} is not read; send it as it is", param="content-encoding"
        )
