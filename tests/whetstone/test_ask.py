"""`whetstone sql`: answers, and never writes."""

from typing import Any

import pytest
from sqlalchemy import Engine

from migrations import schema
from whetstone.ask import QueryFailed, ask


def test_a_query_gives_columns_and_rows(seed: Any, database_url: str) -> None:
    columns, rows = ask(
        database_url, "SELECT policy, live_version FROM admin_policies WHERE policy LIKE '%:a%' OR 1 = 1"
    )
    assert (columns, rows) == (["policy", "live_version"], [("starter", 0)])


@pytest.mark.parametrize(
    "sql",
    [
        "DELETE FROM policies",
        "UPDATE policies SET live_version = 7",
        "CREATE TABLE mine (a int)",
        "DROP VIEW admin_steps",
    ],
)
def test_what_writes_is_refused(seed: Any, database_url: str, sql: str) -> None:
    with pytest.raises(QueryFailed):
        ask(database_url, sql)
    assert seed.one(schema.policies, "starter").live_version == 0
    assert ask(database_url, "SELECT count(*) FROM admin_steps")[1] == [(0,)]


@pytest.mark.parametrize("sql", ["SELEC 1", "SELECT * FROM nowhere", ""])
def test_what_is_no_query_says_so(engine: Engine, database_url: str, sql: str) -> None:
    with pytest.raises(QueryFailed):
        ask(database_url, sql)


def test_others_may_write_afterwards(seed: Any, database_url: str) -> None:
    ask(database_url, "SELECT 1")
    seed.group("g")
