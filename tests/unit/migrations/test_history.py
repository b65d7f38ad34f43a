"""The way to the tables: up and down on both databases, equal to schema.py, and clear about what it cannot do."""

import re
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import inspect, text

from migrations import schema
from migrations.run import DatabaseNewer, DatabaseUnreachable, MigrationError, downgrade, upgrade
from whetstone.database.engine import connect

WRITER = re.compile(r"(P|J|T|W)(, (P|J|T|W))*(: .+)?", re.DOTALL)


def test_an_upgrade_makes_the_tables_of_the_schema_and_a_second_one_changes_nothing(empty_database_url):
    upgrade(empty_database_url)
    upgrade(empty_database_url)
    engine = connect(empty_database_url)
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True, "compare_server_default": True})
        assert compare_metadata(context, schema.metadata) == []
        assert context.get_current_heads() == tuple(ScriptDirectory(str(Path(schema.__file__).parent)).get_heads())
    engine.dispose()


def test_the_tables_go_down_and_up_again_with_rows_in_them(database_url, seed, engine):
    seed.group()
    seed.trajectory("t", "g", turns=2)
    seed.feedback("t", 1.0)
    engine.dispose()
    downgrade(database_url, "base")
    assert set(inspect(engine).get_table_names()) == {"alembic_version"}
    assert inspect(engine).get_view_names() == []
    engine.dispose()
    upgrade(database_url)
    seed.project("default")
    seed.trajectory("t")


@pytest.mark.parametrize("table", schema.metadata.sorted_tables, ids=lambda table: table.name)
def test_every_table_belongs_to_a_project_and_every_column_names_its_writer(table):
    owner = "id" if table.name == "projects" else "project"
    # A note's number stands alone: it is of no interest to anybody but who takes it.
    named = table.columns if table.name.endswith("_changes") else table.primary_key.columns
    assert owner in [column.name for column in named]
    assert table.comment
    assert [column.name for column in table.columns if not WRITER.fullmatch(column.comment or "")] == []


def test_comments_reach_the_database_where_it_keeps_them(database_kind, engine):
    if database_kind == "sqlite":
        pytest.skip("SQLite keeps no comments")
    columns = {column["name"]: column["comment"] for column in inspect(engine).get_columns("trajectories")}
    assert columns["reward"] == "J: the number it is trained on"
    assert inspect(engine).get_table_comment("groups")["text"] == schema.groups.comment


def test_a_database_of_a_later_version_is_left_alone(empty_database_url):
    upgrade(empty_database_url)
    engine = connect(empty_database_url)
    with engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    engine.dispose()
    for move in (upgrade, lambda url: downgrade(url, "base")):
        with pytest.raises(DatabaseNewer, match="9999"):
            move(empty_database_url)
    assert "completions" in inspect(engine).get_table_names()
    engine.dispose()


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("sqlite:////nowhere/at/all.db", "no database answers at sqlite:////nowhere/at/all.db"),
        ("postgresql+psycopg://me:secret@127.0.0.1:1/x", r"no database answers at postgresql\+psycopg://me:\*\*\*@"),
        ("whetstone.db", "is no database URL"),
        ("nosuch://x", "is no database URL"),
    ],
)
def test_a_database_that_cannot_be_reached_is_named_without_its_password(url, says):
    with pytest.raises(DatabaseUnreachable, match=says) as caught:
        upgrade(url)
    assert "secret" not in str(caught.value)


def test_an_unknown_revision_is_refused(database_url):
    with pytest.raises(MigrationError, match="nosuch"):
        downgrade(database_url, "nosuch")


def test_an_upgrade_that_fails_leaves_nothing_behind(empty_database_url):
    engine = connect(empty_database_url)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE steps (id INTEGER)"))
    engine.dispose()
    with pytest.raises(Exception, match="steps"):
        upgrade(empty_database_url)
    assert set(inspect(engine).get_table_names()) == {"steps"}
    engine.dispose()


def test_views_of_an_admins_own_that_are_in_the_way_are_named(database_kind, database_url, engine):
    """PostgreSQL drops no view that another one reads; SQLite asks nobody."""
    downgrade(database_url, "0007")
    with engine.begin() as connection:
        connection.execute(text("CREATE VIEW of_mine AS SELECT trajectory_id FROM admin_trajectories"))
    if database_kind == "postgresql":
        with pytest.raises(MigrationError, match=r"drop them, migrate, make them again .*of_mine"):
            upgrade(database_url)
    with engine.begin() as connection:
        connection.execute(text("DROP VIEW of_mine"))
    upgrade(database_url)
