"""Move versions by hand while they are in use: load first, then switch, and read the change before answering.

The moves themselves are in `whetstone.registry.manual_moves`.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any, TypeVar, cast

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import SQLAlchemyError

from proxy.errors import VersionRefused
from proxy.recording.recorder import Recorder
from proxy.upstream.load_balancer import Replica
from whetstone.config.settings import Settings
from whetstone.database.types import storable
from whetstone.domain.ids import version_id
from whetstone.registry import manual_moves, versions
from whetstone.registry.versions import LedgerError, Move

LOAD_WAITS_S = 30.0
"""Longest time for the servers to load a version before it answers."""
LOOK_EVERY_S = 0.02

T = TypeVar("T")

log = logging.getLogger(__name__)


class Ledger:
    """The ledger of one project's versions, for `api.admin.policies`. Use it from one event loop."""

    def __init__(
        self,
        settings: Settings,
        engine: Engine,
        recorder: Recorder,
        replicas: Iterable[Replica],
        refresh: Callable[[], Awaitable[None]],
        load_waits_s: float = LOAD_WAITS_S,
    ) -> None:
        """`refresh` makes the proxy read the policies; when it returns, everything committed before the call is
        included."""
        self._settings = settings
        self._project = settings.project
        self._reader = engine.execution_options(isolation_level="AUTOCOMMIT")
        self._recorder = recorder
        self._replicas = replicas
        self._refresh = refresh
        self._load_waits_s = load_waits_s

    async def promote(self, policy: str, version: int, reason: str | None) -> Move:
        """Let a version answer.

        Raises:
            VersionRefused: it does not exist, its files are missing or damaged, or the servers do not load it.
        """
        async with self._loaded(policy, version):
            return await self._move(
                policy,
                lambda connection, now: manual_moves.promote(
                    connection, self._settings, policy, version, storable(reason), now
                ),
            )

    async def roll_back(self, policy: str, to: int | None, reason: str | None) -> Move:
        """Go back to a version; without one, to the version before the live one.

        Raises:
            VersionRefused: there is none before, or the live one does not descend from it; otherwise as `promote`.
        """
        target = await self._read(lambda connection: versions.step_back(connection, self._project, policy, to))
        async with self._loaded(policy, target):
            return await self._move(
                policy,
                lambda connection, now: manual_moves.roll_back(
                    connection, self._settings, policy, target, storable(reason), now
                ),
            )

    async def pin(self, policy: str, version: int, *, pinned: bool) -> None:
        """Keep a version loaded, or stop doing so. One that is not loaded will be, soon after.

        Raises:
            VersionRefused: it does not exist, it cannot be pinned, or the servers have no room.
        """
        await self._move(
            policy,
            lambda connection, now: manual_moves.pin(
                connection, self._settings, policy, version, pinned=pinned, now=now
            ),
        )

    async def _move(self, policy: str, move: Callable[[Connection, datetime], T]) -> T:
        """Commit a move. The next request here uses it."""
        moved = await self._commit(policy, move)
        try:
            await self._refresh()
        except SQLAlchemyError as error:  # the move is done; an error would make the caller repeat it
            log.warning("a move of %s is committed, but not read again yet: %s", policy, error)
        return moved

    @asynccontextmanager
    async def _loaded(self, policy: str, version: int) -> AsyncIterator[None]:
        """Run the block with the version loaded on all servers that get requests. If loading or the block fails, stop
        wanting the version.

        Raises:
            VersionRefused: its files are damaged, or the servers do not load it in time.
        """
        row = await self._read(lambda connection: versions.version_row(connection, self._project, policy, version))
        await self._refusable(lambda: manual_moves.check_files(row, self._settings))
        was = None
        if not row.served:
            was = await self._commit(
                policy, lambda connection, _: versions.want(connection, self._project, policy, version)
            )
        try:
            if row.adapter_path is not None:
                await self._await_loaded(version_id(policy, version))
            yield
        except BaseException:  # also on a caller's disconnect
            if was is not None:
                await asyncio.shield(
                    self._commit(policy, lambda connection, now: versions.unwant(connection, was, now))
                )
            raise

    async def _await_loaded(self, name: str) -> None:
        for replica in self._replicas:
            replica.bring_now.set()
        try:
            async with asyncio.timeout(self._load_waits_s):
                while self._lacking(name):
                    await asyncio.sleep(LOOK_EVERY_S)
        except TimeoutError:
            reasons = "; ".join(f"{url}: {why}" for url, why in self._lacking(name).items())
            raise VersionRefused(
                f"nothing was changed: not every model server has {name} after {self._load_waits_s:g} s. {reasons}"
            ) from None

    def _lacking(self, name: str) -> dict[str, str]:
        """Return the servers that get requests and have not loaded it, with the reasons. All servers if none is
        healthy."""
        awake = [replica for replica in self._replicas if replica.healthy and not replica.asleep]
        return {
            replica.url: replica.missing.get(name) or replica.reason or "is being loaded"
            for replica in awake or self._replicas
            if name not in replica.names
        }

    async def _read(self, query: Callable[[Connection], T]) -> T:
        def read() -> T:
            with self._reader.connect() as connection:
                return query(connection)

        return await self._refusable(read)

    async def _refusable(self, ask: Callable[[], T]) -> T:
        try:
            return await asyncio.to_thread(ask)
        except LedgerError as error:
            raise VersionRefused(str(error)) from error

    async def _commit(self, policy: str, write: Callable[[Connection, datetime], T]) -> T:
        def locked(connection: Connection) -> Any:
            versions.lock(connection, self._project, policy)
            try:
                return write(connection, datetime.now(UTC))
            except LedgerError as error:  # it has written nothing, so the rest of the transaction stays
                return error

        done = await self._recorder.commit(locked, first=True)
        if isinstance(done, LedgerError):
            raise VersionRefused(str(done)) from done
        return cast(T, done)
