"""Record calls and feedback: to the journal before the app is answered, to SQL in the writer's batches after it.

Used from one event loop.
"""

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec
from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError

from proxy.domain.call import Call
from proxy.domain.feedback_rows import FeedbackReceipt, identified
from proxy.errors import NotRecorded
from proxy.recording.journal.codec import JournalledFeedback, decode, encode_into
from proxy.recording.journal.log import Flusher, Journal
from proxy.recording.journal.segment import FileSegment, Record, sync
from proxy.recording.store import Store
from proxy.recording.writer import AWAY, BATCH, JournalledItem, SyncWrite, Writer
from proxy.supervision import Background
from whetstone.config.proxy import ProxySettings

MAX_CACHED = 1000
"""Most records that stay in memory while they wait for SQL; the journal has the rest, however slow the database is."""
MOST_BEFORE = BATCH
"""Feedback goes to the journal if more records than this wait before it."""
COMMIT_WAITS_S = 5.0
"""How long feedback waits for the database before it goes to the journal."""

log = logging.getLogger(__name__)


class Recorder:
    """Records calls and feedback. Call `start` first, `close` last."""

    def __init__(
        self,
        store: Store,
        folder: Path,
        on_feedback: Callable[[], None],
        on_written: Callable[[Sequence[Call]], None],
        on_recovered: Callable[[Call], None],
        on_feedback_recovered: Callable[[Mapping[str, Any]], None] = lambda _row: None,
        settings: ProxySettings | None = None,
        background: Background | None = None,
    ) -> None:
        """Create the recorder.

        `on_written` gets, in the writer's thread, the calls that SQL has now. `on_recovered` and
        `on_feedback_recovered` get, at the start, the calls and the feedback rows that dead processes left in the
        journal.
        """
        self._store = store
        self._folder = folder
        self._on_recovered = on_recovered
        self._on_feedback_recovered = on_feedback_recovered
        self._settings = settings or ProxySettings()
        self._background = background or Background()
        self._writer = Writer(store, folder, on_written, on_feedback, self._settle)
        self._queue = self._writer.queue
        self._payload = bytearray()
        """Buffer of the record that is being written."""
        self._recorded_s: deque[float] = deque()
        self.dropped = 0
        """Calls that were answered and not recorded."""
        self.needs_fsync = self._settings.durability == "fsync"
        """Whether `durable` has anything to wait for."""

    def start(self) -> None:
        """Open the journal, recover what dead processes left in it, and start the writer's thread.

        Raises:
            OSError: the journal's folder cannot be written.
        """
        settings, in_memory = self._settings, self._settings.durability == "async"
        self._journal = Journal(self._folder, settings.max_journal_bytes, in_memory=in_memory)
        self._flusher = Flusher(self._journal.to_sync, sync)
        self._loop = asyncio.get_running_loop()
        for segment, records in self._journal.left_behind():
            self._recover(segment, records)
        if not in_memory:
            self._store.sync_commits()
        self._syncing = self._background.every(settings.fsync_every_s, "sync of the journal", self._flusher.flushed)
        self._writer.start()

    @property
    def unwritten(self) -> int:
        """Return the number of calls and feedback in the journal that SQL does not have yet."""
        return len(self._recorded_s)

    @property
    def written_until(self) -> float:
        """Return the time before which every recorded call is in SQL; seconds since the epoch."""
        try:
            return self._recorded_s[0]
        except IndexError:  # a check beforehand would be a race: pages ask from threads of their own
            return time.time()

    @property
    def journal_bytes(self) -> int:
        """Return the size of the journal's records, on the disk or in memory."""
        return self._journal.size_bytes

    @property
    def journal_full(self) -> bool:
        """Return whether the journal refuses the next record, as far as is known: by its size, or by the disk."""
        return self._journal.full

    @property
    def away_since_s(self) -> float | None:
        """Return since when the database refuses writes (seconds since the epoch); None while it accepts them."""
        return self._writer.away_since_s

    @property
    def writes(self) -> bool:
        """Return whether the writer's thread is alive; if not, nothing reaches SQL until the proxy is restarted."""
        return not self._writer.dead

    def check_room(self) -> None:
        """Refuse a call that could not be recorded, before any work is done for it.

        Raises:
            NotRecorded: the journal or its disk is full, and unrecorded answers are not wanted.
        """
        if self._settings.when_full == "refuse" and self._journal.full:
            raise _full("the journal is full")

    def record(self, value: Call | JournalledFeedback) -> None:
        """Write a call to the journal, before its last byte is sent, or feedback while the database cannot be reached.

        Raises:
            NotRecorded: the journal cannot be written; nothing is recorded.
        """
        try:
            encode_into(value, self._payload)
            record = self._journal.append(self._payload)
        except OSError as error:
            log.error("the journal cannot be written: %s", error)
            raise _full(error.strerror or str(error)) from error
        self._enqueue(value, record)

    def record_or_drop(self, call: Call) -> bool:
        """Record an answered call, or accept it unrecorded if the settings allow that. Return whether it was recorded.

        Raises:
            NotRecorded: as `record`, if the settings do not allow unrecorded answers.
        """
        try:
            self.record(call)
        except NotRecorded:
            if self._settings.when_full == "refuse":
                raise
            self.dropped += 1
            return False
        return True

    async def durable(self) -> None:
        """Return when what was recorded is as durable as the settings require; with `fsync` it is then on the disk.

        Raises:
            NotRecorded: the disk fails.
        """
        if not self.needs_fsync:
            return
        try:
            await self._flusher.flushed()
        except OSError as error:
            log.error("the journal cannot be brought to the disk: %s", error)
            raise _full(error.strerror or str(error)) from error

    async def feedback(self, rows: list[dict[str, Any]]) -> list[FeedbackReceipt]:
        """Commit feedback. While the database cannot be reached, the journal stores it until it can.

        Raises:
            NotRecorded: neither accepted it, or the database refused it; nothing is stored.
        """
        rows = [identified(row) for row in rows]
        if self.away_since_s is None and self.unwritten <= MOST_BEFORE:
            try:
                async with asyncio.timeout(COMMIT_WAITS_S):
                    receipts: list[FeedbackReceipt] = await self._written(
                        lambda one: self._store.insert_feedback(one, rows)
                    )
                    return receipts
            except (*AWAY, TimeoutError) as error:
                log.warning("feedback waits in the journal: %s", type(error).__name__)
            except SQLAlchemyError as error:
                raise _not_stored(error) from error
        self.record(JournalledFeedback(rows[0]["id"], rows))
        await self.durable()
        return [FeedbackReceipt(row["id"], new=True) for row in rows]

    async def commit(self, write: Callable[[Connection], Any], *, first: bool = False) -> Any:
        """Run another write in the writer's next transaction; return what `write` returned, once it is committed.

        `first`: run it before all other writes of its transaction. Such a write locks a policy, and policies are always
        locked before trajectories.

        Raises:
            NotRecorded: the database did not accept it.
        """
        try:
            return await self._written(write, first=first)
        except SQLAlchemyError as error:
            raise _not_stored(error) from error

    async def close(self) -> None:
        """Write what is left and stop. What the database does not accept stays in the journal."""
        await asyncio.to_thread(self._writer.close)
        self._syncing.cancel()
        await self._flusher.close()
        self._journal.close()

    async def _written(self, write: Callable[[Connection], Any], *, first: bool = False) -> Any:
        written: Future[Any] = Future()
        # From here on it cannot be cancelled: an app that disconnects must not stop the writer.
        written.set_running_or_notify_cancel()
        self._writer.put(SyncWrite(write, written, first))
        return await asyncio.wrap_future(written)

    def _recover(self, segment: FileSegment, records: list[Record]) -> None:
        for record in records:
            try:
                value = decode(record.read())
                if isinstance(value, Call):
                    self._on_recovered(value)
                else:
                    for row in value.rows:
                        self._on_feedback_recovered(row)
                self._enqueue(value, record)
            except msgspec.DecodeError as error:
                # Another version wrote it. Its segment stays on the disk; no other record waits for it.
                log.error("a record in %s cannot be read: %s", segment.path, error)
        log.info("recovering %d records from %s", len(records), segment.path.name)

    def _enqueue(self, value: Call | JournalledFeedback, record: Record) -> None:
        recorded_s = self._recorded_s
        recorded_s.append(time.time())
        self._queue.put(JournalledItem(value if len(recorded_s) <= MAX_CACHED else None, record))

    def _settle(self, items: Sequence[JournalledItem]) -> None:
        self._loop.call_soon_threadsafe(self._acknowledge, items)

    def _acknowledge(self, items: Sequence[JournalledItem]) -> None:
        # First, since a sick disk may refuse the journal.
        for _ in items:
            self._recorded_s.popleft()
        for segment, records in Counter(item.record.segment for item in items).items():
            self._journal.acknowledge(segment, records)


def _full(why: str) -> NotRecorded:
    return NotRecorded(f"it could not be recorded ({why}); free space in the data folder")


def _not_stored(error: Exception) -> NotRecorded:
    return NotRecorded(f"it was not stored ({type(error).__name__}); send it again")
