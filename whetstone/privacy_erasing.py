"""Deletions, as the transactions they take: short ones, which anybody can go on with wherever they were broken off.

`erasing` and its like give them one after the other; who runs them (`run`, or the proxy through its writer) sends back
what each returned. Knows the order of things; which rows go is the stores'.
"""

import logging
from collections.abc import Callable, Collection, Generator, Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import Any

from sqlalchemy import Connection, Engine

from migrations.database import giving_way
from whetstone import store_privacy as store
from whetstone import store_privacy_rows as rows
from whetstone.store_privacy import Erasure, Target

AT_ONCE = 100
"""Trajectories of one transaction."""
MOST_LOOKS = 20
"""So often in a row nothing but what others write to is found; then the rest waits for the judging worker."""

Transaction = Callable[[Connection], Any]
Transactions = Generator[Transaction, Any, dict[str, Any]]
"""What is to be run, each in a transaction of its own; the row of table `erasures` in the end."""

log = logging.getLogger(__name__)


def run(engine: Engine, transactions: Transactions) -> dict[str, Any]:
    """Run them all; the erasure as it stands then.

    Raises:
        sqlalchemy.exc.DBAPIError: the database is away. What was committed stands, and can be gone on with.
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
    """Delete what is there of the target; what steps have taken waits until they are over."""
    erasure = yield partial(store.open_erasure, target=target, now=now)
    yield store.await_writers
    if target.kind == "user":
        yield partial(rows.forget_user, target=target)
    return (yield from _going_on(erasure, target, now))


def going_on(erasure: Erasure, now: datetime) -> Transactions:
    """Go on with one that was broken off, or that waited."""
    # Of a user the name is not known any more, only what was found under it.
    target = None if erasure.kind == "user" else Target(erasure.project, erasure.kind, erasure.target)
    return (yield from _going_on(erasure, target, now))


def _going_on(erasure: Erasure, target: Target | None, now: datetime) -> Transactions:
    waiting: frozenset[str] = frozenset()
    if target is not None and target.kind == "age":
        while True:
            found = yield partial(store.find, target=target, asked_at=erasure.asked_at)
            ids = [one for one in found if one not in waiting]
            if not ids:
                break
            waiting |= yield from _deleting(erasure, ids, now)
        while (yield partial(rows.forget_old_feedback, target=target)):
            pass
    else:
        ids = list(erasure.waits_for or ())
        if erasure.waits_for is None and target is not None:
            ids = yield partial(store.find, target=target, asked_at=erasure.asked_at)
            # From here on anybody can go on, who need not know the name.
            yield partial(store.note_waiting, erasure=erasure, ids=ids)
        waiting = yield from _deleting(erasure, ids, now)
    row: dict[str, Any] = yield partial(store.close_erasure, erasure=erasure, waits_for=sorted(waiting), now=now)
    return row


def _deleting(erasure: Erasure, ids: Collection[str], now: datetime) -> Generator[Transaction, Any, frozenset[str]]:
    """Delete these trajectories; what is left are those that wait."""
    waiting: frozenset[str] = frozenset()
    todo, looks = sorted(ids), 0
    while todo and looks < MOST_LOOKS:
        busy: list[str] = []
        for some in _parts(todo):
            # Files first: without their rows nobody would know of them.
            for file in (yield partial(store.kept_files, project=erasure.project, ids=some)):
                file.unlink(missing_ok=True)
            left = yield partial(rows.delete_some, erasure=erasure, ids=some, now=now)
            waiting |= left.waiting
            busy += left.busy
        looks = looks + 1 if len(busy) == len(todo) else 0
        todo = busy
    return waiting | frozenset(todo)


def _parts(ids: Sequence[str]) -> list[Sequence[str]]:
    return [ids[start : start + AT_ONCE] for start in range(0, len(ids), AT_ONCE)]


def old_of(project: str, keep_days: float, now: datetime) -> Target:
    """What is older than a project keeps, to the hour."""
    before = (now - timedelta(days=keep_days)).replace(minute=0, second=0, microsecond=0)
    return Target(project, "age", before.isoformat())
