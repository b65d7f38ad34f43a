"""Sync the journal to the disk, off the event loop.

Callers that wait at the same time share one fsync. Used from one event loop.
"""

import asyncio
from collections.abc import Callable


class Flusher:
    """Syncs to the disk what was written."""

    def __init__(self, to_sync: Callable[[], list[int]], sync: Callable[[list[int]], None]) -> None:
        """Create a flusher. `to_sync` returns the descriptors that are not synced yet; `sync` syncs them, and blocks as
        long as the disk takes."""
        self._to_sync = to_sync
        self._sync = sync
        self._running: asyncio.Future[None] | None = None

    async def close(self) -> None:
        """Return when no sync is running any more."""
        if self._running is not None:
            await asyncio.wait([self._running])

    async def flushed(self) -> None:
        """Return when everything that was written before is on the disk.

        Raises:
            OSError: the disk fails; how much was written is unknown.
        """
        before = self._running
        if before is not None:
            # The running sync began before the latest writes: the next one covers them, and all who wait share it.
            await asyncio.wait([before])
        if self._running is before or self._running is None:
            self._running = asyncio.ensure_future(asyncio.to_thread(self._sync, self._to_sync()))
        await asyncio.shield(self._running)
