"""Pauses of an accelerator that vLLM shares with the trainer: nothing new goes out, and the trainer is told.

Knows pauses and counts; what is held back is held by `replicas`.
"""

import asyncio
import time
from datetime import UTC, datetime
from typing import Protocol

from proxy.replicas import Replicas
from proxy.store_replicas import Pause

TELL_EVERY_S = 5.0
"""How often the database is told what is on its way while there is no pause."""


class Table(Protocol):
    """Where the trainer says that it has the accelerator, and the proxies that they have stopped."""

    def pause(self) -> Pause | None:
        """The step that has it, over or not."""
        ...

    def tell_calls(self, proxy_id: str, in_flight: int, waiting: int, pause_seen: str | None) -> bool:
        """Say what this proxy has on its way; whether the others know of it at all by now."""
        ...


class Pauses:
    """Keeps them. `refresh` again and again."""

    def __init__(self, table: Table, replicas: Replicas, proxy_id: str, shares_device: bool) -> None:
        self._table = table
        self._replicas = replicas
        self._proxy_id = proxy_id
        self._shares_device = shares_device
        self._pause: Pause | None = None
        self._end: asyncio.TimerHandle | None = None
        """The pause ends by itself, however long the database takes to tell more."""
        self._told: tuple[int, int, str | None] | None = None
        self._told_s = 0.0

    async def refresh(self) -> None:
        """Hold requests while a step has the accelerator, and say what is still on its way.

        Raises:
            SQLAlchemyError: the database is away; a pause then lasts no longer than was last told.
        """
        try:
            if self._shares_device:
                self._pause = await asyncio.to_thread(self._table.pause)
        finally:
            self._hold(self._pause)
        await self._tell()

    def _hold(self, pause: Pause | None) -> None:
        left_s = 0.0 if pause is None else (pause.until - datetime.now(UTC)).total_seconds()
        if self._end is not None:
            self._end.cancel()
        self._end = None
        if pause is not None and left_s > 0:
            self._end = asyncio.get_running_loop().call_later(left_s, self._replicas.hold, None)
        self._replicas.hold(pause.id if pause is not None and left_s > 0 else None)

    async def _tell(self) -> None:
        held_by = self._replicas.held_by
        now = (self._replicas.in_flight, self._replicas.waiting, held_by)
        pauses = held_by is not None or (self._told is not None and self._told[2] is not None)
        if now != self._told and (pauses or time.monotonic() - self._told_s > TELL_EVERY_S):
            known = await asyncio.to_thread(self._table.tell_calls, self._proxy_id, *now)
            if known:
                self._told, self._told_s = now, time.monotonic()
