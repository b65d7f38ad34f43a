"""The one thread that writes to SQL: batches in the order things came, again and again while the database is away.

Knows transactions and what to do when one fails; what is taken, and when it is durable, is the recorder's.
"""

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

from proxy.background import note_unexpected
from proxy.call import Call
from proxy.records import Spooled, decode, id_of
from proxy.segments import Record
from proxy.store import Store

BATCH = 200
BATCH_BYTES = 8 * 2**20
"""Of records in one transaction, which has all of them in memory at once; one that is larger goes alone."""
FEW = 100
"""A transaction of no more lets the event loop go first; with more the writer has to keep up."""
EVERY_S = 0.05
"""From one transaction to the next where nobody waits for it: each costs more than what ten calls add to it."""
RETRY_S = 1.0
"""Between two tries while the database is away."""
SILENT_S = 10.0
"""A transaction that takes longer than this means that the database is away, whatever comes of it."""
CLOSE_TIMEOUT_S = 10.0

AWAY = (OperationalError, InterfaceError, PoolTimeout)
"""The database cannot be reached or is busy: the same rows may be taken later."""

log = logging.getLogger(__name__)


class Asked(msgspec.Struct, frozen=True):
    """A write that somebody waits for. It is never kept: where the database is away it is refused."""

    write: Callable[[Connection], Any]
    written: Future[Any]
    first: bool = False
    """Before all else of its transaction."""


class Recorded(msgspec.Struct, frozen=True):
    """What the journal has, until SQL has it."""

    kept: Call | Spooled | None
    """None: it is read from the journal when its turn comes."""
    record: Record

    @property
    def value(self) -> Call | Spooled:
        return decode(self.record.read()) if self.kept is None else self.kept


class _Committed(msgspec.Struct, frozen=True):
    """What one transaction brought to SQL."""

    calls: list[Call]
    answers: list[tuple[Asked, Any]]
    """Writes that somebody waits for, and what each returned."""
    settled: list[Recorded]
    """Records that the journal need not keep any more."""
    others: bool
    """There was something other than calls."""


class Writer:
    """`start` first, `close` last; `put` in between, from any thread."""

    def __init__(
        self,
        store: Store,
        refused: Path,
        on_calls: Callable[[Sequence[Call]], None],
        on_feedback: Callable[[], None],
        on_settled: Callable[[Sequence[Recorded]], None],
    ) -> None:
        """`refused`: the folder for what SQL refuses for good. All three are called in the writer's thread, of what is
        committed: `on_settled` of records that need not be kept any more."""
        self._store = store
        self._transactions = store.transactions
        self._refused = refused
        self._on_calls = on_calls
        self._on_feedback = on_feedback
        self._on_settled = on_settled
        self._away_since_s: float | None = None
        self._began_s: float | None = None
        """When the transaction under way began."""
        self._queue: queue.SimpleQueue[Recorded | Asked | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._hurry = threading.Event()
        """Somebody waits for what was put last."""
        self._next_s = 0.0
        """When the next transaction may begin where nobody waits for it (monotonic)."""
        self._one_by_one = 0
        """So many items to come were refused together, and are written each in a transaction of its own."""
        self._backlog: deque[Recorded | Asked] = deque()
        """What was taken from the queue and is not committed; the thread's own."""
        self.dead = False
        """The thread ended by an error: nothing reaches SQL any more."""
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)

    @property
    def away_since_s(self) -> float | None:
        """Since when the database takes nothing, or is silent (seconds since the epoch); None while it does."""
        began_s = self._began_s
        silent = began_s is not None and time.time() - began_s > SILENT_S
        return self._away_since_s or (began_s if silent else None)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def put(self, item: Recorded | Asked) -> None:
        """Have it written in its turn."""
        if isinstance(item, Asked):
            if self.dead:
                _refuse_dead(item)
                return
            self._queue.put(item)
            self._hurry.set()
        else:
            self._queue.put(item)

    def close(self) -> None:
        """Write what is left and stop. What the database does not take now is left."""
        self._closing.set()
        self._queue.put(None)
        self._hurry.set()
        self._thread.join(CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        try:
            self._write()
        except BaseException as error:
            self._end_dead(error)
        self._transactions.close()

    def _write(self) -> None:
        """Write until `close`."""
        backlog, ended = self._backlog, False
        while not (ended and (not backlog or self._away_since_s is not None)):
            ended = self._fill(backlog) or ended
            backlog = self._backlog = self._take(backlog)

    def _end_dead(self, error: BaseException) -> None:
        """Log that nothing reaches SQL any more, refuse writes that somebody waits for; the journal has the rest."""
        log.critical(
            "the thread that writes to SQL ended by an error (%s); the proxy stops, its next start writes what the "
            "journal has",
            type(error).__name__,
            exc_info=error,
        )
        self._away_since_s = self._away_since_s or time.time()
        self.dead = True
        while not self._queue.empty():
            if (item := self._queue.get()) is not None:
                self._backlog.append(item)
        for item in self._backlog:
            if isinstance(item, Asked):
                _refuse_dead(item)

    def _fill(self, backlog: deque[Recorded | Asked]) -> bool:
        """Take over what has come; wait for it where there is nothing to do, and then for more to go with it. Whether
        that was the last."""
        away = self._away_since_s is not None
        if away:
            self._closing.wait(RETRY_S)
        elif not backlog:
            if (item := self._queue.get()) is None:
                return True
            backlog.append(item)
            if not isinstance(item, Asked):
                self._hurry.wait(max(0.0, self._next_s - time.monotonic()))
        self._hurry.clear()
        with contextlib.suppress(queue.Empty):
            while (item := self._queue.get_nowait()) is not None:
                backlog.append(item)
            return True
        return False

    def _take(self, backlog: deque[Recorded | Asked]) -> deque[Recorded | Asked]:
        """Commit the first of them; return what is left. While the database is away nobody is kept waiting for it."""
        if not backlog and self._away_since_s is None:
            return backlog
        batch = _next(backlog, 1 if self._one_by_one else BATCH)
        self._began_s = time.time()
        self._next_s = time.monotonic() + EVERY_S
        try:
            committed = self._commit(batch)
        except AWAY as error:
            self._is_away(error)
            for item in backlog:
                if isinstance(item, Asked):
                    item.written.set_exception(error)
            return deque(item for item in backlog if isinstance(item, Recorded))
        except Exception as error:
            if len(batch) > 1:
                log.warning("a batch was refused (%s), writing one by one", type(error).__name__)
                self._one_by_one = len(batch)
                return backlog
            self._is_back()
            self._refuse(batch[0], error)
        else:
            self._announce(committed)
        self._one_by_one = max(0, self._one_by_one - 1)
        for _ in batch:
            backlog.popleft()
        return backlog

    def _commit(self, items: Sequence[Recorded | Asked]) -> _Committed:
        """One transaction for all of them: what is to be first, feedback, calls; each in the order they came.

        Feedback before trajectories: in this order the judge locks them.
        """
        calls: list[Call] = []
        others: list[Asked | Spooled] = []
        answers: list[tuple[Asked, Any]] = []
        try:
            with self._transactions.begin() as connection:
                for item in items:
                    value = item if isinstance(item, Asked) else item.kept or item.value
                    if isinstance(value, Call):
                        calls.append(value)
                    else:
                        others.append(value)
                for one in sorted(others, key=lambda one: not (isinstance(one, Asked) and one.first)):
                    if isinstance(one, Asked):
                        answers.append((one, one.write(connection)))
                    else:
                        self._store.insert_feedback(connection, one.rows)
                self._store.calls.write(connection, calls, pauses=len(items) <= FEW)
        except Exception:
            self._store.calls.tails.forget()
            raise
        return _Committed(calls, answers, [item for item in items if isinstance(item, Recorded)], bool(others))

    def _announce(self, committed: _Committed) -> None:
        """Report what SQL has now. The transaction is over: an error here is not the database's, and stops no other
        report."""
        self._is_back()
        if committed.others:
            self._store.changes.committed()
        for asked, result in committed.answers:
            _call("answer", asked.written.set_result, result)
        _call("on_calls", self._on_calls, committed.calls)
        if committed.settled:
            _call("on_settled", self._on_settled, committed.settled)
        if committed.others:
            _call("on_feedback", self._on_feedback)

    def _refuse(self, item: Recorded | Asked, error: Exception) -> None:
        if isinstance(item, Asked):
            item.written.set_exception(error)
        elif self._set_aside(item.record, error):
            _call("on_settled", self._on_settled, [item])

    def _set_aside(self, record: Record, error: Exception) -> bool:
        """What the database refuses for good must not block what is behind it: it goes to a file of its own."""
        try:
            payload = record.read()
            path = self._refused / f"{id_of(payload)}.refused"
            path.write_bytes(payload)
        except Exception as unkept:  # one record must not end the thread, which would find it again at every start
            log.exception("a record was refused by the database (%s); it stays in the journal: %s", error, unkept)
            return False
        log.error("a record was refused by the database (%s); kept in %s", error, path)
        return True

    def _is_away(self, error: Exception) -> None:
        self._began_s = None
        if self._away_since_s is None:
            self._away_since_s = time.time()
            # In words: whoever keeps the error keeps the calls that its frames hold.
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


def _refuse_dead(asked: Asked) -> None:
    if not asked.written.done():
        asked.written.set_exception(PoolTimeout("the thread that writes to SQL has ended"))


def _next(backlog: deque[Recorded | Asked], most: int) -> list[Recorded | Asked]:
    """The first of them, so many that one transaction may have them in memory."""
    batch = list(islice(backlog, most))
    if sum([item.record.length for item in batch if isinstance(item, Recorded)]) <= BATCH_BYTES:
        return batch
    batch, size_bytes = [], 0
    for item in backlog:
        size_bytes += item.record.length if isinstance(item, Recorded) else 0
        if len(batch) == most or (batch and size_bytes > BATCH_BYTES):
            break
        batch.append(item)
    return batch
