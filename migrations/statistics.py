"""PostgreSQL's statistics of tables that begin to fill. Knows its catalogue; no table of ours.

Until autovacuum has looked at a table for the first time, which takes it up to a minute, PostgreSQL plans by guesses.
The check of a foreign key is planned once, when there are a few rows, and then for each completion that comes it may
read all trajectories of the project, by an index that begins with the project as the key does: in a new database under
load that is a tenth of the calls a second, and fewer with each.
"""

from collections.abc import Sequence

from sqlalchemy import Connection, Table, bindparam, text

ENOUGH = 500
"""Rows from which on its plans are right: of fewer it may as well read all."""

_UNKNOWN = text(
    "SELECT relname FROM pg_class WHERE relname IN :names AND relkind = 'r' AND pg_table_is_visible(oid) "
    "AND reltuples < :enough"
).bindparams(bindparam("names", expanding=True))


class Statistics:
    """Of tables that one thread fills."""

    def __init__(self, tables: Sequence[Table]) -> None:
        self._names = [table.name for table in tables]
        self._rows: int | None = 0
        """Written so far; None from when the tables are known."""

    def begin(self, connection: Connection, rows: int) -> None:
        """A transaction of the caller's begins which writes so many rows. In the first one behind ENOUGH of them the
        tables of which PostgreSQL knows next to nothing are analysed, but those that another is analysing now: to wait
        for it spares nothing, and two that wait for each other stop. Where the role may not, it only warns."""
        if self._rows is None or connection.dialect.name != "postgresql":
            return
        if self._rows < ENOUGH:
            self._rows += rows
            return
        self._rows = None
        unknown = connection.execute(_UNKNOWN, {"names": self._names, "enough": ENOUGH}).scalars().all()
        if unknown:
            connection.exec_driver_sql(f"ANALYZE (SKIP_LOCKED) {', '.join(sorted(unknown))}")
