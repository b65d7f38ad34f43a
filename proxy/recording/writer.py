"""Write to SQL in one thread: batches in order of arrival, retried while the database cannot be reached."""

import contextlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
from sqlalchemy import Connection
from sqlalchemy.exc import InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from proxy.domain.call import Call
from proxy.recording.journal.codec import JournalledFeedback, decode, id_of
from proxy.recording.journal.segment import Record
from proxy.recording.store import Store
from proxy.supervision import note_unexpected

BATCH = 200
BATCH_BYTES = 8 * 2**20
"""Most bytes of records in one transaction, which has all of them in memory at once; a larger record gets a transaction
of its own."""
FEW = 100
"""A transaction with at most this many items pauses for the event loop; with more items the writer must keep up."""
EVERY_S = 0.05
"""Time between transactions that no request waits for: each transaction costs more than ten further calls in it."""
RETRY_S = 1.0
"""Between two tries while the database cannot be reached."""
SILENT_S = 10.0
"""If a transaction takes longer than this, the database counts as away, whatever its result."""
CLOSE_TIMEOUT_S = 10.0

AWAY = (OperationalError, InterfaceError, PoolTimeout)
"""The database cannot be reached or is busy: the same rows may succeed later."""

log = logging.getLogger(__name__)


class SyncWrite(msgspec.Struct, frozen=True):
    """A write that a request waits for. It is never journalled: while the database cannot be reached it is refused."""

    write: Callable[[Connection], Any]
    written: Future[Any]
    first: bool = False
    """Run it before all other writes of its transaction."""


class JournalledItem(msgspec.Struct, frozen=True):
    """A record that stays in the journal until SQL has it."""

    value_in_memory: Call | JournalledFeedback | None
    """The decoded value; None: it is read from the journal when it is written."""
    record: Record

    @property
    def value(self) -> Call | JournalledFeedback:
        return decode(self.record.read()) if self.value_in_memory is None else self.value_in_memory


class Writer:
    """The thread that writes to SQL. Call `start` first, `close` last."""

    def __init__(
        self,
        store: Store,
        refused: Path,
        on_calls: Callable[[Sequence[Call]], None],
        on_feedback: Callable[[], None],
        on_settled: Callable[[Sequence[JournalledItem]], None],
    ) -> None:
        """Create the writer.

        `refused`: the folder for records that SQL refuses permanently. The three callbacks run in the writer's thread,
        after a commit; `on_settled` gets the records that the journal no longer needs.
        """
        self._store = store
        self._refused = refused
        self._on_calls = on_calls
        self._on_feedback = on_feedback
        self._on_settled = on_settled
        self._away_since_s: float | None = None
        self._began_s: float | None = None
        """When the current transaction began."""
        self.queue: queue.SimpleQueue[JournalledItem | SyncWrite | None] = queue.SimpleQueue()
        """Takes what nothing waits for, from any thread; `put` takes the rest."""
        self._closing = threading.Event()
        self._hurry = threading.Event()
        """Set when a request waits for the last item."""
        self._next_s = 0.0
        """When the next transaction may begin that no request waits for (monotonic)."""
        self._one_by_one = 0
        """This many of the next items were refused as a batch; each of them is written in a transaction of its own."""
        self._backlog: deque[JournalledItem | SyncWrite] = deque()
        """Items taken from the queue and not committed yet. Used by the writer's thread only."""
        self.dead = False
        """Whether the thread ended by an error: nothing reaches SQL any more."""
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)

    @property
    def away_since_s(self) -> float | None:
        """Return since when the database refuses writes or is silent (seconds since the epoch); None while it accepts
        them."""
        began_s = self._began_s
        silent = began_s is not None and time.time() - began_s > SILENT_S
        return self._away_since_s or (began_s if silent else None)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def put(self, waiting: SyncWrite) -> None:
        """Queue a write that a request waits for."""
        if self.dead:
            _refuse_dead(waiting)
            return
        self.queue.put(waiting)
        self._hurry.set()

    def close(self) -> None:
        """Write what is left and stop. What the database does not accept now stays in the journal."""
        self._closing.set()
        self.queue.put(None)
        self._hurry.set()
        self._thread.join(CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        """Write until `close`."""
        ended = False
        try:
            while not (ended and (not self._backlog or self._away_since_s is not None)):
                ended = self._fill(self._backlog) or ended
                self._commit_next_batch(self._backlog)
        except BaseException as error:
            self._end_dead(error)
        self._store.transactions.close()

    def _end_dead(self, error: BaseException) -> None:
        """Log that nothing reaches SQL any more, and refuse writes that requests wait for. The journal has the rest."""
        log.critical(
            "the thread that writes to SQL ended by an error (%s); the proxy stops, its next start writes what the "
            "journal has",
            type(error).__name__,
            exc_info=error,
        )
        self._away_since_s = self._away_since_s or time.time()
        self.dead = True
        while not self.queue.empty():
            if (item := self.queue.get()) is not None:
                self._backlog.append(item)
        for item in self._backlog:
            if isinstance(item, SyncWrite):
                _refuse_dead(item)

    def _fill(self, backlog: deque[JournalledItem | SyncWrite]) -> bool:
        """Move queued items to the backlog. If there is nothing to do, wait for an item, and then for more to go with
        it. Return whether the last item has arrived."""
        if self._away_since_s is not None:
            self._closing.wait(RETRY_S)
        elif not backlog:
            if (item := self.queue.get()) is None:
                return True
            backlog.append(item)
            if not isinstance(item, SyncWrite):
                self._hurry.wait(max(0.0, self._next_s - time.monotonic()))
        self._hurry.clear()
        with contextlib.suppress(queue.Empty):
            while (item := self.queue.get_nowait()) is not None:
                backlog.append(item)
            return True
        return False

    def _commit_next_batch(self, backlog: deque[JournalledItem | SyncWrite]) -> None:
        """Commit the first items and remove them. While the database cannot be reached, refuse the writes that requests
        wait for."""
        if not backlog and self._away_since_s is None:
            return
        batch = _next(backlog, 1 if self._one_by_one else BATCH)
        self._began_s = time.time()
        self._next_s = time.monotonic() + EVERY_S
        try:
            calls, answers = self._commit(batch)
        except AWAY as error:
            self._is_away(error)
            for item in backlog:
                if isinstance(item, SyncWrite):
                    item.written.set_exception(error)
            self._backlog = deque(item for item in backlog if isinstance(item, JournalledItem))
            return
        except Exception as error:
            if len(batch) > 1:
                log.warning("a batch was refused (%s), writing one by one", type(error).__name__)
                self._one_by_one = len(batch)
                return
            self._is_back()
            self._reject(batch[0], error)
        else:
            self._announce(batch, calls, answers)
        self._one_by_one = max(0, self._one_by_one - 1)
        for _ in batch:
            backlog.popleft()

    def _commit(self, items: Sequence[JournalledItem | SyncWrite]) -> tuple[list[Call], list[tuple[SyncWrite, Any]]]:
        """Write all items in one transaction: first the `first` writes, then feedback and other writes, then calls;
        each in order of arrival. Return the calls, and the writes that a request waits for, each with what it returned.

        Feedback comes before trajectories: the judge locks them in this order.
        """
        calls: list[Call] = []
        others: list[SyncWrite | JournalledFeedback] = []
        answers: list[tuple[SyncWrite, Any]] = []
        try:
            with self._store.transactions.begin() as connection:
                for item in items:
                    value = item if isinstance(item, SyncWrite) else item.value_in_memory or item.value
                    if isinstance(value, Call):
                        calls.append(value)
                    else:
                        others.append(value)
                for one in sorted(others, key=lambda one: not (isinstance(one, SyncWrite) and one.first)):
                    if isinstance(one, SyncWrite):
                        answers.append((one, one.write(connection)))
                    else:
                        self._store.insert_feedback(connection, one.rows)
                self._store.calls.write(connection, calls, pauses=len(items) <= FEW)
        except Exception:
            self._store.calls.tails.forget()
            raise
        return calls, answers

    def _announce(
        self,
        items: Sequence[JournalledItem | SyncWrite],
        calls: Sequence[Call],
        answers: Sequence[tuple[SyncWrite, Any]],
    ) -> None:
        """Report what was committed. The transaction is over: an error here is not the database's, and does not stop
        the other reports."""
        self._is_back()
        has_others = len(calls) < len(items)
        if has_others:
            self._store.changes.committed()
        for waiting, result in answers:
            _call("answer", waiting.written.set_result, result)
        _call("on_calls", self._on_calls, calls)
        if recorded := [item for item in items if isinstance(item, JournalledItem)]:
            _call("on_settled", self._on_settled, recorded)
        if has_others:
            _call("on_feedback", self._on_feedback)

    def _reject(self, item: JournalledItem | SyncWrite, error: Exception) -> None:
        """Refuse a write that a request waits for. Move a record that the database refuses permanently to a file of its
        own, so that it does not block later records."""
        if isinstance(item, SyncWrite):
            item.written.set_exception(error)
            return
        try:
            payload = item.record.read()
            path = self._refused / f"{id_of(payload)}.refused"
            path.write_bytes(payload)
        except Exception as failure:  # one record must not end the thread, which would meet it again at every start
            log.exception("the database refused a record (%s); it stays in the journal: %s", error, failure)
            return
        log.error("the database refused a record (%s); it is saved in %s", error, path)
        _call("on_settled", self._on_settled, [item])

    def _is_away(self, error: Exception) -> None:
        self._began_s = None
        if self._away_since_s is None:
            self._away_since_s = time.time()
            # Log the text, not the error: its frames hold the calls, which would stay in memory with it.
            log.error("the database does not take records, trying again every %g s: %s", RETRY_S, str(error))

    def _is_back(self) -> None:
        self._began_s = None
        if self._away_since_s is not None:
            log.warning("the database takes records again, after %.0f s", time.time() - self._away_since_s)
            self._away_since_s = None


def _call(name: str, callback: Callable[..., object], *values: object) -> None:
    """Call a callback after a transaction; log and count its error."""
    try:
        callback(*values)
    except Exception as error:
        note_unexpected("writer", f"{name}, called after a transaction,", error)


def _refuse_dead(waiting: SyncWrite) -> None:
    if not waiting.written.done():
        waiting.written.set_exception(PoolTimeout("the thread that writes to SQL has ended"))


def _next(backlog: deque[JournalledItem | SyncWrite], most: int) -> list[JournalledItem | SyncWrite]:
    """Return the first items, as many as one transaction may have in memory."""
    batch: list[JournalledItem | SyncWrite] = []
    size_bytes = 0
    for item in islice(backlog, most):
        size_bytes += item.record.length if isinstance(item, JournalledItem) else 0
        if batch and size_bytes > BATCH_BYTES:
            break
        batch.append(item)
    return batch
