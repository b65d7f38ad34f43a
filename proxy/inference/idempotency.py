"""Return the same answer for the same turn: a client that lost the answer retries, and nothing is sampled twice.

Used from one event loop.
"""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import msgspec

from proxy.errors import TurnReused

KEPT = 1024
KEPT_BYTES = 32 * 2**20
"""Most answers (KEPT) and bytes (KEPT_BYTES) cached in memory, because SQL may not have them yet; all others are read
from SQL."""


class Reply(msgspec.Struct, frozen=True):
    """An answer as it was sent."""

    digest: str
    """Digest of the request: one turn key belongs to one request."""
    streamed: bool
    headers: list[tuple[bytes, bytes]]
    body: bytes


encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Reply).decode


class Replays:
    """The finished answers of turns that have a key. `find` looks up a key in the database."""

    def __init__(self, find: Callable[[str], Awaitable[bytes | None]]) -> None:
        self._find = find
        self._running: dict[str, asyncio.Event] = {}
        self._kept: OrderedDict[str, bytes] = OrderedDict()
        self._kept_bytes = 0

    @asynccontextmanager
    async def turn(self, key: str, digest: str) -> AsyncIterator[Reply | None]:
        """Hold the lock of this turn; yield its answer, or None if it was not answered yet.

        Raises:
            TurnReused: the key was used for another request.
        """
        while running := self._running.get(key):
            await running.wait()
        self._running[key] = asyncio.Event()
        try:
            found = self._kept.get(key) or await self._find(key)
            reply = None if found is None else decode(found)
            if reply is not None and reply.digest != digest:
                raise TurnReused("this turn id (or idempotency key) was used for another request; take a new one")
            yield reply
        finally:
            self._running.pop(key).set()

    def keep(self, key: str, reply: bytes) -> None:
        """Cache an answer that was recorded."""
        self._kept[key] = reply
        self._kept_bytes += len(reply)
        while len(self._kept) > KEPT or self._kept_bytes > KEPT_BYTES:
            self._kept_bytes -= len(self._kept.popitem(last=False)[1])
