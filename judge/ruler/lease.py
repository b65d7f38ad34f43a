"""A group that this process has leased while judges rank it."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta
from typing import TypeVar

from sqlalchemy import Connection, Engine

from judge.store import ruler
from judge.store.ruler import LeasedGroup

Result = TypeVar("Result")


class LeaseLost(Exception):
    """Another worker has the group, or it does not have to be ranked any more."""


class Waits(Exception):
    """The group cannot be ranked before this many seconds have passed; the message gives the reason."""

    def __init__(self, why: str, seconds: float) -> None:
        super().__init__(why)
        self.seconds = seconds


class Tables:
    """Runs transactions off the event loop."""

    def __init__(self, engine: Engine, clock: Callable[[], datetime]) -> None:
        self._engine = engine
        self._reader = engine.execution_options(isolation_level="AUTOCOMMIT")
        self.now = clock

    async def write(self, work: Callable[[Connection], Result]) -> Result:
        """Run `work` in one transaction."""
        return await asyncio.to_thread(self._in, self._engine, work)

    async def read(self, work: Callable[[Connection], Result]) -> Result:
        """Run `work` for reading, without a transaction."""
        return await asyncio.to_thread(self._in, self._reader, work)

    @staticmethod
    def _in(engine: Engine, work: Callable[[Connection], Result]) -> Result:
        with engine.begin() as connection:
            return work(connection)


class GroupLease:
    """The lease of a group; each call to a judge extends it."""

    def __init__(self, tables: Tables, group: LeasedGroup) -> None:
        self.tables, self.group = tables, group

    async def extend(self, seconds: float, waits: str | None = None) -> None:
        """Extend the lease to `seconds` from now. `waits`: why the group is not ranked yet.

        Raises:
            LeaseLost: the lease is over.
        """
        until = self.tables.now() + timedelta(seconds=seconds)
        group = self.group
        if not await self.tables.write(lambda connection: ruler.hold(connection, group, until, waits)):
            raise LeaseLost(group.id)
        self.group = replace(group, until=until)
