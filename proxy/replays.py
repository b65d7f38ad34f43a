"""The same answer for the same turn: a client that lost it on the way asks again, and nothing is sampled twice.

Knows turn keys and the bytes that were sent; no dialect. Used from one event loop.
"""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import msgspec

from proxy.errors import TurnReused

KEPT = 1024
KEPT_BYTES = 32 * 2**20
"""What is kept in memory, for those that SQL may not have yet; all others are read from there."""


class Reply(msgspec.Struct, frozen=True):
    """An answer as it was sent."""

    digest: str
    """Of the request: under one turn key there is one."""
    streamed: bool
    headers: list[tuple[bytes, bytes]]
    body: bytes


encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Reply).decode


class Replays:
    """The finished answers of turns that have a key. `find` looks a key up in the database."""

    def __init__(self, find: Callable[[str], Awaitable[bytes | None]]) -> None:
        self._find = find
        self._running: dict[str, asyncio.Event] = {}
        self._kept: OrderedDict[str, bytes] = OrderedDict()
        self._kept_bytes = 0

    @asynccontextmanager
    async def turn(self, key: str, digest: str) -> AsyncIterator[Reply | None]:
        """Be the only one who serves this turn; its answer, if it was served already.

        Raises:
            TurnReused: it was, to another request.
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
        """Keep an answer that was recorded."""
        self._kept[key] = reply
        self._kept_bytes += len(reply)
        while len(self._kept) > KEPT or self._kept_bytes > KEPT_BYTES:
            self._kept_bytes -= len(self._kept.popitem(last=False)[1])
