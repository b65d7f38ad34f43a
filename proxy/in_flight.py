"""How much is served at once: so many requests, so many bytes of theirs, none encoded. Knows no route, no key."""

from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

from proxy.asgi import Receive, Scope, headers_of
from proxy.errors import Busy, Encoded
from whetstone.settings import ProxySettings

READS = frozenset({"GET", "HEAD", "OPTIONS"})
"""Methods without a body that anybody reads: what asks how the proxy is must pass when nothing else does."""


class InFlight:
    """Counts what is in flight. Used from one event loop."""

    def __init__(self, settings: ProxySettings) -> None:
        self._settings = settings
        self.requests = 0
        self.bytes = 0
        """Of their bodies, as far as they came."""

    @contextmanager
    def one(self, scope: Scope, receive: Receive) -> Iterator[Receive]:
        """Take a request in while this lasts; its body is to be read from what is given.

        Raises:
            Encoded: its body would have to be decompressed, to whatever size.
            Busy: too many are in flight; so does reading, where their bodies are too long together.
        """
        if scope["method"] in READS:
            yield receive
            return
        _check_encoding(scope)
        most, most_bytes = self._settings.max_in_flight, self._settings.max_in_flight_bytes
        if self.requests >= most:
            raise Busy(f"{most} requests are in flight (setting proxy.max_in_flight); try again soon")
        held = 0

        async def counted() -> MutableMapping[str, Any]:
            nonlocal held
            message = await receive()
            size = len(message.get("body", b""))
            held += size
            self.bytes += size
            if size and self.bytes > most_bytes:
                told = f"the bodies of all requests are over {most_bytes} bytes"
                raise Busy(f"{told} (setting proxy.max_in_flight_bytes); try again soon")
            return message

        self.requests += 1
        try:
            yield counted
        finally:
            self.requests -= 1
            self.bytes -= held


def _check_encoding(scope: Scope) -> None:
    encoding = headers_of(scope).get(b"content-encoding", b"").strip().lower()
    if encoding not in (b"", b"identity"):
        told = encoding.decode("latin-1")[:100]
        raise Encoded(f"a body in the encoding {told!r} is not read; send it as it is", param="content-encoding")
