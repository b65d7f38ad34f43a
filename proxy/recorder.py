"""From a served call to SQL: the journal before the last byte, batches by one writer thread after it.

Knows when things are durable; the meaning of rows is the store's. Used from one event loop.
"""

import asyncio
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec
from sqlalchemy.exc import OperationalError, SQLAlchemyError

from proxy.call import Call
from proxy.errors import NotRecorded
from proxy.journal import Journal, Segment, left_behind
from proxy.store import Store

BATCH = 200
RETRY_S = 1.0

log = logging.getLogger(__name__)
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Call).decode


class _Feedback(msgspec.Struct, frozen=True):
    rows: list[dict[str, Any]]
    ids: Future[list[str]]


class _Recorded(msgspec.Struct, frozen=True):
    call: Call
    segment: Segment


class Recorder:
    """Takes calls and feedback. `start` first, `close` last."""

    def __init__(self, store: Store, folder: Path, on_feedback: Callable[[], None]) -> None:
        self._store = store
        self._folder = folder
        self._on_feedback = on_feedback
        self._queue: queue.SimpleQueue[_Recorded | _Feedback | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write, name="recorder", daemon=True)
        self._unwritten = 0

    def start(self) -> None:
        """Read what dead processes left behind into SQL, open the journal, start the writer thread.

        Raises:
            OSError: the journal's folder cannot be written.
            sqlalchemy.exc.SQLAlchemyError: the database does not take what was left behind.
        """
        self._journal = Journal(self._folder)
        self._loop = asyncio.get_running_loop()
        for path, records in left_behind(self._folder):
            with self._store.engine.begin() as connection:
                self._store.write_calls(connection, [_decode(record) for record in records])
            path.unlink()
            log.info("recovered %d calls from %s", len(records), path.name)
        self._thread.start()

    @property
    def unwritten(self) -> int:
        """Calls in the journal that SQL does not have yet."""
        return self._unwritten

    def record(self, call: Call) -> None:
        """Make a call durable, before its last byte goes out.

        Raises:
            NotRecorded: the journal cannot be written; nothing of the call is kept.
        """
        try:
            segment = self._journal.append(_encode(call))
        except OSError as error:
            log.error("the journal cannot be written: %s", error)
            raise NotRecorded(
                f"the answer could not be recorded ({error.strerror or error}); free space in the data folder"
            ) from error
        self._unwritten += 1
        self._queue.put(_Recorded(call, segment))

    async def feedback(self, rows: list[dict[str, Any]]) -> list[str]:
        """Commit feedback; return its ids.

        Raises:
            NotRecorded: the database did not take it; nothing of it is kept.
        """
        ids: Future[list[str]] = Future()
        self._queue.put(_Feedback(rows, ids))
        try:
            return await asyncio.wrap_future(ids)
        except SQLAlchemyError as error:
            raise NotRecorded(f"the feedback was not stored ({type(error).__name__}); send it again") from error

    def close(self) -> None:
        """Write what is left and stop. What the database does not take stays in the journal."""
        self._queue.put(None)
        self._thread.join(timeout=10)
        self._journal.close()

    def _write(self) -> None:
        while batch := self._next_batch():
            open_ended = batch[-1] is not None
            items = [item for item in batch if item is not None]
            try:
                self._commit(items)
            except OperationalError as error:
                log.error("the database does not take records, trying again: %s", error.orig)
                if not self._retry(items):
                    return
            except SQLAlchemyError:
                log.exception("a batch was refused, writing one by one")
                self._one_by_one(items)
            if not open_ended:
                return

    def _next_batch(self) -> list[_Recorded | _Feedback | None]:
        batch = [self._queue.get()]
        while batch[-1] is not None and len(batch) < BATCH:
            try:
                batch.append(self._queue.get_nowait())
            except queue.Empty:
                break
        return batch

    def _commit(self, items: Sequence[_Recorded | _Feedback]) -> None:
        """One transaction for all of them, in the order they came."""
        done: list[tuple[_Feedback, list[str]]] = []
        try:
            with self._store.engine.begin() as connection:
                for item in items:
                    if isinstance(item, _Recorded):
                        self._store.write_calls(connection, [item.call])
                    else:
                        done.append((item, self._store.insert_feedback(connection, item.rows)))
        except SQLAlchemyError:
            self._store.forget_tails()
            raise
        for feedback, ids in done:
            feedback.ids.set_result(ids)
        self._settle([item for item in items if isinstance(item, _Recorded)])
        if done:
            self._on_feedback()

    def _retry(self, items: list[_Recorded | _Feedback]) -> bool:
        """Feedback is refused at once, its app is waiting; calls wait for the database. False: closed meanwhile."""
        for item in items:
            if isinstance(item, _Feedback):
                item.ids.set_exception(OperationalError("", None, Exception("database away")))
        calls = [item for item in items if isinstance(item, _Recorded)]
        while calls:
            try:
                self._commit(calls)
                break
            except OperationalError:
                try:
                    waiting = self._queue.get(timeout=RETRY_S)
                except queue.Empty:
                    continue
                if waiting is None:
                    return False
                if isinstance(waiting, _Feedback):
                    waiting.ids.set_exception(OperationalError("", None, Exception("database away")))
                else:
                    calls.append(waiting)
        return True

    def _one_by_one(self, items: Sequence[_Recorded | _Feedback]) -> None:
        for item in items:
            try:
                self._commit([item])
            except SQLAlchemyError as error:
                if isinstance(item, _Feedback):
                    item.ids.set_exception(error)
                else:
                    self._set_aside(item, error)

    def _set_aside(self, item: _Recorded, error: SQLAlchemyError) -> None:
        """A call the database refuses for good must not block those behind it: it goes to a file of its own."""
        path = self._folder / f"{item.call.id}.refused"
        path.write_bytes(_encode(item.call))
        log.error("call %s was refused by the database (%s); kept in %s", item.call.id, error, path)
        self._settle([item])

    def _settle(self, items: Sequence[_Recorded]) -> None:
        if items:
            self._loop.call_soon_threadsafe(self._settled, items)

    def _settled(self, items: Sequence[_Recorded]) -> None:
        self._unwritten -= len(items)
        for item in items:
            self._journal.settled(item.segment, 1)
