"""Reading without writing: a snapshot that cannot write, and a look at the database's version."""

import pytest
from sqlalchemy import Engine, func, select
from sqlalchemy.exc import DBAPIError

from migrations import schema
from migrations.run import MigrationError, check, downgrade, upgrade
from tests.conftest import NOW, Seed
from whetstone.database.engine import snapshot


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


@pytest.mark.parametrize("revision", ["base", "0001"])
def test_an_older_database_is_told_how_to_move_and_stays(empty_database_url: str, revision: str) -> None:
    upgrade(empty_database_url)
    downgrade(empty_database_url, revision)
    with snapshot(empty_database_url) as connection, pytest.raises(MigrationError, match="whetstone migrate"):
        check(connection)
