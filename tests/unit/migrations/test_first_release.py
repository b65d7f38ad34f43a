"""A database of the first release gets this version's tables and views, and keeps its data."""

from typing import Any

from alembic import command
from sqlalchemy import Engine, inspect, text

from migrations.run import configuration, upgrade
from tests.conftest import Seed
from whetstone.database.engine import connect

FIRST_RELEASE = "0011"
OWN_VIEW = "CREATE VIEW of_mine AS SELECT completion_id, response_text FROM admin_completions"


def rows_by_table(engine: Engine, columns: dict[str, list[str]]) -> dict[str, Any]:
    """Read these columns of each table and view."""
    with engine.connect() as connection:
        return {
            name: sorted(map(repr, connection.execute(text(f'SELECT {", ".join(own)} FROM "{name}"'))))
            for name, own in columns.items()
        }


def columns_of(engine: Engine) -> dict[str, list[str]]:
    """Return the columns of each table and view, but for Alembic's own."""
    there = inspect(engine)
    names = set(there.get_table_names()) | set(there.get_view_names())
    return {name: [one["name"] for one in there.get_columns(name)] for name in names - {"alembic_version"}}


def test_a_database_of_the_first_release_keeps_its_data(empty_database_url: str) -> None:
    engine = connect(empty_database_url)
    with engine.begin() as connection:
        command.upgrade(configuration(connection), FIRST_RELEASE)
    seed = Seed(engine)
    seed.project("default")
    seed.trajectory("t", seed.group(), turns=3, reward=1.0)
    seed.feedback("t", 1.0)
    with engine.begin() as connection:
        connection.execute(text(OWN_VIEW))
    columns = columns_of(engine)
    before = rows_by_table(engine, columns)
    assert len(before["completions"]) == len(before["of_mine"]) == 3
    engine.dispose()

    upgrade(empty_database_url)

    engine = connect(empty_database_url)
    assert rows_by_table(engine, columns) == before
    with engine.connect() as connection:
        added = connection.execute(text("SELECT constraints, decided_tokens, explored FROM admin_completions")).all()
    assert added == [(None, None, None)] * 3
    seed = Seed(engine)
    seed.completion("t", 3, explored=0.7, constraints={"top_p": 0.9})
    assert len(rows_by_table(engine, columns)["of_mine"]) == 4
    engine.dispose()
