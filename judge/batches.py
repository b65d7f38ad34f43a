"""Due work in batches: done together, one by one where that fails, and set aside what cannot be done. Knows no rule.

One feedback, trajectory or group at which a sweep breaks would else keep all the others waiting for ever.
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import InterfaceError, OperationalError

BATCH = 200
"""Feedback, trajectories or groups per transaction: long enough to share its cost, short enough to let others write."""
AWAY = (OperationalError, InterfaceError)
"""The database is away, busy, or has broken a deadlock: nothing is wrong with the work."""

log = logging.getLogger(__name__)
One = TypeVar("One")


@dataclass(frozen=True, slots=True)
class Work(Generic[One]):
    """One kind of due work; what is found is by project."""

    find: Callable[[Connection, int], dict[str, list[One]]]
    """At most so many that are due, the first due first; what else is to be locked, `do` locks."""
    do: Callable[[Connection, dict[str, list[One]]], None]
    again: Callable[[Connection, str, One], dict[str, list[One]]]
    """One that was found, in another transaction: locked as `find` does it."""
    set_aside: Callable[[Connection, str, One, str], None]
    """Write why it is left alone from now on."""


def drain(engine: Engine, work: Work[One]) -> int:
    """Do all that is due, a batch in a transaction; return how much was looked at.

    Raises:
        sqlalchemy.exc.OperationalError, InterfaceError: the database is away. Each transaction before that stands.
    """
    total = 0
    while True:
        try:
            with engine.begin() as connection:
                found = work.find(connection, BATCH)
                work.do(connection, found)
        except AWAY:
            raise
        except Exception:
            log.exception("a batch failed, each of it is done by itself")
            return total + _one_by_one(engine, work)
        done = sum(map(len, found.values()))
        total += done
        if done < BATCH:
            return total


def _one_by_one(engine: Engine, work: Work[One]) -> int:
    with engine.begin() as connection:
        found = work.find(connection, BATCH)
    for project, one in _apart(found):
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
    return sum(map(len, found.values()))


def _apart(found: dict[str, list[One]]) -> Iterator[tuple[str, One]]:
    return ((project, one) for project, several in found.items() for one in several)
