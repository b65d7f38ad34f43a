"""Detect whether anything was written since the last read, so that repeated reads are cached until then.

A cached value must not depend on calls: this process writes calls all the time, and they do not invalidate it. SQLite
reports changes in microseconds. PostgreSQL does not report them; there every read goes to the database.
"""

import sqlite3
import threading
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from sqlalchemy import Engine

from whetstone.database.engine import Transactions

Read = TypeVar("Read")


class Changes:
    """Caches what was read until any process writes. Thread-safe; call `close` last."""

    def __init__(self, engine: Engine, calls: Transactions | None = None) -> None:
        """`calls`: the transactions in which this process writes its calls. Call `committed` after any other write in
        them."""
        self._calls = calls
        self._committed = 0
        self._file = engine.url.database if engine.dialect.name == "sqlite" else None
        self._looking = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        self._read: dict[Hashable, tuple[Hashable, Any]] = {}

    def unless(self, name: Hashable, read: Callable[[], Read]) -> Read:
        """Return the result of `read`, or the cached one of this name if nothing was written since. Do not modify it.

        Raises:
            Exception: any error of `read`; then nothing is cached.
        """
        # Taken before the read, so that a write during it causes another read.
        mark = self._mark()
        if mark is None:
            return read()
        known = self._read.get(name)
        if known is None or known[0] != mark:
            known = self._read[name] = (mark, read())
        value: Read = known[1]
        return value

    def committed(self) -> None:
        """Note that the transactions contained a write other than calls. Call it before others are notified."""
        self._committed += 1

    def close(self) -> None:
        """Close the database file."""
        with self._looking:
            if self._connection is not None:
                self._connection.close()
            self._connection, self._file = None, None

    def _mark(self) -> Hashable:
        """Return a value that changes with each commit except those of this process's calls; None if unknown."""
        committed = self._committed
        if self._calls is not None and (elsewhere := self._calls.elsewhere()) is not None:
            return committed, elsewhere
        # Without those transactions, a value that changes with each commit of any process.
        with self._looking:
            if self._file is None:
                return None
            try:
                if self._connection is None:
                    # A separate connection: the number counts the commits of all other connections. It never waits.
                    self._connection = sqlite3.connect(self._file, timeout=0, check_same_thread=False)
                return int(self._connection.execute("PRAGMA data_version").fetchone()[0])
            except sqlite3.Error:
                self._connection = None
                self._read.clear()  # another connection starts with another count
                return None
