"""From a served call to SQL: the journal before the last byte, batches by one writer thread after it.

Knows when things are durable; the meaning of rows is the store's. Used from one event loop.
"""

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
from sqlalchemy import Connection
from sqlalchemy.exc import InterfaceError, OperationalError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from proxy.call import Call
from proxy.errors import NotRecorded
from proxy.journal import Journal, Record, Segment
from proxy.store import Store

BATCH = 200
MOST_KEPT = 1000
"""Calls that stay in memory while they wait for SQL; the journal has the rest, however slow or away the database is."""
RETRY_S = 1.0
CLOSE_TIMEOUT_S = 10.0

log = logging.getLogger(__name__)
# JSON, because a call carries pieces of JSON as they came.
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Call).decode

AWAY = (OperationalError, InterfaceError, PoolTimeout)
"""The database cannot be reached or is busy: the same rows may be taken later."""


class _Named(msgspec.Struct):
    id: str


_named = msgspec.json.Decoder(_Named)


class _Feedback(msgspec.Struct, frozen=True):
    write: Callable[[Connection], Any]
    written: Future[Any]
    first: bool = False
    """Before all else of its transaction."""


class _Recorded(msgspec.Struct, frozen=True):
    kept: Call | None
    """None: it is read from the journal when its turn comes."""
    record: Record

    @property
    def call(self) -> Call:
        return _decode(self.record.read()) if self.kept is None else self.kept


class Recorder:
    """Takes calls and feedback. `start` first, `close` last."""

    def __init__(
        self,
        store: Store,
        folder: Path,
        on_feedback: Callable[[], None],
        on_written: Callable[[Sequence[Call]], None],
        on_recovered: Callable[[Call], None],
    ) -> None:
        """`on_written` is told, in the writer thread, of the calls that SQL has now; `on_recovered`, at the start, of
        those that dead processes left for it."""
        self._store = store
        self._folder = folder
        self._on_feedback = on_feedback
        self._on_written = on_written
        self._on_recovered = on_recovered
        self._queue: queue.SimpleQueue[_Recorded | _Feedback | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write, name="recorder", daemon=True)
        self._recorded_s: deque[float] = deque()

    def start(self) -> None:
        """Open the journal, take up what dead processes left in it, start the writer thread.

        Raises:
            OSError: the journal's folder cannot be written.
        """
        self._journal = Journal(self._folder)
        self._loop = asyncio.get_running_loop()
        for segment, records in self._journal.left_behind():
            self._recover(segment, records)
        self._thread.start()

    @property
    def unwritten(self) -> int:
        """Calls in the journal that SQL does not have yet."""
        return len(self._recorded_s)

    @property
    def written_until(self) -> float:
        """Every call recorded before then is in SQL; seconds since the epoch."""
        return self._recorded_s[0] if self._recorded_s else time.time()

    def record(self, call: Call) -> None:
        """Make a call durable, before its last byte goes out.

        Raises:
            NotRecorded: the journal cannot be written; nothing of the call is kept.
        """
        try:
            record = self._journal.append(_encode(call))
        except OSError as error:
            log.error("the journal cannot be written: %s", error)
            raise NotRecorded(
                f"the answer could not be recorded ({error.strerror or error}); free space in the data folder"
            ) from error
        self._enqueue(call, record)

    async def feedback(self, rows: list[dict[str, Any]]) -> list[str]:
        """Commit feedback; return its ids.

        Raises:
            NotRecorded: the database did not take it; nothing of it is kept.
        """
        ids: list[str] = await self.commit(lambda connection: self._store.insert_feedback(connection, rows))
        return ids

    async def withdraw(self, project: str, feedback_id: str, now: datetime) -> None:
        """Commit that an app takes feedback back, if it still can.

        Raises:
            NotRecorded: the database did not take it.
        """
        await self.commit(lambda connection: self._store.withdraw_feedback(connection, project, feedback_id, now))

    async def commit(self, write: Callable[[Connection], Any], *, first: bool = False) -> Any:
        """Have something else written that somebody waits for, in its turn; what `write` returned once it is committed.

        `first`: before all else of its transaction. It locks a policy, and everybody locks those before trajectories.

        Raises:
            NotRecorded: the database did not take it.
        """
        written: Future[Any] = Future()
        # From here on nobody can cancel it: an app that hangs up must not stop the writer.
        written.set_running_or_notify_cancel()
        self._queue.put(_Feedback(write, written, first))
        try:
            return await asyncio.wrap_future(written)
        except SQLAlchemyError as error:
            raise NotRecorded(f"it was not stored ({type(error).__name__}); send it again") from error

    async def close(self) -> None:
        """Write what is left and stop. What the database does not take stays in the journal."""
        self._queue.put(None)
        await asyncio.to_thread(self._thread.join, CLOSE_TIMEOUT_S)
        self._journal.close()

    def _recover(self, segment: Segment, records: list[Record]) -> None:
        for record in records:
            try:
                call = _decode(record.read())
                self._on_recovered(call)
                self._enqueue(call, record)
            except msgspec.DecodeError as error:
                # A call that another version wrote. It keeps its segment on disk, and nothing else waits for it.
                log.error("a record in %s cannot be read: %s", segment.path, error)
        log.info("recovering %d calls from %s", len(records), segment.path.name)

    def _enqueue(self, call: Call, record: Record) -> None:
        self._recorded_s.append(time.time())
        self._queue.put(_Recorded(call if self.unwritten <= MOST_KEPT else None, record))

    def _write(self) -> None:
        """The writer thread. Calls that found the database away are tried again with whatever comes next."""
        held: list[_Recorded] = []
        closing = False
        while not closing:
            batch = self._next_batch(RETRY_S if held else None)
            closing = None in batch
            held = self._take([*held, *(item for item in batch if item is not None)])

    def _next_batch(self, timeout_s: float | None) -> list[_Recorded | _Feedback | None]:
        batch: list[_Recorded | _Feedback | None] = []
        with contextlib.suppress(queue.Empty):
            batch.append(self._queue.get(timeout=timeout_s))
            while batch[-1] is not None and len(batch) < BATCH:
                batch.append(self._queue.get_nowait())
        return batch

    def _take(self, items: Sequence[_Recorded | _Feedback]) -> list[_Recorded]:
        """Commit; return the calls the database was not there for. Feedback is answered at once: its app is waiting."""
        start = alone_until = 0
        while start < len(items):
            batch = items[start : start + (1 if start < alone_until else BATCH)]
            try:
                self._commit(batch)
            except AWAY as error:
                log.error("the database does not take records, trying again: %s", error)
                return _refuse_feedback(items[start:], error)
            except Exception as error:
                if len(batch) > 1:
                    log.exception("a batch was refused, writing one by one")
                    alone_until = start + len(batch)
                    continue
                self._refuse(batch[0], error)
            start += len(batch)
        return []

    def _commit(self, items: Sequence[_Recorded | _Feedback]) -> None:
        """One transaction for all of them, in the order they came but for those that are to be first."""
        items = sorted(items, key=lambda item: not (isinstance(item, _Feedback) and item.first))
        calls: list[Call] = []
        done: list[tuple[_Feedback, Any]] = []
        try:
            with self._store.engine.begin() as connection:
                for item in items:
                    if isinstance(item, _Recorded):
                        calls.append(item.call)
                        self._store.calls.write(connection, calls[-1:])
                    else:
                        done.append((item, item.write(connection)))
        except Exception:
            self._store.calls.forget_tails()
            raise
        for feedback, result in done:
            feedback.written.set_result(result)
        self._on_written(calls)
        self._settle([item for item in items if isinstance(item, _Recorded)])
        if done:
            self._on_feedback()

    def _refuse(self, item: _Recorded | _Feedback, error: Exception) -> None:
        if isinstance(item, _Feedback):
            item.written.set_exception(error)
        elif self._set_aside(item.record, error):
            self._settle([item])

    def _set_aside(self, record: Record, error: Exception) -> bool:
        """A call the database refuses for good must not block those behind it: it goes to a file of its own."""
        try:
            payload = record.read()
            path = self._folder / f"{_named.decode(payload).id}.refused"
            path.write_bytes(payload)
        except (OSError, msgspec.DecodeError) as unkept:
            log.error("a call was refused by the database (%s); it stays in the journal: %s", error, unkept)
            return False
        log.error("a call was refused by the database (%s); kept in %s", error, path)
        return True

    def _settle(self, items: Sequence[_Recorded]) -> None:
        if items:
            self._loop.call_soon_threadsafe(self._settled, items)

    def _settled(self, items: Sequence[_Recorded]) -> None:
        for item in items:
            self._recorded_s.popleft()
            self._journal.settled(item.record)


def _refuse_feedback(items: Sequence[_Recorded | _Feedback], error: Exception) -> list[_Recorded]:
    for item in items:
        if isinstance(item, _Feedback):
            item.written.set_exception(error)
    return [item for item in items if isinstance(item, _Recorded)]
