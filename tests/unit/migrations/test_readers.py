"""Readers: roles of PostgreSQL that can read the views and nothing else, on a real server."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, inspect, make_url, text
from sqlalchemy.exc import DBAPIError
from typer.testing import CliRunner, Result

from migrations import readers, schema
from migrations.run import upgrade
from migrations.views import VIEWS
from tests.conftest import Seed
from tests.unit.migrations.next_version import ADDED_VIEW, NextVersion
from whetstone.cli.main import app
from whetstone.database.engine import connect

pytestmark = [pytest.mark.stack, pytest.mark.postgresql]
SECRET = "f" * 64


@pytest.fixture
def database_kind() -> str:
    """Roles are PostgreSQL's."""
    return "postgresql"


@pytest.fixture
def role(engine: Engine) -> Iterator[str]:
    """A name that is free, and is again afterwards."""
    yield "analyst"
    with engine.begin() as connection:
        if connection.execute(text("SELECT 1 FROM pg_roles WHERE rolname = 'analyst'")).first():
            connection.execute(text("COMMENT ON ROLE analyst IS '" + readers.MADE_BY_US + "'"))
            readers.drop(connection, "analyst")


@pytest.fixture
def asked(role: str, engine: Engine, seed: Seed) -> Iterator[Engine]:
    """The database as the role sees it."""
    seed.insert(
        schema.api_keys, project="default", id="k", name="app", secret_sha256=SECRET, scopes=[], created_at=seed.now
    )
    seed.trajectory("t")
    with engine.begin() as connection:
        readers.make(connection, role, "pass-word", 60.0)
    yield from opened(engine, role)


def opened(engine: Engine, role: str) -> Iterator[Engine]:
    own = create_engine(engine.url.set(username=role, password="pass-word"))
    yield own
    own.dispose()


def sql_role(url: str, *arguments: str) -> Result:
    runner = CliRunner(env={"WHETSTONE_DATABASE": url, "COLUMNS": "300"})
    return runner.invoke(app, ["sql-role", *arguments])


def refused(engine: Engine, statement: str) -> str:
    with engine.connect() as connection, pytest.raises(DBAPIError) as caught:
        connection.execute(text("SET default_transaction_read_only = off"))
        connection.commit()
        connection.execute(text(statement))
    return str(caught.value.orig)


def test_it_reads_every_view(asked: Engine) -> None:
    with asked.connect() as connection:
        for view in VIEWS:
            connection.execute(text(f"SELECT * FROM {view.name}")).all()
        assert connection.execute(text("SELECT trajectory_id FROM admin_trajectories")).scalars().all() == ["t"]
        assert connection.execute(text("SELECT name FROM admin_keys")).scalars().all() == ["app"]


def test_it_reads_no_table_and_no_hash(asked: Engine, engine: Engine) -> None:
    for table in inspect(engine).get_table_names():
        assert "permission denied" in refused(asked, f"SELECT * FROM {table}"), table
    with asked.connect() as connection:
        for view in VIEWS:
            found = connection.execute(text(f"SELECT * FROM {view.name}")).all()
            assert SECRET not in repr(found), view.name


@pytest.mark.parametrize(
    "statement",
    [
        "DELETE FROM trajectories",
        "DELETE FROM admin_trajectories",
        "UPDATE admin_keys SET revoked_at = NULL",
        "INSERT INTO projects (id, created_at) VALUES ('x', now())",
        "TRUNCATE policies",
        "DROP VIEW admin_steps",
        "CREATE TABLE mine (a integer)",
        "ALTER ROLE analyst CREATEROLE",
        "GRANT SELECT ON api_keys TO analyst",
        "COPY policies TO PROGRAM 'cat'",
        "SELECT pg_read_file('/etc/passwd')",
        "SET ROLE postgres",
    ],
)
def test_it_writes_nothing_even_where_it_takes_off_its_own_brake(asked: Engine, statement: str) -> None:
    assert any(said in refused(asked, statement) for said in ("permission denied", "must be owner", "cannot"))


def test_its_transactions_are_read_only_and_end(asked: Engine) -> None:
    with asked.connect() as connection:
        for setting, value in (("default_transaction_read_only", "on"), ("statement_timeout", "1min")):
            assert connection.execute(text(f"SHOW {setting}")).scalar() == value
        assert connection.execute(text("SHOW timezone")).scalar() == "UTC"


def test_what_it_could_read_it_can_read_after_a_migration(
    empty_database_url: str, role: str, next_version: NextVersion
) -> None:
    upgrade(empty_database_url)
    engine = connect(empty_database_url)
    with engine.begin() as connection:
        # As somebody grants by hand: to one role every view there is, to another only two.
        connection.execute(text(f"CREATE ROLE {role} LOGIN PASSWORD 'pass-word'; CREATE ROLE few LOGIN"))
        for view in inspect(connection).get_view_names():
            connection.execute(text(f"GRANT SELECT ON {view} TO {role}"))
        connection.execute(
            text("GRANT SELECT ON admin_steps, admin_groups TO few; GRANT SELECT ON admin_groups TO PUBLIC")
        )
    try:
        moved = next_version.upgrade(empty_database_url)
        assert moved.returncode == 0, moved.stderr
        with engine.connect() as connection:
            grants = readers.granted(connection).pairs
        assert {view for view, who in grants if who == role} == {view.name for view in VIEWS} | {ADDED_VIEW}
        assert {view for view, who in grants if who == "few"} == {"admin_steps", "admin_groups"}
        assert {view for view, who in grants if who == "PUBLIC"} == {"admin_groups"}
    finally:
        with engine.begin() as connection:
            connection.execute(text(f"DROP OWNED BY {role}, few; DROP ROLE few, {role}"))
        engine.dispose()


def test_who_could_read_some_views_can_read_no_more_after_a_migration(
    empty_database_url: str, role: str, next_version: NextVersion
) -> None:
    upgrade(empty_database_url)
    engine = connect(empty_database_url)
    with engine.begin() as connection:
        connection.execute(text(f"CREATE ROLE {role}; GRANT SELECT ON admin_steps, admin_groups TO {role}"))
    moved = next_version.upgrade(empty_database_url)
    assert moved.returncode == 0, moved.stderr
    with engine.begin() as connection:
        assert readers.granted(connection).pairs == {("admin_steps", role), ("admin_groups", role)}
        connection.execute(text(f"DROP OWNED BY {role}; DROP ROLE {role}"))
    engine.dispose()


def test_the_command_prints_an_address_that_opens_once(role: str, database_url: str, seed: Seed) -> None:
    seed.trajectory("t")
    made = sql_role(database_url, role)
    assert made.exit_code == 0, made.output
    assert f"the role {role} reads {len(VIEWS)} views" in made.stderr
    address = made.stdout.strip()
    assert address.startswith(f"postgresql://{role}:")
    first = make_url(address)
    again = sql_role(database_url, role)
    assert "has a new password" in again.stderr and again.stdout.strip() != address
    own = create_engine(make_url(again.stdout.strip()).set(drivername="postgresql+psycopg"))
    with own.connect() as connection:
        assert connection.execute(text("SELECT current_user")).scalar() == role
    own.dispose()
    assert first.password and first.password not in again.output
    assert sql_role(database_url, role, "--drop").exit_code == 0
    gone = sql_role(database_url, role, "--drop")
    assert gone.exit_code == 1 and "there is no role analyst" in gone.stderr


def test_a_password_may_come_from_a_file_and_is_stored_as_a_hash(
    role: str, database_url: str, engine: Engine, tmp_path: Path
) -> None:
    file = tmp_path / "password"
    file.write_text("hunter2\n")
    made = sql_role(database_url, role, "--password-file", str(file))
    assert (made.exit_code, made.stdout) == (0, "") and "hunter2" not in made.output
    with engine.connect() as connection:
        kept = connection.execute(text("SELECT rolpassword FROM pg_authid WHERE rolname = :role"), {"role": role})
        assert str(kept.scalar()).startswith("SCRAM-SHA-256$")
    file.write_text("\n")
    assert sql_role(database_url, role, "--password-file", str(file)).exit_code == 2


def test_a_role_of_somebody_else_is_left_alone(role: str, database_url: str, engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(text(f"CREATE ROLE {role} CREATEDB"))
    for arguments in ((role,), (role, "--drop"), ("postgres",)):
        made = sql_role(database_url, *arguments)
        assert made.exit_code == 1 and "none of ours" in made.stderr, made.output
    with engine.connect() as connection:
        kept = connection.execute(text("SELECT rolcreatedb, rolcanlogin FROM pg_roles WHERE rolname = 'analyst'"))
        assert tuple(kept.one()) == (True, False)


def test_who_may_make_no_roles_is_told_who_can(asked: Engine, role: str, seed: Any) -> None:
    url = asked.url.render_as_string(hide_password=False)
    made = sql_role(url, "other")
    assert made.exit_code in (1, 2)
    assert "permission denied" in str(made.exception) + made.output


def test_the_sql_can_be_printed_and_run_by_hand(role: str, database_url: str, engine: Engine) -> None:
    printed = sql_role(database_url, role, "--print")
    assert printed.exit_code == 0 and "'<password>'" in printed.stdout
    with engine.connect() as connection:
        assert connection.execute(text("SELECT 1 FROM pg_roles WHERE rolname = 'analyst'")).first() is None
    with engine.begin() as connection:
        connection.exec_driver_sql(printed.stdout.replace("<password>", "pass-word"))
    for own in opened(engine, role):
        with own.connect() as connection:
            assert connection.execute(text("SELECT count(*) FROM admin_steps")).scalar() == 0


@pytest.mark.parametrize("name", ["Analyst", "a b", "", 'x"; DROP TABLE steps', "1a", "a" * 64])
def test_a_name_that_would_need_quotes_is_refused(database_url: str, name: str) -> None:
    made = sql_role(database_url, name)
    assert made.exit_code == 2 and "a role's name has 1 to 63 of a-z" in " ".join(made.stderr.split())


def test_sqlite_has_no_roles_and_says_so(tmp_path: Path, sqlite_template: Path) -> None:
    command = [sys.executable, "-P", "-m", "whetstone.cli.main", "sql-role", "analyst"]
    environment = {"WHETSTONE_DATABASE": f"sqlite:///{sqlite_template}", "PATH": "/usr/bin:/bin"}
    made = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert made.returncode == 2 and "SQLite has no roles" in made.stderr
