"""Run deletions as a series of short transactions, which any process can continue after an interruption.

`erasing` and `resume` yield the transactions one after the other; the caller (`run`, or the proxy through its writer)
runs each and sends its result back. `store` and `rows` contain the SQL.
"""

import logging
from collections.abc import Callable, Collection, Generator, Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import Any

from sqlalchemy import Connection, Engine

from whetstone.database.engine import giving_way
from whetstone.privacy import rows, store
from whetstone.privacy.store import Erasure, Target

AT_ONCE = 100
"""Trajectories deleted in one transaction."""
MOST_LOOKS = 20
"""After this many consecutive passes that find only trajectories in use by writers, the rest is left to the judging
worker."""

Transaction = Callable[[Connection], Any]
Transactions = Generator[Transaction, Any, dict[str, Any]]
"""Functions to run, each in a transaction of its own; returns the row of table `erasures`."""

log = logging.getLogger(__name__)


def run(engine: Engine, transactions: Transactions) -> dict[str, Any]:
    """Run all transactions and return the row of the erasure.

    Raises:
        sqlalchemy.exc.DBAPIError: the database is unavailable. What was committed remains, and the deletion can be
            continued.
    """
    result = None
    while True:
        try:
            transaction = transactions.send(result)
        except StopIteration as end:
            row: dict[str, Any] = end.value
            return row
        with giving_way(engine), engine.begin() as connection:
            result = transaction(connection)


def erasing(target: Target, now: datetime) -> Transactions:
    """Delete what matches the target; trajectories claimed by steps wait until those steps are over."""
    erasure = yield partial(store.open_erasure, target=target, now=now)
    yield store.await_writers
    if target.kind == "user":
        yield partial(rows.forget_user, target=target)
    return (yield from _resume(erasure, target, now))


def resume(erasure: Erasure, now: datetime) -> Transactions:
    """Continue a deletion that was interrupted or that waited."""
    # A user's name is no longer available, only its trajectories.
    target = None if erasure.kind == "user" else Target(erasure.project, erasure.kind, erasure.target)
    return (yield from _resume(erasure, target, now))


def _resume(erasure: Erasure, target: Target | None, now: datetime) -> Transactions:
    waiting: frozenset[str] = frozenset()
    if target is not None and target.kind == "age":
        while True:
            matching = yield partial(store.find, target=target, requested_at=erasure.requested_at)
            ids = [one for one in matching if one not in waiting]
            if not ids:
                break
            waiting |= yield from _delete(erasure, ids, now)
        while (yield partial(rows.forget_old_feedback, target=target)):
            pass
    else:
        ids = list(erasure.waits_for or ())
        if erasure.waits_for is None and target is not None:
            ids = yield partial(store.find, target=target, requested_at=erasure.requested_at)
            # From here on any process can continue without knowing the name.
            yield partial(store.note_waiting, erasure=erasure, ids=ids)
        waiting = yield from _delete(erasure, ids, now)
    row: dict[str, Any] = yield partial(store.close_erasure, erasure=erasure, waits_for=sorted(waiting), now=now)
    return row


def _delete(erasure: Erasure, ids: Collection[str], now: datetime) -> Generator[Transaction, Any, frozenset[str]]:
    """Delete these trajectories; return those that must wait."""
    waiting: frozenset[str] = frozenset()
    todo, looks = sorted(ids), 0
    while todo and looks < MOST_LOOKS:
        busy: list[str] = []
        for some in _parts(todo):
            # Delete files first: without their rows nothing would refer to them.
            for file in (yield partial(store.failed_row_files, project=erasure.project, ids=some)):
                file.unlink(missing_ok=True)
            remainder = yield partial(rows.delete_some, erasure=erasure, ids=some, now=now)
            waiting |= remainder.waiting
            busy += remainder.busy
        looks = looks + 1 if len(busy) == len(todo) else 0
        todo = busy
    return waiting | frozenset(todo)


def _parts(ids: Sequence[str]) -> list[Sequence[str]]:
    return [ids[start : start + AT_ONCE] for start in range(0, len(ids), AT_ONCE)]


def old_of(project: str, keep_days: float, now: datetime) -> Target:
    """Return the target of what is older than the project's retention time, to the hour."""
    before = (now - timedelta(days=keep_days)).replace(minute=0, second=0, microsecond=0)
    return Target(project, "age", before.isoformat())
