"""The recorder on its own: what is durable, and when. The database is real, and away where it must be."""

import asyncio
import gc
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
from sqlalchemy import Connection, Engine, create_engine, select, text

from migrations import schema
from proxy.domain.call import Call
from proxy.domain.feedback import Feedback
from proxy.domain.feedback_rows import row_of
from proxy.errors import NotRecorded
from proxy.recording import recorder as module
from proxy.recording import writer
from proxy.recording.journal.log import Journal
from proxy.recording.recorder import Recorder
from proxy.recording.store import Store
from tests.unit.proxy.conftest import make_call, make_choice
from whetstone.config.proxy import ProxySettings
from whetstone.database.engine import connect


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "RETRY_S", 0.02)
    # Nor may a busy machine take a database that is slow for one that is silent.
    monkeypatch.setattr(module, "COMMIT_WAITS_S", 60)


def make_recorder(
    engine: Engine,
    folder: Path,
    hints: list[None] | None = None,
    recovered: list[Any] | None = None,
    **settings: Any,
) -> Recorder:
    counted = [] if hints is None else hints
    taken_up = [] if recovered is None else recovered
    return Recorder(
        Store(engine),
        folder,
        on_feedback=lambda: counted.append(None),
        on_written=lambda _calls: None,
        on_recovered=taken_up.append,
        on_feedback_recovered=taken_up.append,
        # Smaller than anybody may set them.
        settings=ProxySettings().model_copy(update=settings),
    )


@asynccontextmanager
async def recording(
    engine: Engine,
    folder: Path,
    hints: list[None] | None = None,
    recovered: list[Any] | None = None,
    **settings: Any,
) -> AsyncIterator[Recorder]:
    recorder = make_recorder(engine, folder, hints, recovered, **settings)
    recorder.start()
    yield recorder
    await recorder.close()


def stored(engine: Engine, table: Any = schema.completions) -> list[str]:
    with engine.connect() as connection:
        return [row.id for row in connection.execute(select(table.c.id).order_by(table.c.id))]


async def until(condition: Callable[[], Any]) -> None:
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("still not so after 10 s")


def away(engine: Engine) -> None:
    """The database is away: PostgreSQL takes no connection, SQLite's tables are gone."""
    if engine.dialect.name == "postgresql":
        _of_server(engine, "ALTER DATABASE {} ALLOW_CONNECTIONS false")
        _of_server(engine, "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{}'")
        return
    with engine.begin() as connection:
        for table in ("trajectories", "feedback"):
            connection.execute(text(f"ALTER TABLE {table} RENAME TO {table}_away"))


def back(engine: Engine) -> None:
    if engine.dialect.name == "postgresql":
        _of_server(engine, "ALTER DATABASE {} ALLOW_CONNECTIONS true")
        return
    with engine.begin() as connection:
        for table in ("trajectories", "feedback"):
            connection.execute(text(f"ALTER TABLE {table}_away RENAME TO {table}"))


def _of_server(engine: Engine, statement: str) -> None:
    admin = create_engine(engine.url.set(database="postgres"), isolation_level="AUTOCOMMIT")
    with admin.connect() as connection:
        connection.execute(text(statement.format(engine.url.database)))
    admin.dispose()


@contextmanager
def busy(engine: Engine) -> Iterator[None]:
    """The database answers nobody who writes feedback, and says nothing."""
    with engine.begin() as connection:
        if engine.dialect.name == "postgresql":
            connection.execute(text("LOCK TABLE feedback, trajectories"))
        yield


def a_reward(trajectory_id: str = "t0", **values: Any) -> dict[str, Any]:
    return row_of(Feedback(trajectory_id=trajectory_id, reward=1.0, **values), "default", datetime.now(UTC))


def run(main: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(main(), timeout=20))  # type: ignore[arg-type]


def test_calls_and_feedback_reach_sql_and_leave_no_journal(engine: Engine, seed: Any, tmp_path: Path) -> None:
    hints: list[None] = []

    async def main() -> None:
        async with recording(engine, tmp_path / "journal", hints) as recorder:
            for number in range(150):
                recorder.record(make_call(f"c{number}", f"t{number}"))
            assert recorder.unwritten == 150
            ((feedback_id, _),) = await recorder.feedback([a_reward()])
            # One writer, in order: what was recorded before the feedback is there when it is.
            assert len(stored(engine)) == 150
            assert stored(engine, schema.feedback) == [feedback_id]
            await until(lambda: recorder.unwritten == 0)

    run(main)
    assert list((tmp_path / "journal").iterdir()) == []
    assert hints


def test_what_a_killed_process_left_is_taken_up_whole(engine: Engine, seed: Any, tmp_path: Path) -> None:
    """Every field survives the journal: the rows are those of a call that was never in it."""
    tools = [{"type": "function", "function": {"name": "f"}}]
    odd = {"role": "user", "content": 'ü "\\ \u2028', "number": 1.5, "list": [None, True]}
    call = make_call("c0", messages=[odd], tools=tools, choices=(make_choice(0), make_choice(1)), ttft_ms=0.5)
    with engine.begin() as connection:
        Store(engine).calls.write(connection, [call])
    tables = (schema.completions, schema.trajectories, schema.groups)

    def rows() -> list[Any]:
        with engine.connect() as connection:
            return [connection.execute(select(table).order_by(table.c.id)).all() for table in tables]

    expected = rows()
    with engine.begin() as connection:
        for table in tables:
            connection.execute(table.delete())

    async def main() -> None:
        dead = make_recorder(engine, tmp_path)
        dead._journal = Journal(tmp_path)
        dead.record(call)
        dead._journal.close()
        assert len(list(tmp_path.glob("*.journal"))) == 1
        async with recording(engine, tmp_path) as recorder:
            await until(lambda: recorder.unwritten == 0)

    run(main)
    assert rows() == expected
    assert list(tmp_path.glob("*.journal")) == []


def test_while_the_database_is_away_calls_and_feedback_wait_in_the_order_they_came(
    engine: Engine, seed: Any, tmp_path: Path
) -> None:
    hints: list[None] = []

    async def main() -> list[str]:
        async with recording(engine, tmp_path / "journal", hints) as recorder:
            away(engine)
            recorder.record(make_call("c0", "t0"))
            first = await recorder.feedback([a_reward(), a_reward("t1")])
            recorder.record(make_call("c1", "t1"))
            second = await recorder.feedback([a_reward(idempotency_key="k")])
            again = await recorder.feedback([a_reward(idempotency_key="k")])
            assert second[0].id == again[0].id
            assert recorder.unwritten == 5 and recorder.away_since_s is not None
            back(engine)
            await until(lambda: recorder.unwritten == 0)
            assert recorder.away_since_s is None
            ((committed, new),) = await recorder.feedback([a_reward(idempotency_key="k")])
            assert (committed, new) == (second[0].id, False)
        return [one.id for one in (*first, *second)]

    ids = asyncio.run(main())
    assert stored(engine) == ["c0", "c1"]
    assert stored(engine, schema.feedback) == sorted(ids)
    assert hints
    assert list((tmp_path / "journal").iterdir()) == []


def test_a_withdrawal_is_refused_while_the_database_is_away(engine: Engine, seed: Any, tmp_path: Path) -> None:
    store = Store(engine)

    def withdraw(connection: Connection) -> None:
        store.withdraw_feedback(connection, "default", "f", datetime.now(UTC))

    async def main() -> None:
        async with recording(engine, tmp_path / "journal") as recorder:
            away(engine)
            for _ in range(2):
                with pytest.raises(NotRecorded, match="send it again"):
                    await recorder.commit(withdraw)
            back(engine)
            await until(lambda: recorder.away_since_s is None)
            await recorder.commit(withdraw)

    run(main)


def test_feedback_does_not_wait_for_a_database_that_is_silent(
    engine: Engine, seed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may commit it after all: what the journal has then is there already."""
    monkeypatch.setattr(module, "COMMIT_WAITS_S", 0.05)

    async def main() -> list[str]:
        async with recording(engine, tmp_path / "journal") as recorder:
            with busy(engine):
                ids = [one.id for one in await recorder.feedback([a_reward(), a_reward("t1", idempotency_key="k")])]
                assert recorder.unwritten == 1
            await until(lambda: recorder.unwritten == 0)
        return ids

    ids = asyncio.run(main())
    assert stored(engine, schema.feedback) == sorted(ids)


def test_a_database_that_is_silent_for_long_counts_as_away_until_it_speaks(
    engine: Engine, seed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "SILENT_S", 0.0)

    async def main() -> None:
        async with recording(engine, tmp_path / "journal") as recorder:
            with busy(engine):
                recorder.record(make_call("c0", "t0"))
                await until(lambda: recorder.away_since_s is not None)
                # It is known: nobody waits for it any more, however long that would be.
                assert len(await recorder.feedback([a_reward()])) == 1
            await until(lambda: recorder.unwritten == 0 and recorder.away_since_s is None)

    run(main)
    assert stored(engine) == ["c0"]
    assert len(stored(engine, schema.feedback)) == 1


def test_feedback_does_not_wait_behind_all_that_is_caught_up_with(
    engine: Engine, seed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_BEFORE", 1)

    async def main() -> None:
        async with recording(engine, tmp_path / "journal") as recorder:
            with busy(engine):
                for number in range(2):
                    recorder.record(make_call(f"c{number}", f"t{number}"))
                assert len(await recorder.feedback([a_reward()])) == 1
                assert recorder.unwritten == 3
            await until(lambda: recorder.unwritten == 0)

    run(main)
    assert stored(engine) == ["c0", "c1"]
    assert len(stored(engine, schema.feedback)) == 1


def test_feedback_of_a_killed_process_is_taken_up_once_and_told(engine: Engine, seed: Any, tmp_path: Path) -> None:
    row = a_reward(idempotency_key="k", comment='ü "\\ \u2028', metadata={"a": [1.5, None]}, final=True)

    async def main() -> list[Any]:
        away(engine)
        async with recording(engine, tmp_path / "journal") as recorder:
            recorder.record(make_call("c0", "t0"))
            ((answered, _),) = await recorder.feedback([row])
        back(engine)
        (left,) = (tmp_path / "journal").iterdir()
        payload = left.read_bytes()
        for _ in range(2):  # whoever is killed between commit and clean-up leaves it once more
            left.write_bytes(payload)
            recovered_now: list[Any] = []
            async with recording(engine, tmp_path / "journal", recovered=recovered_now):
                pass
            assert [one["id"] for one in recovered_now if isinstance(one, dict)] == [answered]
        return recovered_now

    call, recovered = asyncio.run(main())
    assert (call.id, recovered) == ("c0", row | {"id": recovered["id"]})
    (stored_row,) = rows_of(engine, schema.feedback)
    assert (stored_row.comment, stored_row.metadata, stored_row.created_at) == (
        row["comment"],
        row["metadata"],
        row["created_at"],
    )
    assert stored(engine) == ["c0"]


def rows_of(engine: Engine, table: Any) -> list[Any]:
    with engine.connect() as connection:
        return list(connection.execute(select(table)))


def test_feedback_the_database_refuses_for_good_is_set_aside_and_blocks_nobody(
    engine: Engine, seed: Any, tmp_path: Path
) -> None:
    refused = a_reward() | {"target_kind": None}

    async def main() -> None:
        async with recording(engine, tmp_path / "journal") as recorder:
            away(engine)
            await recorder.feedback([refused])
            await recorder.feedback([a_reward()])
            back(engine)
            await until(lambda: recorder.unwritten == 0)
            with pytest.raises(NotRecorded):
                await recorder.feedback([refused])

    run(main)
    assert len(stored(engine, schema.feedback)) == 1
    (refused_file,) = (tmp_path / "journal").iterdir()
    assert (refused_file.name, json.loads(refused_file.read_bytes())["rows"][0]["id"]) == (
        f"{refused['id']}.refused",
        refused["id"],
    )


def test_stopped_while_the_database_is_away_calls_wait_for_the_next_start(
    engine: Engine, seed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Longer than a slow machine takes for all of this.
    monkeypatch.setattr(writer, "CLOSE_TIMEOUT_S", 120.0)

    async def main() -> None:
        away(engine)
        async with recording(engine, tmp_path / "journal") as recorder:
            recorder.record(make_call())
        back(engine)
        assert stored(engine) == []
        async with recording(engine, tmp_path / "journal"):
            pass

    took_s = asyncio.run(_timed(main))
    assert stored(engine) == ["c0"]
    assert list((tmp_path / "journal").iterdir()) == []
    assert took_s < 100, "nobody waits for a database that is away"


async def _timed(main: Callable[[], Awaitable[None]]) -> float:
    began = asyncio.get_running_loop().time()
    await main()
    return asyncio.get_running_loop().time() - began


def test_a_start_without_database_keeps_what_was_left_behind(engine: Engine, seed: Any, tmp_path: Path) -> None:
    async def main() -> None:
        away(engine)
        for _ in range(2):
            async with recording(engine, tmp_path / "journal") as recorder:
                recorder.record(make_call(f"c{recorder.unwritten}", f"t{recorder.unwritten}"))
        back(engine)
        async with recording(engine, tmp_path / "journal"):
            pass

    run(main)
    assert stored(engine) == ["c0", "c1"]


def test_what_waits_for_long_waits_in_the_journal_and_not_in_memory(
    engine: Engine, seed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_CACHED", 2)
    bad = make_call("c4", trajectory_id=None)  # type: ignore[arg-type]

    def alive() -> int:
        """Calls in memory, but for the one held here. By type: objects of torch answer `isinstance` with a warning."""
        gc.collect()
        return sum(type(one) is Call for one in gc.get_objects()) - 1

    async def main() -> None:
        async with recording(engine, tmp_path / "journal") as recorder:
            away(engine)
            for number in range(8):
                recorder.record(bad if number == 4 else make_call(f"c{number}", f"t{number}"))
            await until(lambda: alive() == 2)
            back(engine)
            await until(lambda: recorder.unwritten == 0)

    run(main)
    assert stored(engine) == ["c0", "c1", "c2", "c3", "c5", "c6", "c7"]
    (refused,) = (tmp_path / "journal").iterdir()
    assert refused.name == "c4.refused"


@pytest.mark.parametrize("bad", [{"policy": "nobody", "address": None}, {"trajectory_id": None}])
def test_a_call_the_database_refuses_blocks_nobody(
    engine: Engine, seed: Any, tmp_path: Path, bad: dict[str, Any]
) -> None:
    refused = make_call("bad", **bad)

    async def main() -> None:
        async with recording(engine, tmp_path / "journal") as recorder:
            recorder.record(make_call("c0", "t0"))
            recorder.record(refused)
            recorder.record(make_call("c1", "t1"))
            await recorder.feedback([a_reward()])
            await until(lambda: recorder.unwritten == 0)

    run(main)
    assert stored(engine) == ["c0", "c1"]
    (refused_file,) = (tmp_path / "journal").iterdir()
    assert refused_file.name == "bad.refused"
    assert json.loads(refused_file.read_bytes())["id"] == "bad"


def test_a_call_refused_while_others_wait_for_the_database_blocks_nobody(
    engine: Engine, seed: Any, tmp_path: Path
) -> None:
    async def main() -> None:
        async with recording(engine, tmp_path / "journal") as recorder:
            away(engine)
            recorder.record(make_call("bad", trajectory_id=None))  # type: ignore[arg-type]
            recorder.record(make_call("c0", "t0"))
            await asyncio.sleep(0.1)
            back(engine)
            await until(lambda: recorder.unwritten == 0)
            assert await recorder.feedback([a_reward()])

    run(main)
    assert stored(engine) == ["c0"]


def test_a_record_of_another_version_is_kept_and_blocks_nobody(engine: Engine, seed: Any, tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    path = journal.append(b'{"from": "the future"}').segment.path
    journal.append(msgspec.json.encode(make_call()))
    journal.close()

    async def main() -> None:
        async with recording(engine, tmp_path / "journal") as recorder:
            await until(lambda: recorder.unwritten == 0)

    run(main)
    assert stored(engine) == ["c0"]
    assert list((tmp_path / "journal").iterdir()) == [path]


def test_feedback_whose_app_hung_up_is_stored_and_the_writer_lives(engine: Engine, seed: Any, tmp_path: Path) -> None:
    async def main() -> None:
        async with recording(engine, tmp_path / "journal") as recorder:
            waiting = asyncio.ensure_future(recorder.feedback([a_reward()]))
            await asyncio.sleep(0)
            waiting.cancel()
            assert len(await recorder.feedback([a_reward()])) == 1

    run(main)
    assert len(stored(engine, schema.feedback)) == 2


# --- a journal that is full, or not there


def test_a_full_journal_refuses_before_anybody_works_and_has_room_again_when_sql_has_it(
    engine: Engine, seed: Any, tmp_path: Path
) -> None:
    async def main() -> None:
        async with recording(engine, tmp_path / "journal", max_journal_bytes=2000) as recorder:
            away(engine)
            taken = 0
            with pytest.raises(NotRecorded, match="free space"):
                while True:
                    recorder.record(make_call(f"c{taken}", f"t{taken}"))
                    taken += 1
            assert 0 < taken == recorder.unwritten and recorder.dropped == 0
            for refused in (recorder.check_room, lambda: recorder.record_or_drop(make_call("more"))):
                with pytest.raises(NotRecorded):
                    refused()
            with pytest.raises(NotRecorded):
                await recorder.feedback([a_reward()])
            back(engine)
            await until(lambda: recorder.unwritten == 0)
            recorder.check_room()
            assert recorder.record_or_drop(make_call("more", "more"))

    run(main)
    assert "more" in stored(engine)
    assert stored(engine, schema.feedback) == []


def test_where_unrecorded_answers_are_wanted_they_are_counted_and_feedback_is_still_refused(
    engine: Engine, seed: Any, tmp_path: Path
) -> None:
    full = {"max_journal_bytes": 1, "when_full": "unrecorded"}

    async def main() -> None:
        async with recording(engine, tmp_path / "journal", **full) as recorder:
            away(engine)
            assert recorder.record_or_drop(make_call("c0", "t0"))
            recorder.check_room()
            assert not recorder.record_or_drop(make_call("c1", "t1"))
            assert (recorder.dropped, recorder.unwritten) == (1, 1)
            with pytest.raises(NotRecorded):
                recorder.record(make_call("shadow", "t2"))
            with pytest.raises(NotRecorded):
                await recorder.feedback([a_reward()])
            back(engine)
            await until(lambda: recorder.unwritten == 0)

    run(main)
    assert stored(engine) == ["c0"]


def test_in_memory_nothing_is_written_to_the_folder_and_what_lay_there_is_taken_up(
    engine: Engine, seed: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "journal"
    left = Journal(folder)
    left.append(msgspec.json.encode(make_call("left", "t0")))
    left.close()

    async def main() -> None:
        async with recording(engine, folder, durability="async") as recorder:
            await until(lambda: recorder.unwritten == 0)
            assert list(folder.iterdir()) == []
            away(engine)
            recorder.record(make_call("c1", "t1"))
            await recorder.feedback([a_reward()])
            assert recorder.journal_bytes > 0 and list(folder.iterdir()) == []
            back(engine)
            await until(lambda: recorder.unwritten == 0)
            assert recorder.journal_bytes == 0

    run(main)
    assert stored(engine) == ["c1", "left"]
    assert len(stored(engine, schema.feedback)) == 1


def test_with_fsync_nothing_is_left_to_sync_once_it_is_durable(engine: Engine, seed: Any, tmp_path: Path) -> None:
    async def main() -> None:
        async with recording(engine, tmp_path / "journal", durability="fsync", fsync_every_s=60) as recorder:
            away(engine)
            for number in range(3):
                recorder.record(make_call(f"c{number}", f"t{number}"))
            await asyncio.gather(*(recorder.durable() for _ in range(3)))
            assert recorder._journal.to_sync() == []
            await recorder.feedback([a_reward()])
            assert recorder._journal.to_sync() == []
            back(engine)

    run(main)


def test_sqlite_commits_are_on_the_disk_unless_nothing_need_be(sqlite_url: str, tmp_path: Path) -> None:
    async def synchronous(durability: str) -> int:
        engine = connect(sqlite_url)
        with engine.connect():  # one that was there before
            pass
        recovered_now = set()
        async with recording(engine, tmp_path / "journal", durability=durability) as recorder:
            for one in (engine, recorder._store.writing):
                with one.connect() as connection:
                    recovered_now.add(connection.execute(text("PRAGMA synchronous")).scalar_one())
        engine.dispose()
        (level,) = recovered_now
        return int(level)

    assert [asyncio.run(synchronous(mode)) for mode in ("journal", "fsync", "async")] == [2, 2, 1]
