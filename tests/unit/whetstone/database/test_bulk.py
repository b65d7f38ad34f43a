"""Rows written past SQLAlchemy are the rows that SQLAlchemy writes."""

from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import msgspec
import pytest
from sqlalchemy import Column, Connection, Engine, MetaData, Table, Text, select
from sqlalchemy.exc import DBAPIError, IntegrityError

from migrations import schema
from tests.conftest import NOW
from whetstone.database.bulk import Pause, among, insert_absent, insert_many, listed, update_many
from whetstone.database.engine import Transactions, connect, read_sqlite, run_sqlite
from whetstone.database.types import as_json_bytes, is_json

t, c = schema.trajectories.c, schema.completions.c


def as_bulk(table: Table, row: dict[str, Any]) -> dict[str, Any]:
    """A row as bulk takes it."""
    return {
        name: as_json_bytes(value) if value is not None and is_json(table.c[name].type) else value
        for name, value in row.items()
    }


def trajectory(trajectory_id: str, **values: Any) -> dict[str, Any]:
    row = {
        "project": "default", "id": trajectory_id, "policy": "starter", "split": "train", "no_train": False,
        "state": "open", "reward": None, "completions": 0, "sampled_tokens": 0, "metadata": None, "created_at": NOW,
        "last_seen_at": NOW,
    }  # fmt: skip
    return row | values


def completion(completion_id: str, **values: Any) -> dict[str, Any]:
    row = {
        "project": "default", "id": completion_id, "upstream_id": "u", "call_id": "c", "choice": 0,
        "trajectory_id": "t", "turn": 0, "policy": "starter", "policy_version": 0, "endpoint": "chat.completions",
        "streamed": True, "status": "complete", "new_messages": [{"content": 'ä "\\ \n 😀 %s :x', "n": [1, 2.5, None]}],
        "tools": None, "response": {"content": "", "refusal": None}, "response_text": 'it\'s "ä" \\ 😀 %(x)s \t',
        "prompt_token_ids": [], "token_ids": [0, 2**31 - 1], "inference_logprobs": [-0.1, -1.2231433391571045],
        "sampling": {"temperature": 1.0, "seed": 10**15}, "total_ms": 0.1 + 0.2, "threaded_by": "new",
        "reply": bytes(range(256)), "history": b"\\x00", "tool_history": None, "error": None,
        "created_at": datetime(2026, 3, 1, 1, 2, 3, 4, tzinfo=timezone(timedelta(hours=2))),
    }  # fmt: skip
    return row | values


@pytest.mark.usefixtures("seed")
def test_rows_of_every_kind_of_value_are_as_sqlalchemy_writes_them(engine: Engine) -> None:
    ours, theirs = completion("ours"), completion("theirs", turn=1)
    with engine.begin() as connection:
        connection.execute(schema.trajectories.insert().values(**trajectory("t")))
        insert_many(connection, schema.completions, [as_bulk(schema.completions, ours)], ("project", "id"))
        connection.execute(schema.completions.insert().values(**theirs))
        columns = [column for column in c if column.name not in ("id", "turn")]
        one, other = connection.execute(select(*columns).order_by(c.id)).all()
        assert one._asdict() == other._asdict()
        if engine.dialect.name == "sqlite":  # there the texts themselves can be compared
            raw = (
                "SELECT created_at, new_messages, sampling, token_ids, inference_logprobs FROM completions ORDER BY id"
            )
            one, other = connection.exec_driver_sql(raw).all()
            assert tuple(one) == tuple(other)


@pytest.mark.usefixtures("seed")
@pytest.mark.parametrize("pause", [None, lambda: None])
@pytest.mark.parametrize("count", [1, 2, 3, 9, 10, 26, 49, 50, 51, 163])
def test_however_many_rows_come_all_are_there_and_those_that_were_there_stay(
    engine: Engine, count: int, pause: Pause | None
) -> None:
    rows = [as_bulk(schema.trajectories, trajectory(f"t{number:03d}", task="new")) for number in range(count)]
    with engine.begin() as connection:
        connection.execute(schema.trajectories.insert().values(**trajectory("t000", task="old")))
        insert_many(connection, schema.trajectories, rows, pause=pause)
        tasks = connection.execute(select(t.task).order_by(t.id)).scalars().all()
        some = among(engine.dialect.name, t.id)
        found = connection.execute(select(t.id).where(some), {"ids": listed(engine.dialect.name, ["t000", "no", "'"])})
        assert found.scalars().all() == ["t000"]
    assert tasks == ["old", *["new"] * (count - 1)]


@pytest.mark.usefixtures("seed")
def test_who_looked_before_is_told_what_was_inserted(engine: Engine) -> None:
    rows = [as_bulk(schema.trajectories, trajectory(f"t{number}")) for number in range(3)]
    with engine.begin() as connection:
        assert insert_absent(connection, schema.trajectories, rows[:2]) == {("default", "t0"), ("default", "t1")}
        # Somebody else may have come in between.
        assert insert_absent(connection, schema.trajectories, rows) == {("default", "t2")}
        assert insert_absent(connection, schema.trajectories, rows) == set()
        assert insert_absent(connection, schema.trajectories, []) == set()


@pytest.mark.usefixtures("seed")
@pytest.mark.parametrize("pause", [None, lambda: None])
@pytest.mark.parametrize("there", [range(1), range(49, 52), range(120), range(0, 121, 2), range(100, 121), range(121)])
def test_who_inserts_is_told_what_was_not_there_however_many_there_were(
    engine: Engine, there: range, pause: Pause | None
) -> None:
    rows = [as_bulk(schema.trajectories, trajectory(f"t{number:03d}", task="new")) for number in range(121)]
    with engine.begin() as connection:
        insert_many(connection, schema.trajectories, [rows[number] | {"task": "old"} for number in reversed(there)])
        inserted = insert_absent(connection, schema.trajectories, rows, pause)
        assert inserted == {("default", f"t{number:03d}") for number in range(121) if number not in there}
        found = connection.execute(select(t.id, t.task)).all()
    assert {row.id for row in found if row.task == "new"} == {row_id for _, row_id in inserted}
    assert len(found) == 121


@pytest.mark.usefixtures("seed")
def test_each_row_changes_its_own_and_what_is_filled_may_stay(engine: Engine) -> None:
    with engine.begin() as connection:
        for number in range(3):
            connection.execute(schema.trajectories.insert().values(**trajectory(f"t{number}", task=f"{number}" * 2)))
        changes = [{"project": "default", "id": f"t{number}", "completions": number} for number in (1, 2)]
        update_many(connection, schema.trajectories, changes)
        update_many(connection, schema.trajectories, [{"project": "other", "id": "t0", "completions": 9}])
        assert connection.execute(select(t.completions).order_by(t.id)).scalars().all() == [0, 1, 2]
        connection.execute(schema.trajectories.update().where(t.id == "t0").values(task=None))
        named = [{"project": "default", "id": f"t{number}", "task": "x"} for number in (0, 1)]
        update_many(connection, schema.trajectories, named, only_null="task")
        assert connection.execute(select(t.task).order_by(t.id)).scalars().all() == ["x", "11", "22"]


class Counted(msgspec.Struct):
    project: str
    id: str
    task: str | None
    completions: int
    last_seen_at: datetime


@pytest.mark.usefixtures("seed")
def test_structs_are_rows_and_null_is_written_too(engine: Engine) -> None:
    row = msgspec.defstruct("Begun", list(trajectory("t", task=None)))
    begun = [row(**trajectory(f"t{number}", task=task)) for number, task in enumerate(("a", "b", None))]
    told = [Counted("default", f"t{number}", task, number, NOW) for number, task in ((0, None), (1, None))]
    with engine.begin() as connection:
        assert len(insert_absent(connection, schema.trajectories, begun)) == 3
        insert_many(connection, schema.trajectories, begun)
        update_many(connection, schema.trajectories, told)
        assert connection.execute(select(t.task, t.completions).order_by(t.id)).all() == [
            (None, 0),
            (None, 1),
            (None, 0),
        ]
        update_many(connection, schema.trajectories, [Counted("default", "t2", "c", 2, NOW)])
        assert connection.execute(select(t.task, t.completions).where(t.id == "t2")).all() == [("c", 2)]


def test_sqlite_is_told_a_column_from_when_it_was_filled_once(tmp_path: Path) -> None:
    table = Table("few", MetaData(), Column("id", Text, primary_key=True), Column("task", Text), Column("error", Text))
    engine, told = connect(f"sqlite:///{tmp_path / 'few.db'}"), []
    table.create(engine)
    with engine.begin() as connection:
        connection.connection.dbapi_connection.set_trace_callback(lambda sql: told.append(sql.partition(" VALUES")[0]))
        for row in ({"id": "a"}, {"id": "b", "error": "e"}, {"id": "c"}, {"id": "d", "task": "t"}, {"id": "e"}):
            insert_many(connection, table, [dict.fromkeys(table.c.keys()) | row])
    columns = ("id", "id, error", "id, error", "id, task, error", "id, task, error")
    assert [one for one in told if "few" in one] == [f"INSERT INTO few ({names})" for names in columns]


def test_sqlite_is_told_once_what_all_rows_have_in_common_until_a_column_has_differed(tmp_path: Path) -> None:
    names = ("project", "id", "task", "n")
    table = Table("shared", MetaData(), *(Column(name, Text, primary_key=name in names[:2]) for name in names))
    engine, told = connect(f"sqlite:///{tmp_path / 'few.db'}"), []
    table.create(engine)
    batches = [
        [("p", "a", "t", "1"), ("p", "b", "t", "2")],
        [("p", "c", "t", "3")],
        [("p", "d", "t", "3"), ("p", "e", "t", "3"), ("p", "f", "t", "3")],
        [("p", "g", None, "4"), ("p", "h", "u", "4")],
        [("q", f"{number:03d}", "u", "5") for number in range(51)],
        [("q", "r", "u", "5"), ("q", "r", "u", "5")],
    ]
    with engine.begin() as connection:
        connection.connection.dbapi_connection.set_trace_callback(told.append)
        for rows in batches:
            insert_many(connection, table, [dict(zip(names, row, strict=True)) for row in rows], ("project", "id"))
        connection.connection.dbapi_connection.set_trace_callback(None)
        found = [tuple(row) for row in connection.execute(select(table))]
    assert sorted(found) == sorted({row for rows in batches for row in rows})
    columns = [sql[len("INSERT INTO shared (") :].partition(")")[0] for sql in told if "shared" in sql]
    both, all_but_project = "project, task, id, n", "project, id, task, n"
    assert columns == [both, "project, id, task, n", both, *[all_but_project] * 4]
    assert " SELECT 'p', 't', * FROM (VALUES ('a', '1'), ('b', '2')) LIMIT 2 " in told[0]


@pytest.mark.parametrize(("count", "pauses"), [(1, 0), (10, 0), (11, 1), (43, 4)])
def test_others_go_first_between_few_rows(tmp_path: Path, count: int, pauses: int) -> None:
    table = Table("few", MetaData(), Column("id", Text, primary_key=True), Column("task", Text))
    engine, told = connect(f"sqlite:///{tmp_path / 'few.db'}"), []
    table.create(engine)
    with engine.begin() as connection:
        connection.connection.dbapi_connection.set_trace_callback(told.append)
        rows = [{"id": f"{number}", "task": None} for number in range(count)]
        insert_many(connection, table, rows, pause=lambda: told.append("others"))
        connection.connection.dbapi_connection.set_trace_callback(None)
        assert len(connection.execute(select(table)).all()) == count
    kinds = ["others" if one == "others" else "insert" for one in told if one == "others" or "INTO few" in one]
    assert kinds == ["insert", *["others", "insert"] * pauses]


@pytest.mark.usefixtures("seed")
def test_instants_of_one_second_and_of_others_are_as_sqlalchemy_writes_them(engine: Engine) -> None:
    zones = UTC, timezone(timedelta(hours=-3, minutes=-30))
    steps = (0, 1, 999_999, 1_000_000, 1_000_001, -1, -999_999, 60_000_000, 86_400_000_000, -(10**15), 7)
    instants = [datetime(1970, 1, 1, 0, 0, tzinfo=UTC), datetime(1970, 1, 1, 0, 0, 0, 5, UTC)]
    instants += [(NOW + timedelta(microseconds=step)).astimezone(zone) for step in steps for zone in zones]
    rows = [trajectory(f"t{number:02d}", last_seen_at=instant) for number, instant in enumerate(instants)]
    column = "last_seen_at" if engine.dialect.name == "sqlite" else "extract(epoch FROM last_seen_at)"
    found = []
    for write in (
        lambda connection: insert_many(connection, schema.trajectories, rows),
        lambda connection: connection.execute(schema.trajectories.insert(), rows),
    ):
        with engine.begin() as connection:
            write(connection)
            found.append(connection.exec_driver_sql(f"SELECT {column} FROM trajectories ORDER BY id").scalars().all())
            connection.execute(schema.trajectories.delete())
    assert found[0] == found[1]


@pytest.mark.usefixtures("seed")
def test_an_instant_without_a_zone_is_refused(engine: Engine) -> None:
    row = as_bulk(schema.trajectories, trajectory("t", created_at=datetime(2026, 1, 1)))  # noqa: DTZ001
    with engine.begin() as connection, pytest.raises(ValueError, match="has no time zone"):
        insert_many(connection, schema.trajectories, [row])


@pytest.mark.usefixtures("seed")
def test_a_column_of_instants_that_equals_the_one_before_is_no_other_column(engine: Engine) -> None:
    instants = [NOW + timedelta(microseconds=number) for number in range(3)]
    rows = [
        as_bulk(schema.trajectories, trajectory(f"t{number}", created_at=instant, last_seen_at=instant))
        for number, instant in enumerate(instants)
    ]
    rows += [as_bulk(schema.trajectories, trajectory("t3", created_at=NOW, last_seen_at=instants[2]))]
    with engine.begin() as connection:
        for some in (rows[:2], rows[2:3], rows[3:]):
            insert_many(connection, schema.trajectories, some)
        found = connection.execute(select(t.created_at, t.last_seen_at).order_by(t.id)).all()
    assert [tuple(row) for row in found] == [*((instant, instant) for instant in instants), (NOW, instants[2])]


@pytest.mark.parametrize(
    ("sql", "values"),
    [
        ("INSERT INTO few VALUES (?)", (None,)),
        ("INSERT INTO few VALUES (?)", (object(),)),
        ("INSERT INTO few VALUES (?)", (2**70,)),
        ("INSERT INTO few VALUES (?)", ("secret", 2)),
        ("nonsense", ()),
    ],
)
def test_an_error_past_sqlalchemy_is_the_one_that_it_would_raise(tmp_path: Path, sql: str, values: Any) -> None:
    engine, raised = connect(f"sqlite:///{tmp_path / 'few.db'}"), []
    Table("few", MetaData(), Column("id", Text, nullable=False)).create(engine)
    for run in (run_sqlite, Connection.exec_driver_sql):
        with pytest.raises(Exception) as caught, engine.begin() as connection:
            run(connection, sql, values)
        raised.append((caught.type, str(caught.value), type(caught.value.__cause__)))
    assert raised[0] == raised[1]


def test_a_query_past_sqlalchemy_that_fails_at_a_later_row_fails_as_sqlalchemy_says(tmp_path: Path) -> None:
    # The second number overflows.
    sql = "SELECT abs(column1) FROM (VALUES (?), (-9223372036854775807 - 1))"
    with connect(f"sqlite:///{tmp_path / 'few.db'}").begin() as connection:
        with pytest.raises(DBAPIError, match="integer overflow"):
            read_sqlite(connection, sql, (1,))
        assert read_sqlite(connection, "SELECT ?", (1,)) == [(1,)]


def test_transactions_of_one_thread_share_a_connection_until_one_fails_or_the_engine_is_new(tmp_path: Path) -> None:
    engine, told = connect(f"sqlite:///{tmp_path / 'few.db'}"), []
    Table("few", MetaData(), Column("id", Text, primary_key=True)).create(engine)
    transactions = Transactions(engine)

    def write(row_id: str) -> Connection:
        with transactions.begin() as connection:
            assert connection.connection.dbapi_connection.in_transaction
            connection.exec_driver_sql("INSERT INTO few VALUES (?)", (row_id,))
            told.append(row_id)
        assert not connection.closed
        assert not connection.in_transaction()
        return connection

    first = write("a")
    assert write("b") is first
    with pytest.raises(IntegrityError):
        write("a")
    assert first.closed
    second = write("c")
    engine.dispose()
    # As after `sync_commits`: what new connections are told, the old one was not.
    third = write("d")
    assert second.closed
    assert third is not second
    with pytest.raises(KeyboardInterrupt), transactions.begin() as connection:
        connection.exec_driver_sql("INSERT INTO few VALUES ('e')")
        raise KeyboardInterrupt
    fourth = write("f")
    transactions.close()
    transactions.close()
    assert fourth.closed
    with engine.connect() as connection:
        assert connection.exec_driver_sql("SELECT id FROM few ORDER BY id").scalars().all() == list("abcdf")
    assert engine.pool.checkedout() == 0


def test_transactions_of_postgresql_are_those_of_its_engine(engine: Engine) -> None:
    transactions = Transactions(engine)
    with transactions.begin() as connection:
        assert connection.exec_driver_sql("SELECT 1").scalar() == 1
    kept = 1 if engine.dialect.name == "sqlite" else 0
    assert engine.pool.checkedout() == kept
    transactions.close()
    assert engine.pool.checkedout() == 0
