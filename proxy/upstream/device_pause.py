"""Hold back requests while the trainer has an accelerator that vLLM shares, and report to the trainer what is in
flight.

`load_balancer.Replicas` holds the requests.
"""

import asyncio
import time
from datetime import UTC, datetime

from proxy.upstream.load_balancer import Replicas
from proxy.upstream.replica_store import Pause, ReplicaTables

REPORT_EVERY_S = 5.0
"""How often the number of calls in flight is reported while there is no pause."""


class Pauses:
    """Applies the pauses. Call `refresh` periodically."""

    def __init__(self, table: ReplicaTables, replicas: Replicas, proxy_id: str, shares_device: bool) -> None:
        self._table = table
        self._replicas = replicas
        self._proxy_id = proxy_id
        self._shares_device = shares_device
        self._pause: Pause | None = None
        self._end: asyncio.TimerHandle | None = None
        """Ends the pause on time, even if the database does not answer."""
        self._last_report: tuple[int, int, str | None] | None = None
        self._reported_s = 0.0

    async def refresh(self) -> None:
        """Hold requests while a step has the accelerator, and report what is still in flight.

        Raises:
            SQLAlchemyError: the database cannot be reached; a pause then ends at the time that was read last.
        """
        try:
            if self._shares_device:
                self._pause = await asyncio.to_thread(self._table.pause)
        finally:
            self._hold()
        await self._report()

    def _hold(self) -> None:
        pause, pause_id = self._pause, None
        if self._end is not None:
            self._end.cancel()
        if pause is not None and (left_s := (pause.until - datetime.now(UTC)).total_seconds()) > 0:
            pause_id = pause.id
            self._end = asyncio.get_running_loop().call_later(left_s, self._replicas.hold, None)
        self._replicas.hold(pause_id)

    async def _report(self) -> None:
        pause_id = self._replicas.pause_id
        now = (self._replicas.in_flight, self._replicas.waiting, pause_id)
        pauses = pause_id is not None or (self._last_report is not None and self._last_report[2] is not None)
        if now != self._last_report and (pauses or time.monotonic() - self._reported_s > REPORT_EVERY_S):
            known = await asyncio.to_thread(self._table.report_calls, self._proxy_id, *now)
            if known:
                self._last_report, self._reported_s = now, time.monotonic()
