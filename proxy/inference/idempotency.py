"""Return the same answer for the same turn: a client that lost the answer retries, and nothing is sampled twice.

Used from one event loop.
"""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import msgspec

from proxy.errors import TurnReused

MOST_CACHED = 1024
MOST_CACHED_BYTES = 32 * 2**20
"""Most answers (MOST_CACHED) and bytes (MOST_CACHED_BYTES) cached in memory, because SQL may not have them yet; all
others are read from SQL."""


class Reply(msgspec.Struct, frozen=True):
    """An answer as it was sent."""

    digest: str
    """Digest of the request: one turn key belongs to one request."""
    streamed: bool
    headers: list[tuple[bytes, bytes]]
    body: bytes


class Replays:
    """The finished answers of turns that have a key. `find` looks up a key in the database."""

    def __init__(self, find: Callable[[str], Awaitable[bytes | None]]) -> None:
        self._find = find
        self._running: dict[str, asyncio.Event] = {}
        self._cached: OrderedDict[str, bytes] = OrderedDict()
        self._cached_bytes = 0

    @asynccontextmanager
    async def lock(self, key: str, digest: str) -> AsyncIterator[Reply | None]:
        """Hold the lock of this turn; yield its answer, or None if it was not answered yet.

        Raises:
            TurnReused: the key was used for another request.
        """
        while running := self._running.get(key):
            await running.wait()
        self._running[key] = asyncio.Event()
        try:
            stored = self._cached.get(key) or await self._find(key)
            reply = None if stored is None else msgspec.msgpack.decode(stored, type=Reply)
            if reply is not None and reply.digest != digest:
                raise TurnReused("this turn id (or idempotency key) was used for another request; take a new one")
            yield reply
        finally:
            self._running.pop(key).set()

    def keep(self, key: str, reply: bytes) -> None:
        """Cache an answer that was recorded."""
        self._cached[key] = reply
        self._cached_bytes += len(reply)
        while len(self._cached) > MOST_CACHED or self._cached_bytes > MOST_CACHED_BYTES:
            self._cached_bytes -= len(self._cached.popitem(last=False)[1])
