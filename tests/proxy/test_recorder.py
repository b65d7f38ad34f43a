"""The recorder on its own: what is durable, and when. The database is real; where it must be away, its tables are."""

import asyncio
import gc
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, select, text

from migrations import schema
from proxy import recorder as module
from proxy.call import Call
from proxy.errors import NotRecorded
from proxy.feedback import Feedback
from proxy.feedback_rows import row_of
from proxy.recorder import Recorder
from proxy.store import Store
from tests.proxy.conftest import make_call, make_choice


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RETRY_S", 0.02)


def make_recorder(engine: Engine, folder: Path, hints: list[None] | None = None) -> Recorder:
    told = [] if hints is None else hints
    return Recorder(
        Store(engine),
        folder,
        on_feedback=lambda: told.append(None),
        on_written=lambda _calls: None,
        on_recovered=lambda _call: None,
    )


@asynccontextmanager
async def recording(engine: Engine, folder: Path, hints: list[None] | None = None) -> AsyncIterator[Recorder]:
    recorder = make_recorder(engine, folder, hints)
    recorder.start()
    yield recorder
    await recorder.close()


def stored(engine: Engine, table: Any = schema.completions) -> list[str]:
    with engine.connect() as connection:
        return [row.id for row in connection.execute(select(table.c.id).order_by(table.c.id))]


async def until(found: Callable[[], Any]) -> None:
    for _ in range(1000):
        if found():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("still not so after 10 s")


def away(engine: Engine) -> None:
    """Every statement that writes a call or feedback fails as if the database were away."""
    with engine.begin() as connection:
        for table in ("trajectories", "feedback"):
            connection.execute(text(f"ALTER TABLE {table} RENAME TO {table}_away"))


def back(engine: Engine) -> None:
    with engine.begin() as connection:
        for table in ("trajectories", "feedback"):
            connection.execute(text(f"ALTER TABLE {table}_away RENAME TO {table}"))


def a_reward(trajectory_id: str = "t0", **values: Any) -> dict[str, Any]:
    return row_of(Feedback(trajectory_id=trajectory_id, reward=1.0, **values), "default", datetime.now(UTC))


def run(main: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(main(), timeout=20))  # type: ignore[arg-type]


@pytest.fixture
def sqlite_engine(sqlite_url: str) -> Any:
    from migrations.database import connect
    from tests.conftest import Seed

    engine = connect(sqlite_url)
    Seed(engine).project("default")
    yield engine
    engine.dispose()


def test_calls_and_feedback_reach_sql_and_leave_no_journal(engine: Engine, seed: Any, tmp_path: Path) -> None:
    hints: list[None] = []

    async def main() -> None:
        async with recording(engine, tmp_path / "journal", hints) as recorder:
            for number in range(300):
                recorder.record(make_call(f"c{number}", f"t{number}"))
            assert recorder.unwritten == 300
            (feedback_id,) = await recorder.feedback([a_reward()])
            # One writer, in order: what was recorded before the feedback is there when it is.
            assert len(stored(engine)) == 300
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
        dead._journal = module.Journal(tmp_path)
        dead.record(call)
        dead._journal.close()
        assert len(list(tmp_path.glob("*.journal"))) == 1
        async with recording(engine, tmp_path) as recorder:
            await until(lambda: recorder.unwritten == 0)

    run(main)
    assert rows() == expected
    assert list(tmp_path.glob("*.journal")) == []


def test_while_the_database_is_away_calls_wait_and_feedback_is_refused(sqlite_engine: Engine, tmp_path: Path) -> None:
    async def main() -> None:
        async with recording(sqlite_engine, tmp_path / "journal") as recorder:
            away(sqlite_engine)
            recorder.record(make_call("c0", "t0"))
            with pytest.raises(NotRecorded, match="send it again"):
                await recorder.feedback([a_reward()])
            recorder.record(make_call("c1", "t1"))
            await asyncio.sleep(0.1)
            with pytest.raises(NotRecorded):
                await recorder.feedback([a_reward()])
            assert recorder.unwritten == 2
            back(sqlite_engine)
            await until(lambda: recorder.unwritten == 0)
            assert len(await recorder.feedback([a_reward()])) == 1

    run(main)
    assert stored(sqlite_engine) == ["c0", "c1"]
    assert len(stored(sqlite_engine, schema.feedback)) == 1


def test_stopped_while_the_database_is_away_calls_wait_for_the_next_start(
    sqlite_engine: Engine, tmp_path: Path
) -> None:
    async def main() -> None:
        away(sqlite_engine)
        async with recording(sqlite_engine, tmp_path / "journal") as recorder:
            recorder.record(make_call())
        back(sqlite_engine)
        assert stored(sqlite_engine) == []
        async with recording(sqlite_engine, tmp_path / "journal"):
            pass

    began = asyncio.run(_timed(main))
    assert stored(sqlite_engine) == ["c0"]
    assert list((tmp_path / "journal").iterdir()) == []
    assert began < 5


async def _timed(main: Callable[[], Awaitable[None]]) -> float:
    began = asyncio.get_running_loop().time()
    await main()
    return asyncio.get_running_loop().time() - began


def test_a_start_without_database_keeps_what_was_left_behind(sqlite_engine: Engine, tmp_path: Path) -> None:
    async def main() -> None:
        away(sqlite_engine)
        for _ in range(2):
            async with recording(sqlite_engine, tmp_path / "journal") as recorder:
                recorder.record(make_call(f"c{recorder.unwritten}", f"t{recorder.unwritten}"))
        back(sqlite_engine)
        async with recording(sqlite_engine, tmp_path / "journal"):
            pass

    run(main)
    assert stored(sqlite_engine) == ["c0", "c1"]


def test_what_waits_for_long_waits_in_the_journal_and_not_in_memory(
    sqlite_engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_KEPT", 2)
    bad = make_call("c4", trajectory_id=None)  # type: ignore[arg-type]

    def alive() -> int:
        """Calls in memory, but for the one held here."""
        gc.collect()
        return sum(isinstance(one, Call) for one in gc.get_objects()) - 1

    async def main() -> None:
        async with recording(sqlite_engine, tmp_path / "journal") as recorder:
            away(sqlite_engine)
            for number in range(8):
                recorder.record(bad if number == 4 else make_call(f"c{number}", f"t{number}"))
            await until(lambda: alive() == 2)
            back(sqlite_engine)
            await until(lambda: recorder.unwritten == 0)

    run(main)
    assert stored(sqlite_engine) == ["c0", "c1", "c2", "c3", "c5", "c6", "c7"]
    (refused,) = (tmp_path / "journal").iterdir()
    assert refused.name == "c4.refused"


@pytest.mark.parametrize("bad", [{"policy": "nobody", "address": None}, {"trajectory_id": None}])
def test_a_call_the_database_refuses_blocks_nobody(sqlite_engine: Engine, tmp_path: Path, bad: dict[str, Any]) -> None:
    refused = make_call("bad", **bad)

    async def main() -> None:
        async with recording(sqlite_engine, tmp_path / "journal") as recorder:
            recorder.record(make_call("c0", "t0"))
            recorder.record(refused)
            recorder.record(make_call("c1", "t1"))
            await recorder.feedback([a_reward()])
            await until(lambda: recorder.unwritten == 0)

    run(main)
    assert stored(sqlite_engine) == ["c0", "c1"]
    (kept,) = (tmp_path / "journal").iterdir()
    assert kept.name == "bad.refused"
    assert json.loads(kept.read_bytes())["id"] == "bad"


def test_a_call_refused_while_others_wait_for_the_database_blocks_nobody(sqlite_engine: Engine, tmp_path: Path) -> None:
    async def main() -> None:
        async with recording(sqlite_engine, tmp_path / "journal") as recorder:
            away(sqlite_engine)
            recorder.record(make_call("bad", trajectory_id=None))  # type: ignore[arg-type]
            recorder.record(make_call("c0", "t0"))
            await asyncio.sleep(0.1)
            back(sqlite_engine)
            await until(lambda: recorder.unwritten == 0)
            assert await recorder.feedback([a_reward()])

    run(main)
    assert stored(sqlite_engine) == ["c0"]


def test_a_record_of_another_version_is_kept_and_blocks_nobody(sqlite_engine: Engine, tmp_path: Path) -> None:
    journal = module.Journal(tmp_path / "journal")
    path = journal.append(b'{"from": "the future"}').segment.path
    journal.append(module._encode(make_call()))
    journal.close()

    async def main() -> None:
        async with recording(sqlite_engine, tmp_path / "journal") as recorder:
            await until(lambda: recorder.unwritten == 0)

    run(main)
    assert stored(sqlite_engine) == ["c0"]
    assert list((tmp_path / "journal").iterdir()) == [path]


def test_feedback_whose_app_hung_up_is_stored_and_the_writer_lives(sqlite_engine: Engine, tmp_path: Path) -> None:
    async def main() -> None:
        async with recording(sqlite_engine, tmp_path / "journal") as recorder:
            waiting = asyncio.ensure_future(recorder.feedback([a_reward()]))
            await asyncio.sleep(0)
            waiting.cancel()
            assert len(await recorder.feedback([a_reward()])) == 1

    run(main)
    assert len(stored(sqlite_engine, schema.feedback)) == 2
