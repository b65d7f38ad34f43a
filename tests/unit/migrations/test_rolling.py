"""Programs of the version before go on while the database is moved under them: what they write and read still fits."""

import itertools
import threading
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Boolean, Column, DateTime, Engine, Float, Integer, MetaData, Table, func, inspect, select, text

from migrations.run import upgrade
from tests.unit.migrations.next_version import REVISION, NextVersion
from whetstone.database.engine import connect

VALUES: dict[type, Any] = {Boolean: False, Integer: 0, Float: 0.0, DateTime: datetime(2026, 1, 1, tzinfo=UTC)}
ROUNDS = 10
"""What the old programs write before the move, and at least as much after it."""


class Before:
    """The tables as the programs of a revision know them, which write a row of each and read every view."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.tables = MetaData()
        # What triggers write no program does.
        self.tables.reflect(engine, only=lambda name, _: not name.endswith("_changes"))
        self._views = {view: [one["name"] for one in inspect(engine).get_columns(view)] for view in _views(engine)}
        self._numbers = itertools.count()
        self.rounds = 0
        self.error: Exception | None = None
        self.stop = threading.Event()

    def run(self) -> None:
        try:
            while not self.stop.is_set():
                self._write()
                self._read()
                self.rounds += 1
        except Exception as error:
            self.error = error

    def _write(self) -> None:
        number = next(self._numbers)
        written: dict[str, dict[str, Any]] = {}
        with self._engine.begin() as connection:
            for table in self.tables.sorted_tables:
                if table.name == "alembic_version":
                    continue
                written[table.name] = row = self._row(table, number, written)
                connection.execute(table.insert().values(**row))

    def _row(self, table: Table, number: int, written: dict[str, dict[str, Any]]) -> dict[str, Any]:
        """What must be there, and nothing else; what refers to another row refers to the one just written."""
        row = {column.name: _value(column, number) for column in table.columns if not column.nullable}
        for key in table.foreign_keys:
            if key.parent.name in row and key.column.table.name in written:
                row[key.parent.name] = written[key.column.table.name][key.column.name]
        return row

    def _read(self) -> None:
        with self._engine.connect() as connection:
            for view, columns in self._views.items():
                names = ", ".join(f'"{column}"' for column in columns)
                connection.execute(text(f"SELECT {names} FROM {view} LIMIT 5")).all()


def _views(engine: Engine) -> list[str]:
    return [view for view in inspect(engine).get_view_names() if view.startswith("admin_")]


def _value(column: Column[Any], number: int) -> Any:
    for kind, value in VALUES.items():
        if isinstance(column.type, kind):
            return number if column.primary_key else value
    return f"{number}" if str(column.type) in ("TEXT", "VARCHAR") else []


def test_the_version_before_writes_and_reads_while_the_database_is_moved(
    empty_database_url: str, next_version: NextVersion
) -> None:
    upgrade(empty_database_url)
    engine = connect(empty_database_url)
    before = Before(engine)
    old = threading.Thread(target=before.run)
    old.start()
    try:
        _await(before, ROUNDS)
        moved = next_version.upgrade(empty_database_url)
        _await(before, before.rounds + ROUNDS)
    finally:
        before.stop.set()
        old.join()
    assert before.error is None
    assert moved.returncode == 0, moved.stderr
    with engine.connect() as connection:
        for table in before.tables.sorted_tables:
            if table.name != "alembic_version":
                assert connection.execute(select(func.count()).select_from(table)).scalar_one() == before.rounds, table
        assert connection.execute(text("SELECT version_num FROM alembic_version")).scalar_one() == REVISION
    engine.dispose()


def _await(before: Before, rounds: int) -> None:
    while before.rounds < rounds and before.error is None:
        before.stop.wait(0.01)
