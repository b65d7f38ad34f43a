"""The way to the tables: on both databases, equal to schema.py, and clear about what it cannot do."""

import ast
import re
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import inspect, text

from migrations import schema
from migrations.run import BEFORE_THE_FIRST_RELEASE, DatabaseNewer, DatabaseTooOld, DatabaseUnreachable, upgrade
from tests.conftest import Seed
from tests.unit.migrations.next_version import REVISION, NextVersion
from whetstone.database.engine import connect

WRITER = re.compile(r"(P|J|T|W)(, (P|J|T|W))*(: .+)?", re.DOTALL)
FOLDER = Path(schema.__file__).parent
AS_THEY_ARE = {"schema", "schema_rollups", "views", "words"}
"""Modules that change with each version."""


def contents(url: str) -> dict[str, Any]:
    """Read every row of every table, and every view's text."""
    engine = connect(url)
    with engine.connect() as connection:
        there = inspect(connection)
        found: dict[str, Any] = {
            table: sorted(map(repr, connection.execute(text(f'SELECT * FROM "{table}"'))))
            for table in there.get_table_names()
        }
        found |= {view: there.get_view_definition(view) for view in there.get_view_names()}
    engine.dispose()
    return found


def test_an_upgrade_makes_the_tables_of_the_schema_and_a_second_one_changes_nothing(empty_database_url):
    upgrade(empty_database_url)
    upgrade(empty_database_url)
    engine = connect(empty_database_url)
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True, "compare_server_default": True})
        assert compare_metadata(context, schema.metadata) == []
        assert context.get_current_heads() == tuple(ScriptDirectory(str(FOLDER)).get_heads())
    engine.dispose()


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


def test_an_upgrade_that_fails_leaves_nothing_behind(empty_database_url):
    engine = connect(empty_database_url)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE steps (id INTEGER)"))
    engine.dispose()
    with pytest.raises(Exception, match="steps"):
        upgrade(empty_database_url)
    assert set(inspect(engine).get_table_names()) == {"steps"}
    engine.dispose()


def test_the_first_revision_has_the_id_that_the_last_one_before_the_release_had() -> None:
    """A database of that one goes on."""
    base = ScriptDirectory(str(FOLDER)).get_base()
    assert base == "0011" and base not in BEFORE_THE_FIRST_RELEASE


def test_a_database_of_this_version_goes_on_as_it_is(database_url: str, seed: Seed) -> None:
    seed.trajectory("t", seed.group(), turns=2)
    seed.feedback("t", 1.0)
    before = contents(database_url)
    upgrade(database_url)
    assert contents(database_url) == before


@pytest.mark.parametrize("revision", ["0001", "0005", "0010"])
def test_an_older_database_is_refused_with_what_to_do_and_stays(empty_database_url: str, revision: str) -> None:
    engine = connect(empty_database_url)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL PRIMARY KEY)"))
        connection.execute(text("INSERT INTO alembic_version VALUES (:revision)"), {"revision": revision})
        connection.execute(text("CREATE TABLE projects (id TEXT PRIMARY KEY)"))
        connection.execute(text("INSERT INTO projects VALUES ('default')"))
        connection.execute(text("CREATE VIEW admin_projects AS SELECT id FROM projects"))
    engine.dispose()
    before = contents(empty_database_url)
    with pytest.raises(DatabaseTooOld, match=rf"at revision {revision}, .*`whetstone export`.* a new database"):
        upgrade(empty_database_url)
    assert contents(empty_database_url) == before


def test_a_newer_database_is_refused_and_stays(empty_database_url: str, next_version: NextVersion) -> None:
    upgrade(empty_database_url)
    assert next_version.upgrade(empty_database_url).returncode == 0
    before = contents(empty_database_url)
    with pytest.raises(DatabaseNewer, match=f"at revision {REVISION}, .* a later one migrated it"):
        upgrade(empty_database_url)
    assert contents(empty_database_url) == before


def test_views_of_an_admins_own_that_are_in_the_way_are_named(
    database_kind: str, empty_database_url: str, next_version: NextVersion
) -> None:
    """PostgreSQL drops no view that another one reads; SQLite asks nobody."""
    upgrade(empty_database_url)
    engine = connect(empty_database_url)
    with engine.begin() as connection:
        connection.execute(text("CREATE VIEW of_mine AS SELECT group_id FROM admin_groups"))
    if database_kind == "postgresql":
        refused = next_version.upgrade(empty_database_url)
        assert refused.returncode == 1
        assert re.search("drop yours, migrate, create them again .*of_mine", refused.stderr), refused.stderr
    with engine.begin() as connection:
        connection.execute(text("DROP VIEW of_mine"))
    engine.dispose()
    done = next_version.upgrade(empty_database_url)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "path", [*FOLDER.glob("versions/*.py"), *FOLDER.glob("initial_*.py")], ids=lambda path: path.name
)
def test_a_revision_is_frozen_it_imports_nothing_that_changes_with_a_version(path: Path) -> None:
    imported = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            imported |= {f"{node.module}.{name.name}" for name in node.names} | {str(node.module)}
        elif isinstance(node, ast.Import):
            imported |= {name.name for name in node.names}
    assert imported & {f"migrations.{name}" for name in AS_THEY_ARE} == set()
    ours = {name for name in imported if name.startswith("whetstone")}
    assert [name for name in ours if not name.startswith("whetstone.database.types")] == []
