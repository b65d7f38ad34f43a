"""A group that this process holds while judges look at it. Knows its table and time; no judge."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta
from typing import TypeVar

from sqlalchemy import Connection, Engine

from judge import store_ruler
from judge.store_ruler import Taken

Found = TypeVar("Found")


class Lost(Exception):
    """Somebody else holds the group, or it is to be ranked no more."""


class Waits(Exception):
    """The group cannot be ranked before so many seconds have passed; the message says why."""

    def __init__(self, why: str, seconds: float) -> None:
        super().__init__(why)
        self.seconds = seconds


class Tables:
    """Transactions off the event loop."""

    def __init__(self, engine: Engine, clock: Callable[[], datetime]) -> None:
        self._engine = engine
        self._reader = engine.execution_options(isolation_level="AUTOCOMMIT")
        self.now = clock

    async def write(self, work: Callable[[Connection], Found]) -> Found:
        """Do something in one transaction."""
        return await asyncio.to_thread(self._in, self._engine, work)

    async def read(self, work: Callable[[Connection], Found]) -> Found:
        """Read without one."""
        return await asyncio.to_thread(self._in, self._reader, work)

    @staticmethod
    def _in(engine: Engine, work: Callable[[Connection], Found]) -> Found:
        with engine.begin() as connection:
            return work(connection)


class Held:
    """The group, until a time that each call to a judge moves."""

    def __init__(self, tables: Tables, group: Taken) -> None:
        self.tables, self.group = tables, group

    async def keep(self, seconds: float, waits: str | None = None) -> None:
        """Hold it for so long from now on. `waits`: why it is not ranked yet.

        Raises:
            Lost: it is held no more.
        """
        until = self.tables.now() + timedelta(seconds=seconds)
        group = self.group
        if not await self.tables.write(lambda connection: store_ruler.hold(connection, group, until, waits)):
            raise Lost(group.id)
        self.group = replace(group, until=until)
