"""A database of the first release, or of a later checkout, gets this version's tables and views, and keeps its data."""

from pathlib import Path
from typing import Any

import pytest
from alembic import command
from alembic.script import ScriptDirectory
from sqlalchemy import Engine, inspect, text

from migrations import schema
from migrations.run import configuration, upgrade
from tests.conftest import Seed
from whetstone import __version__
from whetstone.database.engine import connect

FIRST_RELEASE = "0011"
REVISIONS = [one.revision for one in ScriptDirectory(str(Path(schema.__file__).parent)).walk_revisions()][:0:-1]
"""All from the first release on, but for the last: that is this version's own."""
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


def test_upgrades_are_supported_from_the_first_release_on() -> None:
    page = (Path(schema.__file__).parents[1] / "docs" / "deploy.md").read_text(encoding="utf-8")
    head = ScriptDirectory(str(Path(schema.__file__).parent)).get_current_head()
    assert REVISIONS[0] == FIRST_RELEASE
    assert f"`{REVISIONS[0]}` to `{REVISIONS[-1]}`" in page
    assert f"this version ({__version__}, revision {head})" in page


@pytest.mark.parametrize("revision", REVISIONS)
def test_a_database_of_an_earlier_revision_keeps_its_data(empty_database_url: str, revision: str) -> None:
    engine = connect(empty_database_url)
    with engine.begin() as connection:
        command.upgrade(configuration(connection), revision)
    seed = Seed(engine)
    seed.project("default")
    seed.trajectory("t", seed.group(), turns=3, reward=1.0)
    seed.feedback("t", 1.0)
    with engine.begin() as connection:
        connection.execute(text(OWN_VIEW))
    columns = columns_of(engine)
    # Revision 0015 replaced it by the beginning of `history`.
    columns["completions"] = [column for column in columns["completions"] if column != "prompt_history"]
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
