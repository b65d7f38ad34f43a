"""What is read again and again is read only once something was written."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine

from migrations import schema
from proxy.recording.store import Store
from proxy.trajectories.store import ThreadTables
from tests.conftest import NOW
from tests.unit.proxy.conftest import make_call
from whetstone.database.change_detector import Changes
from whetstone.database.engine import connect


def test_what_another_process_commits_is_read_at_once(engine: Engine, seed: Any) -> None:
    store, other = Store(engine), connect(engine.url.render_as_string(hide_password=False))
    for version in range(1, 4):
        with other.begin() as connection:
            connection.execute(schema.policies.update().values(live_version=version))
        assert [policy.live_version for policy in store.policies("default") * 2] == [version] * 2
    store.close()
    other.dispose()


def test_what_this_process_commits_is_read_at_once(engine: Engine, seed: Any) -> None:
    store = Store(engine)
    for version in range(1, 4):
        with engine.begin() as connection:
            connection.execute(schema.policies.update().values(live_version=version))
        assert store.policies("default")[0].live_version == version
    store.close()


def test_nothing_is_read_while_nobody_writes(engine: Engine, seed: Any) -> None:
    changes, read = Changes(engine), list[int]()
    for _ in range(3):
        changes.unless("it", lambda: read.append(1))
    assert len(read) == (1 if engine.dialect.name == "sqlite" else 3)
    seed.trajectory("t", turns=0)
    changes.unless("it", lambda: read.append(1))
    assert len(read) == (2 if engine.dialect.name == "sqlite" else 4)
    changes.close()


def test_nothing_is_read_for_calls_of_this_process(engine: Engine, seed: Any) -> None:
    store, read = Store(engine), list[int]()

    def reads(before: Callable[[], object] = lambda: None) -> bool:
        before()
        count = len(read)
        store.changes.unless("it", lambda: read.append(1))
        return len(read) > count

    def write(call_id: str) -> None:
        with store.transactions.begin() as connection:
            store.calls.write(connection, [make_call(call_id)])

    always = engine.dialect.name != "sqlite"
    assert reads(lambda: write("c0"))
    assert not reads() or always
    assert not reads(lambda: write("c1")) or always
    # What others commit, or this process over another connection.
    assert reads(lambda: seed.trajectory("t", turns=0))
    assert not reads(lambda: write("c2")) or always
    # What it writes beside calls.
    assert reads(store.changes.committed)
    assert not reads() or always
    # What counts is the same connection.
    with pytest.raises(ZeroDivisionError), store.transactions.begin():
        raise ZeroDivisionError
    assert reads(lambda: write("c3"))
    assert not reads(lambda: write("c4")) or always
    store.transactions.close()
    assert reads()
    store.close()


def test_what_is_committed_behind_a_long_transaction_is_read_all_the_same(engine: Engine, seed: Any) -> None:
    store = Store(engine)
    with store.transactions.begin() as connection:
        store.calls.write(connection, [make_call("c0")])
    assert store.policies("default")[0].live_version == 0
    with store.transactions.begin() as connection:
        store.calls.write(connection, [make_call("c1")])
        assert store.transactions.elsewhere() is None or engine.dialect.name != "sqlite"
        assert store.policies("default")[0].live_version == 0
    assert store.policies("default")[0].live_version == 0
    with engine.begin() as connection:
        connection.execute(schema.policies.update().values(live_version=7))
    assert store.policies("default")[0].live_version == 7
    store.transactions.close()
    store.close()


def test_what_is_rolled_back_was_never_seen(engine: Engine, seed: Any) -> None:
    store = Store(engine)
    before = store.policies("default")
    with engine.connect() as connection:
        connection.execute(schema.policies.update().values(live_version=7))
        assert store.policies("default") == before
        connection.rollback()
    assert store.policies("default") == before
    store.close()


def test_what_cannot_be_read_is_read_again(engine: Engine, seed: Any) -> None:
    changes = Changes(engine)
    with pytest.raises(ZeroDivisionError):
        changes.unless("it", lambda: 1 / 0)
    assert changes.unless("it", lambda: 2.0) == 2.0
    changes.close()
    assert changes.unless("it", lambda: 3.0) == 3.0


def test_a_proxy_that_says_nothing_for_long_is_no_longer_among_the_others(engine: Engine, seed: Any) -> None:
    tables, now_s = ThreadTables(engine, "default"), NOW.timestamp()
    tables.report_written("a", now_s, now_s)
    tables.report_written("b", now_s + 1, now_s + 5)
    assert tables.written("a", now_s - 1) == {"b": now_s + 1}
    assert tables.written("b", now_s - 1) == {"a": now_s}
    assert tables.written("c", (NOW + timedelta(seconds=3)).timestamp()) == {"b": now_s + 1}
    assert tables.written("c", (NOW + timedelta(seconds=6)).timestamp()) == {}


def test_a_database_that_is_not_there_yet_is_no_error_of_its_own(tmp_path: Path) -> None:
    engine = create_engine(f"sqlite:///{tmp_path / 'none' / 'whetstone.db'}")
    changes = Changes(engine)
    assert changes.unless("it", lambda: 1) == 1
    changes.close()
    engine.dispose()
