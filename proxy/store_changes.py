"""Whether anything was written since one looked last, so that what is read again and again is read only then.

What is remembered so depends on no call: this process writes them all the time, and nothing is read for that. SQLite
tells it in microseconds. PostgreSQL does not: there all is read every time.
"""

import sqlite3
import threading
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from sqlalchemy import Engine

from migrations.database import Transactions

Read = TypeVar("Read")


class Changes:
    """Remembers what was read, until any process has written. Used from any thread; `close` last."""

    def __init__(self, engine: Engine, calls: Transactions | None = None) -> None:
        """`calls`: the transactions in which this process writes its calls; `committed` tells of all else that it
        writes in them."""
        self._calls = calls
        self._committed = 0
        self._file = engine.url.database if engine.dialect.name == "sqlite" else None
        self._looking = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        self._read: dict[Hashable, tuple[Hashable, Any]] = {}

    def unless(self, name: Hashable, read: Callable[[], Read]) -> Read:
        """What `read` says, or said under this name when nothing had been written since. It must not be changed.

        Raises:
            Exception: whatever `read` does; nothing is remembered then.
        """
        # Looked at first: what is written while it reads is read again.
        mark = self._mark()
        if mark is None:
            return read()
        known = self._read.get(name)
        if known is not None and known[0] == mark:
            value: Read = known[1]
            return value
        value = read()
        self._read[name] = (mark, value)
        return value

    def committed(self) -> None:
        """Something other than calls was written among them. Told by whoever writes, before anybody else is."""
        self._committed += 1

    def close(self) -> None:
        """Let go of the file."""
        with self._looking:
            if self._connection is not None:
                self._connection.close()
            self._connection, self._file = None, None

    def _mark(self) -> Hashable:
        """Another value after each commit, but of this process's calls; None where that cannot be told."""
        if self._calls is not None:
            committed = self._committed
            if (elsewhere := self._calls.elsewhere()) is not None:
                return committed, elsewhere
        return self._mark_of_all()

    def _mark_of_all(self) -> int | None:
        """Likewise, after each commit of anybody's."""
        with self._looking:
            if self._file is None:
                return None
            try:
                if self._connection is None:
                    # Its own: the number counts the commits of all other connections. It never waits.
                    self._connection = sqlite3.connect(self._file, timeout=0, check_same_thread=False)
                return int(self._connection.execute("PRAGMA data_version").fetchone()[0])
            except sqlite3.Error:
                self._connection = None
                self._read.clear()  # another connection counts anew
                return None
