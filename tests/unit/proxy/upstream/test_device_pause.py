"""An accelerator that vLLM shares with the trainer: requests wait while a step has it, and are answered afterwards."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from migrations import schema
from tests.unit.proxy.conftest import FakeHandler, FakeVllm, RunningProxy, events, settings_for, wait_for
from tests.unit.proxy.upstream.test_reconciler import LOAD, Versions, replicas

Start = Callable[..., RunningProxy]
STEP = "starter#7"


@pytest.fixture
def shared(database_url: str, fake_vllm: FakeVllm, tmp_path: Path, start: Start) -> RunningProxy:
    return start(
        settings_for(
            database_url, fake_vllm.url, tmp_path, vllm={"shares_device": True}, proxy={"max_wait_s": 60, "port": 0}
        )
    )


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as threads:
        yield threads


def pause(proxy: RunningProxy, step: str | None, seconds: float = 60) -> None:
    """As the trainer says it."""
    until = None if step is None else datetime.now(UTC) + timedelta(seconds=seconds)
    with proxy.engine.begin() as connection:
        connection.execute(schema.projects.update().values(pause_id=step, pause_until=until))


def told(proxy: RunningProxy) -> tuple[str | None, int | None, int | None]:
    """What the proxy says: the pause it keeps, what is in flight, what waits."""
    with proxy.engine.execution_options(isolation_level="AUTOCOMMIT").connect() as connection:
        row = connection.execute(schema.proxies.select()).one()
    return row.pause_seen, row.in_flight, row.waiting


def test_what_is_being_answered_finishes_and_what_is_new_waits(
    shared: RunningProxy, fake_vllm: FakeVllm, threads: ThreadPoolExecutor
) -> None:
    go_on = threading.Event()

    def in_two_parts(handler: FakeHandler, _body: dict[str, Any]) -> None:
        handler.begin()
        handler.say(events()[0])
        go_on.wait(60)
        for event in events()[1:]:
            handler.say(event)
        handler.end()

    fake_vllm.script = in_two_parts
    streamed = threads.submit(shared.chat, stream=True)
    wait_for(lambda: fake_vllm.requests)
    pause(shared, STEP)
    wait_for(lambda: told(shared) == (STEP, 1, 0))
    later = [threads.submit(shared.chat, stream=stream) for stream in (True, True)]
    wait_for(lambda: told(shared) == (STEP, 1, 2))
    go_on.set()
    assert streamed.result().text.endswith("data: [DONE]\n\n")
    wait_for(lambda: told(shared) == (STEP, 0, 2))
    assert len(fake_vllm.requests) == 1, "the step has the accelerator"
    ready = shared.client.get("/readyz")
    assert (ready.status_code, ready.json()["paused"], ready.json()["waiting"]) == (200, True, 2)
    pause(shared, None)
    assert {answer.result().status_code for answer in later} == {200}
    wait_for(lambda: told(shared) == (None, 0, 0))
    assert {row.status for row in shared.recorded(3)} == {"complete"}


def test_the_trainer_wakes_the_server_and_requests_go_on(
    shared: RunningProxy, fake_vllm: FakeVllm, threads: ThreadPoolExecutor
) -> None:
    pause(shared, STEP)
    wait_for(lambda: told(shared)[0] == STEP)
    fake_vllm.asleep = True
    wait_for(lambda: replicas(shared)[fake_vllm.url].state == "asleep")
    assert shared.client.get("/readyz").status_code == 200, "requests wait; nobody is to send them elsewhere"
    answer = threads.submit(shared.chat)
    wait_for(lambda: told(shared)[2] == 1)
    assert fake_vllm.controls == [], "a step has it: nobody wakes it"
    fake_vllm.asleep = False
    pause(shared, None)
    assert answer.result().status_code == 200
    wait_for(lambda: replicas(shared)[fake_vllm.url].state == "serving")
    assert fake_vllm.controls == []


def test_a_pause_that_nobody_ends_is_over_at_its_time_and_the_server_is_woken(
    shared: RunningProxy, fake_vllm: FakeVllm, threads: ThreadPoolExecutor
) -> None:
    pause(shared, STEP)
    wait_for(lambda: told(shared)[0] == STEP)
    fake_vllm.asleep = True
    answer = threads.submit(shared.chat)
    wait_for(lambda: told(shared)[2] == 1)
    pause(shared, STEP, seconds=-1)  # its time is over, and the trainer is dead
    assert answer.result().status_code == 200
    assert fake_vllm.controls == [("/wake_up", "")]
    wait_for(lambda: told(shared) == (None, 0, 0))


def test_nothing_is_loaded_while_a_step_has_the_accelerator(
    shared: RunningProxy, fake_vllm: FakeVllm, tmp_path: Path
) -> None:
    pause(shared, STEP)
    wait_for(lambda: told(shared)[0] == STEP)
    Versions(shared, tmp_path).add(1)
    wait_for(lambda: fake_vllm.url in replicas(shared) and replicas(shared)[fake_vllm.url].state == "behind")
    assert fake_vllm.controls == []
    pause(shared, None)
    wait_for(lambda: fake_vllm.adapters)
    assert fake_vllm.controls == [(LOAD, "starter@v1")]


def test_a_request_waits_no_longer_than_it_may(
    sqlite_url: str, fake_vllm: FakeVllm, tmp_path: Path, start: Start
) -> None:
    proxy = start(settings_for(sqlite_url, fake_vllm.url, tmp_path, vllm={"shares_device": True}))
    pause(proxy, STEP)
    wait_for(lambda: told(proxy)[0] == STEP)
    refused = proxy.chat()
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "training")
    assert int(refused.headers["retry-after"]) > 0
    assert fake_vllm.requests == []


def test_a_proxy_that_starts_during_a_pause_keeps_it_from_its_first_request_on(
    sqlite_url: str, fake_vllm: FakeVllm, tmp_path: Path, start: Start
) -> None:
    settings = settings_for(sqlite_url, fake_vllm.url, tmp_path, vllm={"shares_device": True})
    first = start(settings)
    pause(first, STEP)
    first.stop()
    assert start(settings).chat().json()["error"]["code"] == "training"
    assert fake_vllm.requests == []
