"""Run due work in batches; where a batch fails, run its items one by one and set aside those that cannot be done.

Otherwise one feedback, trajectory or group that breaks a sweep would block all others for ever.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import InterfaceError, OperationalError

BATCH = 200
"""Feedback, trajectories or groups per transaction: enough to share its cost, few enough to let others write."""
AWAY = (OperationalError, InterfaceError)
"""The database is unreachable, busy, or has broken a deadlock: nothing is wrong with the work."""

log = logging.getLogger(__name__)
One = TypeVar("One")


@dataclass(frozen=True, slots=True)
class Work(Generic[One]):
    """One kind of due work; items are grouped by project."""

    find: Callable[[Connection, int], dict[str, list[One]]]
    """Return at most this many due items, the first due first; `do` locks what else it needs."""
    do: Callable[[Connection, dict[str, list[One]]], None]
    again: Callable[[Connection, str, One], dict[str, list[One]]]
    """Read one of the items again in another transaction, locked as `find` does it."""
    set_aside: Callable[[Connection, str, One, str], None]
    """Record why the item is ignored from now on."""


def drain(engine: Engine, work: Work[One]) -> int:
    """Do all that is due, a batch per transaction; return the number of items.

    Raises:
        sqlalchemy.exc.OperationalError, InterfaceError: the database is unreachable. Each earlier transaction stays.
    """
    total = 0
    while True:
        try:
            with engine.begin() as connection:
                batch = work.find(connection, BATCH)
                work.do(connection, batch)
        except AWAY:
            raise
        except Exception:
            log.exception("a batch failed; its items are retried one by one")
            return total + _one_by_one(engine, work)
        done = sum(map(len, batch.values()))
        total += done
        if done < BATCH:
            return total


def _one_by_one(engine: Engine, work: Work[One]) -> int:
    with engine.begin() as connection:
        batch = work.find(connection, BATCH)
    for project, one in ((project, one) for project, several in batch.items() for one in several):
        try:
            with engine.begin() as connection:
                work.do(connection, work.again(connection, project, one))
        except AWAY:
            raise
        except Exception as error:
            log.exception("set aside: %s of %s", getattr(one, "id", one), project)
            with engine.begin() as connection:
                work.set_aside(
                    connection, project, one, f"a fault of Whetstone's, see judge.log: {type(error).__name__}"
                )
    return sum(map(len, batch.values()))
