"""Reading without writing: a snapshot that cannot write, and a look at the database's version."""

import pytest
from sqlalchemy import Engine, func, inspect, select, text
from sqlalchemy.exc import DBAPIError

from migrations import schema
from migrations.run import DatabaseTooOld, MigrationError, check, upgrade
from tests.conftest import NOW, Seed
from tests.unit.migrations.next_version import NextVersion
from whetstone.database.engine import connect, snapshot


def test_what_would_write_is_refused_by_the_database(engine: Engine, database_url: str, seed: Seed) -> None:
    with snapshot(database_url) as connection, pytest.raises(DBAPIError, match=r"readonly|read-only"):
        connection.execute(schema.projects.insert().values(id="other", created_at=NOW))
    with engine.connect() as connection:
        assert connection.execute(select(schema.projects.c.id)).scalars().all() == ["default"]


def test_it_stays_as_it_was_while_others_write(engine: Engine, database_url: str, seed: Seed) -> None:
    count = select(func.count()).select_from(schema.projects)
    with snapshot(database_url) as connection:
        assert connection.execute(count).scalar() == 1
        seed.project("other")
        assert connection.execute(count).scalar() == 1
    with snapshot(database_url) as connection:
        assert connection.execute(count).scalar() == 2


def test_a_database_of_this_version_passes(database_url: str) -> None:
    with snapshot(database_url) as connection:
        check(connection)


def test_an_empty_database_is_told_how_to_move_and_stays(empty_database_url: str) -> None:
    with snapshot(empty_database_url) as connection:
        with pytest.raises(MigrationError, match="whetstone migrate"):
            check(connection)
        assert inspect(connection).get_table_names() == []


def test_a_database_of_the_version_before_is_told_how_to_move_and_stays(
    database_url: str, next_version: NextVersion
) -> None:
    refused = next_version.check(database_url)
    assert refused.returncode == 1 and "`whetstone migrate` brings it to this one" in refused.stderr
    with snapshot(database_url) as connection:
        check(connection)


def test_a_database_of_before_the_first_release_is_told_that_it_cannot_move(empty_database_url: str) -> None:
    upgrade(empty_database_url)
    engine = connect(empty_database_url)
    with engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '0010'"))
    engine.dispose()
    with snapshot(empty_database_url) as connection, pytest.raises(DatabaseTooOld, match="whetstone export"):
        check(connection)
