"""The writer: the order in which it locks rows, who learns what it committed, and what ends it."""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, select
from sqlalchemy.exc import TimeoutError as NotTaken

from migrations import schema
from proxy.domain.feedback_rows import identified, request_row
from proxy.recording.journal.segment import MemorySegment
from proxy.recording.store import Store
from proxy.recording.writer import JournalledItem, SyncWrite, Writer
from proxy.supervision import unexpected
from tests.unit.proxy.conftest import make_call

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def test_feedback_is_taken_back_while_the_judge_goes_from_it_to_its_trajectory(
    engine: Engine, seed: Any, tmp_path: Path
) -> None:
    store = Store(engine)
    row = identified(request_row("end", "t0", None, "default", NOW)) | {"key_id": None}
    with engine.begin() as connection:
        store.calls.write(connection, [make_call("c0")])
        store.insert_feedback(connection, [row])
    locked = threading.Event()
    judged: Future[None] = Future()

    def judge() -> None:
        try:
            with engine.begin() as connection:
                connection.execute(select(schema.feedback.c.id).with_for_update(key_share=True)).all()
                locked.set()
                time.sleep(0.5)  # until the writer waits for it
                connection.execute(select(schema.trajectories.c.id).with_for_update(key_share=True)).all()
            judged.set_result(None)
        except Exception as error:
            judged.set_exception(error)

    judging = threading.Thread(target=judge)
    judging.start()
    locked.wait()
    settled = threading.Event()
    writer = Writer(store, tmp_path, lambda _: None, lambda: None, lambda _: settled.set())
    withdrawn: Future[Any] = Future()
    writer.put(SyncWrite(lambda one: store.withdraw_feedback(one, "default", row["id"], NOW), withdrawn))
    call = make_call("c1")
    writer.put(JournalledItem(call, MemorySegment().append(b"")))
    writer.start()
    withdrawn.result(60)
    judged.result(60)
    judging.join()
    assert settled.wait(60)
    writer.close()
    with engine.connect() as connection:
        assert connection.scalar(select(schema.feedback.c.withdrawn_at)) == NOW
        assert list(connection.scalars(select(schema.completions.c.id).order_by("id"))) == ["c0", "c1"]


def test_what_somebody_had_written_is_read_before_they_are_told(
    engine: Engine, seed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, was_done = Store(engine), list[bool]()
    settled, written = threading.Event(), Future[Any]()
    committed = store.changes.committed
    monkeypatch.setattr(store.changes, "committed", lambda: (was_done.append(written.done()), committed()))
    writer = Writer(store, tmp_path, lambda _: None, lambda: None, lambda _: settled.set())
    writer.put(JournalledItem(make_call("c0"), MemorySegment().append(b"")))
    writer.start()
    assert settled.wait(60)
    assert store.policies("default")[0].live_version == 0
    promoted = schema.policies.update().values(live_version=7)
    writer.put(SyncWrite(lambda connection: connection.execute(promoted), written))
    written.result(60)
    assert was_done == [False]
    assert store.policies("default")[0].live_version == 7
    writer.close()
    store.close()


@pytest.mark.parametrize("waiting", [1, 2])
def test_an_error_of_a_callback_refuses_no_write_and_repeats_none(
    engine: Engine, seed: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, waiting: int
) -> None:
    settled, ran = list[int](), list[int]()

    def breaks(*_: Any) -> None:
        raise RuntimeError("a broken callback")

    def settle(items: Sequence[JournalledItem]) -> None:
        settled.append(len(items))
        breaks()

    def write(number: int) -> Callable[[Connection], int]:
        def run(connection: Connection) -> int:
            ran.append(number)
            connection.execute(schema.policies.update().values(live_version=number))
            return number

        return run

    before = unexpected["writer"]
    folder = tmp_path / "journal"
    folder.mkdir()
    writer = Writer(Store(engine), folder, breaks, breaks, settle)
    writes = [SyncWrite(write(number), Future[Any]()) for number in range(waiting)]
    for one in writes:
        writer.put(one)
    writer.start()
    assert [one.written.result(60) for one in writes] == list(range(waiting))
    after = SyncWrite(write(7), Future[Any]())
    writer.put(after)
    assert after.written.result(60) == 7
    writer.put(JournalledItem(make_call("c0"), MemorySegment().append(b"")))
    writer.close()
    assert not writer.dead and writer.away_since_s is None
    assert ran == [*range(waiting), 7]
    assert settled == [1]
    assert unexpected["writer"] - before == 6
    assert "RuntimeError: a broken callback" in caplog.text and "Traceback" in caplog.text
    with engine.connect() as connection:
        assert list(connection.scalars(select(schema.completions.c.id))) == ["c0"]
    assert not list(folder.iterdir())


def test_a_writer_that_died_says_so_and_keeps_nobody_waiting(
    engine: Engine, seed: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What ends the thread is no error that a transaction may have."""

    def ends(_: Any) -> None:
        raise SystemExit

    store = Store(engine)
    writer = Writer(store, tmp_path, lambda _: None, lambda: None, lambda _: None)
    dies, behind = SyncWrite(ends, Future[Any]()), SyncWrite(lambda _: None, Future[Any]())
    for one in (dies, behind):
        writer.put(one)
    writer.start()
    for one in (dies, behind):
        with pytest.raises(NotTaken, match="the thread that writes to SQL has ended"):
            one.written.result(60)
    assert writer.dead and writer.away_since_s is not None
    after = SyncWrite(lambda _: None, Future[Any]())
    writer.put(after)
    with pytest.raises(NotTaken, match="has ended"):
        after.written.result(60)
    writer.close()
    assert "the thread that writes to SQL ended by an error" in caplog.text and "Traceback" in caplog.text
    store.close()
