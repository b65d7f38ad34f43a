"""The journal brought to the disk, off the event loop: again and again, and at once for whoever waits for it.

Knows when, not what: descriptors are the journal's. Those who wait at the same time share one fsync. Used from one
event loop.
"""

import asyncio
import logging
from collections.abc import Callable

log = logging.getLogger(__name__)


class Flusher:
    """`run` for ever; `flushed` waits."""

    def __init__(self, to_sync: Callable[[], list[int]], sync: Callable[[list[int]], None], every_s: float) -> None:
        """`to_sync` gives what is not on the disk yet, `sync` brings it there and takes as long as the disk does."""
        self._to_sync = to_sync
        self._sync = sync
        self._every_s = every_s
        self._running: asyncio.Future[None] | None = None

    async def run(self) -> None:
        """Bring to the disk what is there, `every_s` after the last time."""
        while True:
            await asyncio.sleep(self._every_s)
            try:
                await self.flushed()
            except OSError as error:
                log.error("the journal cannot be brought to the disk: %s", error)

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
