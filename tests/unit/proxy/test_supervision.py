"""Tasks beside the requests: no error ends one, and `/readyz` names those that fail."""

import asyncio
import ctypes
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import text

from proxy.app import Proxy
from proxy.supervision import Background, unexpected
from tests.unit.proxy.conftest import STREAM, FakeVllm, RunningProxy, settings_for, wait_for


def turns(outcomes: list[BaseException | None]) -> tuple[Callable[[], Awaitable[None]], asyncio.Event]:
    """A turn that ends as listed, one after the other, and an event that is set when there is none left."""
    over = asyncio.Event()

    async def turn() -> None:
        if not outcomes:
            over.set()
            return
        if (error := outcomes.pop(0)) is not None:
            raise error

    return turn, over


@pytest.mark.parametrize("error", [ValueError("odd"), asyncio.CancelledError(), OSError("gone")])
def test_a_task_goes_on_after_an_error_and_is_named_until_it_succeeds(error: BaseException) -> None:
    async def main() -> None:
        background, seen = Background(), list[dict[str, str]]()
        turn, over = turns([error, error, None])

        async def watched() -> None:
            seen.append(dict(background.failing))
            await turn()

        task = background.every(0.001, "some task", watched)
        async with asyncio.timeout(20):
            await over.wait()
        failing = {"some task": f"{type(error).__name__}: {error}"}
        assert seen[:4] == [{}, failing, failing, {}]
        assert not task.done() and "some task" in unexpected
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())


def test_an_unexpected_error_is_logged_once_with_its_trace_and_one_of_the_outside_world_in_a_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        turn, over = turns([OSError("gone"), OSError("gone"), ValueError("odd"), ValueError("odd"), None])
        task = Background().every(0.001, "this task", turn)
        async with asyncio.timeout(20):
            await over.wait()
        task.cancel()

    before = unexpected["this task"]
    asyncio.run(main())
    lines = [record for record in caplog.records if "this task" in record.message]
    assert [record.message.partition(":")[0] for record in lines] == ["this task", "this task failed", "this task"]
    assert [record.exc_info is not None for record in lines] == [False, True, False]
    assert unexpected["this task"] - before == 1


def test_a_task_takes_its_turn_at_once_where_somebody_waits_for_it() -> None:
    async def main() -> None:
        turn, over = turns([])
        at_once = asyncio.Event()
        task = Background().every(3600, "waits", turn, at_once)
        at_once.set()
        async with asyncio.timeout(20):
            await over.wait()
        task.cancel()

    asyncio.run(main())


def test_readiness_names_a_task_that_fails_until_it_works_again(plain_proxy: RunningProxy) -> None:
    """A moment in the database that is none breaks the reading of policies in a way that nobody expects."""

    def failing() -> Any:
        return plain_proxy.client.get("/readyz").json()["failing"]

    assert failing() == {}
    with plain_proxy.engine.begin() as connection:
        kept = connection.execute(text("SELECT created_at FROM policies")).scalar_one()
        connection.execute(text("UPDATE policies SET created_at = 'never'"))
    told = wait_for(failing)
    assert list(told) == ["refresh of keys and policies"] and told["refresh of keys and policies"]
    assert plain_proxy.client.get("/readyz").status_code == 200, "it serves all the same"
    label = 'whetstone_unexpected_errors_total{part="refresh of keys and policies"}'
    assert label in plain_proxy.client.get("/metrics").text
    with plain_proxy.engine.begin() as connection:
        connection.execute(text("UPDATE policies SET created_at = :kept"), {"kept": kept})
    wait_for(lambda: failing() == {})


def test_a_proxy_whose_writer_died_is_not_ready(sqlite_url: str, fake_vllm: FakeVllm, tmp_path: Path) -> None:
    settings = settings_for(sqlite_url, fake_vllm.url, tmp_path)

    async def main() -> None:
        messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        proxy, sent = Proxy(settings), asyncio.Queue[Any]()
        before = set(threading.enumerate())
        living = asyncio.ensure_future(proxy({"type": "lifespan"}, messages.get, sent.put))
        await messages.put({"type": "lifespan.startup"})
        assert (await sent.get())["type"] == "lifespan.startup.complete"
        (writer,) = [thread for thread in set(threading.enumerate()) - before if thread.name == "recorder"]
        async with httpx.AsyncClient(transport=httpx.ASGITransport(proxy), base_url="http://localhost") as app:
            assert (await app.get("/health")).status_code == 200
            assert (await app.get("/readyz")).json()["writer"] is True
            assert not proxy.broken
            assert writer.ident is not None
            for _ in range(20):
                # An exception from outside can be lost, where it meets code that a debugger or a collector runs.
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(writer.ident), ctypes.py_object(SystemExit))
                assert (await app.post("/v1/chat/completions", json=STREAM | {"stream": False})).status_code == 200
                await asyncio.to_thread(writer.join, 2)
                if not writer.is_alive():
                    break
            ready = await app.get("/readyz")
            told = ready.json()
            assert (ready.status_code, told["status"], told["writer"]) == (503, "unavailable", False)
            assert told["database"] is False and told["unwritten"] == 1
            assert (await app.get("/health")).status_code == 503
            assert proxy.broken
            rewarded = await app.post("/v1/feedback", json={"trajectory_id": "t", "reward": 1})
            assert (rewarded.status_code, rewarded.json()["state"]) == (202, "waiting")
        await messages.put({"type": "lifespan.shutdown"})
        await living

    asyncio.run(asyncio.wait_for(main(), 60))
