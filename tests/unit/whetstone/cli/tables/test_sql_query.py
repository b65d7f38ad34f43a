"""`whetstone.cli.tables.sql_query`: answers, never writes, tells what may be meant, and stops when it is told to."""

import itertools
import sqlite3
import time
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine

from migrations import schema
from whetstone.cli.tables.sql_query import QueryFailed, asking

ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT {what} FROM n"


def ask(url: str, sql: str, timeout_s: float | None = None) -> tuple[list[str], list[Any]]:
    """The columns and all rows of one query."""
    with asking(url, sql, timeout_s) as (columns, rows):
        return columns, list(rows)


def test_a_query_gives_columns_and_rows(seed: Any, database_url: str) -> None:
    columns, rows = ask(
        database_url, "SELECT policy, live_version FROM admin_policies WHERE policy LIKE '%:a%' OR 1 = 1"
    )
    assert (columns, rows) == (["policy", "live_version"], [("starter", 0)])


def test_a_query_that_gives_no_row_still_has_columns(engine: Engine, database_url: str) -> None:
    assert ask(database_url, "SELECT step AS s, loss FROM admin_steps") == (["s", "loss"], [])


@pytest.mark.parametrize(
    "sql",
    [
        "DELETE FROM policies",
        "UPDATE policies SET live_version = 7",
        "CREATE TABLE mine (a int)",
        "CREATE TEMPORARY TABLE mine (a int)",
        "DROP VIEW admin_steps",
        "WITH gone AS (DELETE FROM policies RETURNING id) SELECT id FROM gone",
        "INSERT INTO projects (id, created_at) VALUES ('x', '2026-01-01') RETURNING id",
        "SELECT 1; DELETE FROM policies",
        "COMMIT; DELETE FROM policies",
        "COMMIT",
        "BEGIN",
        "ROLLBACK",
    ],
)
def test_what_writes_is_refused(seed: Any, database_url: str, sql: str) -> None:
    with pytest.raises(QueryFailed):
        ask(database_url, sql)
    assert seed.one(schema.policies, "starter").live_version == 0
    assert ask(database_url, "SELECT count(*) FROM admin_steps")[1] == [(0,)]
    assert ask(database_url, "SELECT id FROM projects")[1] == [("default",)]


@pytest.mark.parametrize(
    "sql",
    [
        "VACUUM INTO '{file}'",
        "ATTACH '{file}' AS other",
        "PRAGMA query_only = OFF",
        "PRAGMA journal_mode = DELETE",
        "SELECT load_extension('{file}')",
    ],
)
def test_no_file_is_made_beside_a_sqlite_database(sqlite_template: Path, tmp_path: Path, sql: str) -> None:
    file = tmp_path / "other.db"
    with pytest.raises(QueryFailed):
        ask(f"sqlite:///{sqlite_template}", sql.format(file=file))
    assert not file.exists()


def test_what_only_tells_about_a_sqlite_table_is_answered(sqlite_template: Path) -> None:
    _, rows = ask(f"sqlite:///{sqlite_template}", "PRAGMA table_info(admin_steps)")
    assert "mismatch_k3" in [row[1] for row in rows]


def test_a_plan_can_be_asked_for(engine: Engine, database_url: str) -> None:
    assert ask(database_url, "EXPLAIN SELECT * FROM admin_steps")[1]


@pytest.mark.parametrize("sql", ["SELEC 1", "SELECT * FROM nowhere", "", "-- nothing", "COPY projects TO STDOUT"])
def test_what_is_no_query_says_so(engine: Engine, database_url: str, sql: str) -> None:
    with pytest.raises(QueryFailed):
        ask(database_url, sql)


@pytest.mark.parametrize(
    ("sql", "says"),
    [
        ("SELECT * FROM adminsteps", "Did you mean admin_steps?"),
        ("SELECT * FROM trajectory", "Did you mean"),
        ("SELECT * FROM admin_trajectory", "Did you mean admin_trajectories?"),
        ("SELECT * FROM version", "Did you mean admin_versions?"),
        ("SELECT rewrd FROM admin_trajectories", "Did you mean reward? `whetstone sql admin_trajectories`"),
        ("SELECT t.polcy FROM admin_trajectories AS t", "Did you mean policy?"),
        ("SELECT qqqqqq FROM admin_steps", "`whetstone sql admin_steps` lists its columns"),
        ("SELECT * FROM qqqqqq", "`whetstone sql` lists the views"),
        ("SELECT 1; SELECT 2", "one query at a time"),
    ],
)
def test_a_name_that_is_not_there_is_answered_by_the_nearest(
    engine: Engine, database_url: str, sql: str, says: str
) -> None:
    with pytest.raises(QueryFailed) as caught:
        ask(database_url, sql)
    assert says in str(caught.value)


def test_a_view_that_an_older_database_lacks_says_how_to_get_it(tmp_path: Path) -> None:
    sqlite3.connect(tmp_path / "old.db").close()
    with pytest.raises(QueryFailed, match="whetstone migrate"):
        ask(f"sqlite:///{tmp_path / 'old.db'}", "SELECT * FROM admin_steps")


def test_a_query_that_works_for_too_long_is_stopped(engine: Engine, database_url: str) -> None:
    with pytest.raises(QueryFailed, match=r"longer than 0.2 s: --timeout"):
        ask(database_url, ENDLESS.format(what="max(i)"), timeout_s=0.2)
    assert ask(database_url, "SELECT 1", timeout_s=60)[1] == [(1,)]


def test_who_reads_slowly_has_all_the_time(engine: Engine, database_url: str) -> None:
    with asking(database_url, ENDLESS.format(what="i") + " LIMIT 2000", timeout_s=10) as (_, rows):
        read = list(itertools.islice(rows, 10))
        time.sleep(0.1)
        read += rows
    assert [row[0] for row in read] == list(range(1, 2001))


def test_rows_come_before_the_last_is_known(engine: Engine, database_url: str) -> None:
    # On SQLite: PostgreSQL computes a WITH as far as it is read, too.
    with asking(database_url, ENDLESS.format(what="i"), timeout_s=60) as (_, rows):
        assert [row[0] for row in itertools.islice(rows, 3)] == [1, 2, 3]


def test_an_error_after_the_first_rows_is_told_as_well(engine: Engine, database_kind: str, database_url: str) -> None:
    bad = (
        "1 / (1500 - i)"
        if database_kind == "postgresql"
        else "json_extract(CASE i WHEN 1500 THEN '{' ELSE '{}' END, '$')"
    )
    with asking(database_url, ENDLESS.format(what=bad) + " LIMIT 2000", timeout_s=60) as (_, rows):
        assert len(list(itertools.islice(rows, 1000))) == 1000
        with pytest.raises(QueryFailed, match="division by zero|malformed JSON"):
            list(rows)


def test_times_read_alike_on_both_databases(seed: Any, database_url: str) -> None:
    ((one,),) = ask(database_url, "SELECT CAST(created_at AS text) FROM admin_policies")[1]
    assert one.startswith("2026-01-01 12:00:00")


def test_others_may_write_afterwards(seed: Any, database_url: str) -> None:
    ask(database_url, "SELECT 1")
    seed.group("g")


def test_others_write_while_rows_are_taken(seed: Any, database_url: str) -> None:
    with asking(database_url, "SELECT count(*) FROM admin_groups") as (_, rows):
        seed.group("g")
        assert list(rows) in ([(0,)], [(1,)])
