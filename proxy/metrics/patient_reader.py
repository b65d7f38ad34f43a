"""Read the database for a page that must come soon, also while the database hangs."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

Result = TypeVar("Result")

TIMEOUT_S = 4.0
"""Longest wait of a scrape: Prometheus gives up after 10 s, and a page has two readings."""


class PatientReader:
    """One reading at a time, in a thread of its own: a hanging database must not take the threads of requests."""

    def __init__(self, timeout_s: float = TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="metrics")
        self._reading: Future[Any] | None = None

    async def read(self, ask: Callable[[], Result]) -> Result | None:
        """Return what `ask` returns; None if it takes too long, or if an earlier reading has not ended yet."""
        if self._reading is not None and not self._reading.done():
            return None
        self._reading = self._thread.submit(ask)
        reading = asyncio.wrap_future(self._reading)
        # Also of a reading that nothing waits for any more, whose error would be logged as unexpected.
        reading.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        await asyncio.wait([reading], timeout=self._timeout_s)
        return reading.result() if reading.done() else None
