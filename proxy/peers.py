"""The other proxy processes on the same tables: until when the calls they finished can be found there.

Knows times and ids; the table is the store's. Used from one event loop.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Protocol

from whetstone.ids import new_id

GONE_AFTER_S = 15.0
"""A proxy that said nothing for so long is no longer waited for."""
ALONE_EVERY_S = 5.0
"""How often one that is alone says that it is there."""
MOST_WAITED_S = 2.0
"""Longest wait for the others; beside them a conversation that nobody knows is then a new one."""

log = logging.getLogger(__name__)


class Table(Protocol):
    """Where the proxies say until when their calls are written."""

    def tell_written(self, proxy_id: str, until_s: float, now_s: float) -> None:
        """Say it."""
        ...

    def written(self, proxy_id: str, since_s: float) -> dict[str, float]:
        """What the others said since then, by id."""
        ...

    def leave(self, proxy_id: str) -> None:
        """Be waited for no more."""
        ...


class Peers:
    """This process among the others. `refresh` again and again, in a thread; `leave` last."""

    def __init__(self, table: Table, written_until: Callable[[], float]) -> None:
        """`written_until`: what this process finished before then is in the tables (seconds since the epoch)."""
        self._table = table
        self._written_until = written_until
        self.id = new_id()
        """Its name among them."""
        self._others: dict[str, float] = {}
        self._told_s = 0.0
        self._refreshed = asyncio.Event()

    @property
    def alone(self) -> bool:
        """No other proxy is known."""
        return not self._others

    @property
    def others(self) -> int:
        """How many are known."""
        return len(self._others)

    async def refresh(self) -> None:
        """Read what the others said and, where somebody may wait for it, tell them of this one.

        Raises:
            SQLAlchemyError: the database is away.
        """
        now_s = time.time()
        self._others = await asyncio.to_thread(self._table.written, self.id, now_s - GONE_AFTER_S)
        if self._others or now_s - self._told_s > ALONE_EVERY_S:
            await asyncio.to_thread(self._table.tell_written, self.id, self._written_until(), now_s)
            self._told_s = now_s
        self._refreshed.set()
        self._refreshed.clear()

    async def written(self, until_s: float) -> None:
        """Wait until the others have written what they finished before then, MOST_WAITED_S at most."""
        try:
            async with asyncio.timeout(MOST_WAITED_S):
                while any(told_s < until_s for told_s in self._others.values()):
                    await self._refreshed.wait()
        except TimeoutError:
            log.warning("another proxy has not written its calls for %g s", MOST_WAITED_S)

    async def leave(self) -> None:
        """Be waited for no more."""
        await asyncio.to_thread(self._table.leave, self.id)
