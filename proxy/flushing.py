"""The journal brought to the disk, off the event loop.

Descriptors are the journal's. Those who wait at the same time share one fsync. Used from one event loop.
"""

import asyncio
from collections.abc import Callable


class Flusher:
    """Brings to the disk what was written."""

    def __init__(self, to_sync: Callable[[], list[int]], sync: Callable[[list[int]], None]) -> None:
        """`to_sync` gives what is not on the disk yet, `sync` brings it there and takes as long as the disk does."""
        self._to_sync = to_sync
        self._sync = sync
        self._running: asyncio.Future[None] | None = None

    async def close(self) -> None:
        """Return when nothing is on its way to the disk any more."""
        if self._running is not None:
            await asyncio.wait([self._running])

    async def flushed(self) -> None:
        """Return when all that was written before is on the disk.

        Raises:
            OSError: the disk fails; what is on it is not known.
        """
        before = self._running
        if before is not None:
            # It began without what was written since: the next one takes that, and is the same for all who wait.
            await asyncio.wait([before])
        if self._running is before or self._running is None:
            self._running = asyncio.ensure_future(asyncio.to_thread(self._sync, self._to_sync()))
        await asyncio.shield(self._running)
