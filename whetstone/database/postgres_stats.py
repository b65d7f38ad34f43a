"""Update PostgreSQL's statistics of tables that begin to fill.

Until autovacuum's first look at a table, which takes up to a minute, PostgreSQL plans by guesses. The check of a
foreign key is planned once, while there are a few rows. For each new completion it may then read all trajectories of
the project, by an index that begins with the project as the key does: in a new database under load this allows only a
tenth of the calls per second, and fewer with each call.
"""

from collections.abc import Sequence

from sqlalchemy import Connection, Table, bindparam, text

ENOUGH = 500
"""Number of rows from which PostgreSQL's plans are right; with fewer it may as well read them all."""

_UNKNOWN = text(
    "SELECT relname FROM pg_class WHERE relname IN :names AND relkind = 'r' AND pg_table_is_visible(oid) "
    "AND reltuples < :enough"
).bindparams(bindparam("names", expanding=True))


class Statistics:
    """Triggers ANALYZE once for tables that one thread fills."""

    def __init__(self, tables: Sequence[Table]) -> None:
        self._names = [table.name for table in tables]
        self._rows: int | None = 0
        """Rows written so far; None once the tables have been analysed."""

    def begin(self, connection: Connection, rows: int) -> None:
        """Note that a transaction of the caller, on PostgreSQL, begins that writes this many rows. In the first one
        after ENOUGH rows, the tables that still lack statistics are analysed. Tables that another process is analysing
        are skipped: waiting for it saves nothing, and two that wait for each other deadlock. If the role lacks the
        right, PostgreSQL only warns."""
        if self._rows is None:
            return
        if self._rows < ENOUGH:
            self._rows += rows
            return
        self._rows = None
        unknown = connection.execute(_UNKNOWN, {"names": self._names, "enough": ENOUGH}).scalars().all()
        if unknown:
            connection.exec_driver_sql(f"ANALYZE (SKIP_LOCKED) {', '.join(sorted(unknown))}")
