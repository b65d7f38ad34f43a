"""Track the other proxy processes on the same tables, and until when their finished calls are written there.

Used from one event loop. The table itself is in `trajectories.store`.
"""

import asyncio
import logging
import time
from collections.abc import Callable

from proxy.trajectories.store import ThreadTables
from whetstone.domain.ids import new_id

GONE_AFTER_S = 15.0
"""A proxy that has reported nothing for so long is no longer waited for."""
ALONE_EVERY_S = 5.0
"""How often a proxy without peers reports that it is alive."""
MOST_WAITED_S = 2.0
"""Longest wait for the peers. After it, a conversation that is still unknown counts as new."""

log = logging.getLogger(__name__)


class Peers:
    """This process among the other proxies. Call `refresh` periodically and `leave` last; both query in a thread."""

    def __init__(self, table: ThreadTables, written_until: Callable[[], float]) -> None:
        """Create the view. `written_until` returns the time (seconds since the epoch) before which all calls finished
        by this process are in the tables."""
        self._table = table
        self._written_until = written_until
        self.id = new_id()
        """This process's id in the table."""
        self._others: dict[str, float] = {}
        self._reported_s = 0.0
        self._refreshed = asyncio.Event()

    @property
    def alone(self) -> bool:
        """Return whether no other proxy is known."""
        return not self._others

    @property
    def others(self) -> int:
        """Return how many other proxies are known."""
        return len(self._others)

    @property
    def written_until(self) -> float:
        """Return the time (seconds since the epoch) before which all calls finished by any proxy are in the tables.

        May be read from any thread.
        """
        return min([self._written_until(), *self._others.values()])

    async def refresh(self) -> None:
        """Read the other proxies' reports, and report on this one where another proxy may wait for it.

        Raises:
            SQLAlchemyError: the database cannot be reached.
        """
        now_s = time.time()
        self._others = await asyncio.to_thread(self._table.written, self.id, now_s - GONE_AFTER_S)
        if self._others or now_s - self._reported_s > ALONE_EVERY_S:
            await asyncio.to_thread(self._table.report_written, self.id, self._written_until(), now_s)
            self._reported_s = now_s
        self._refreshed.set()
        self._refreshed.clear()

    async def written(self, until_s: float) -> None:
        """Wait until the other proxies have written what they finished before `until_s`, at most MOST_WAITED_S."""
        try:
            async with asyncio.timeout(MOST_WAITED_S):
                while any(reported_s < until_s for reported_s in self._others.values()):
                    await self._refreshed.wait()
        except TimeoutError:
            log.warning("another proxy has not written its calls for %g s", MOST_WAITED_S)

    async def leave(self) -> None:
        """Remove this proxy from the table, so that no other waits for it."""
        await asyncio.to_thread(self._table.leave, self.id)
