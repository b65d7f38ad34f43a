"""An answer whose pieces are taken as they come, by whoever waits for its end."""

import asyncio
import gc
import weakref
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from proxy.errors import UpstreamDown
from proxy.http.client_response import Response


class _Source:
    """A connection that nothing comes over but what a test says."""

    server = ("here", 1)

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()

    def drop(self) -> None:
        pass

    def go_on(self) -> None:
        pass


class Asked:
    """A stream that has begun, and what was taken of it."""

    def __init__(self) -> None:
        self.response = Response(_Source())
        self.response.headers[b"content-type"] = b"text/event-stream"
        self.response.headers[b"transfer-encoding"] = b"chunked"
        self.response.begins(200)
        self.taken: list[bytes] = []
        self.most = 100
        """Pieces that are taken; the next one is refused."""

    def take(self, data: bytes) -> bool:
        if data == b"bad":
            raise UpstreamDown("it cannot be read")
        self.taken.append(data)
        return len(self.taken) <= self.most

    def wait(self) -> "asyncio.Future[None]":
        return self.response.wait_more(self.take)

    async def comes(self, *pieces: bytes) -> None:
        """Each in a turn of its own."""
        for piece in pieces:
            self.response.add_body(piece)
            self.response.tell()
            await asyncio.sleep(0)

    def ends(self) -> None:
        self.response.done = True
        self.response.tell()


def asked(do: Callable[[Asked], Awaitable[Any]]) -> None:
    async def run() -> None:
        async with asyncio.timeout(10):
            await do(Asked())

    asyncio.run(run())


def test_what_is_taken_wakes_nobody_and_the_end_does() -> None:
    async def do(to: Asked) -> None:
        waiter = to.wait()
        await to.comes(b"one", b"two", b"three")
        assert to.taken == [b"one", b"two", b"three"] and not waiter.done()
        to.ends()
        await waiter
        assert to.response.read_available() == b""

    asked(do)


def test_what_comes_with_the_end_is_taken_too() -> None:
    async def do(to: Asked) -> None:
        waiter = to.wait()
        to.response.add_body(b"last")
        to.ends()
        await waiter
        assert to.taken == [b"last"] and to.response.read_available() == b""

    asked(do)


def test_what_comes_in_one_turn_is_taken_at_once() -> None:
    async def do(to: Asked) -> None:
        waiter = to.wait()
        for piece in (b"one ", b"two"):
            to.response.add_body(piece)
            to.response.tell()
        assert not to.taken
        await asyncio.sleep(0)
        assert to.taken == [b"one two"] and not waiter.done()

    asked(do)


def test_who_takes_no_more_is_woken_and_reads_what_comes_then() -> None:
    async def do(to: Asked) -> None:
        to.most = 1
        waiter = to.wait()
        await to.comes(b"one", b"two", b"three")
        await waiter
        assert to.taken == [b"one", b"two"] and to.response.read_available() == b"three"

    asked(do)


def test_an_error_of_who_takes_reaches_who_waits() -> None:
    async def do(to: Asked) -> None:
        waiter = to.wait()
        await to.comes(b"one", b"bad", b"three")
        with pytest.raises(UpstreamDown, match="cannot be read"):
            await waiter
        assert to.taken == [b"one"] and to.response.read_available() == b"three"

    asked(do)


def test_an_error_of_who_takes_keeps_nothing_that_its_call_had() -> None:
    class Call:
        """What stands on the stack of who waits."""

    async def do(to: Asked) -> None:
        async def reads() -> None:
            call = Call()
            kept.append(weakref.ref(call))
            with to.response:
                await to.wait()

        reading = asyncio.gather(reads(), return_exceptions=True)
        await asyncio.sleep(0)
        await to.comes(b"bad")
        assert isinstance((await reading)[0], UpstreamDown)
        del reading
        await asyncio.sleep(0)
        gone.append(kept[0]() is None)

    kept: list[weakref.ref[Call]] = []
    gone: list[bool] = []
    gc.disable()
    try:
        asked(do)
    finally:
        gc.enable()
    assert gone == [True]


def test_what_came_before_a_break_is_left_for_who_waits() -> None:
    async def do(to: Asked) -> None:
        waiter = to.wait()
        to.response.add_body(b"one")
        to.response.tell()
        to.response.broke(None)
        await waiter
        assert not to.taken and to.response.read_available() == b"one" and to.response.read_available() is None
        with pytest.raises(UpstreamDown):
            to.wait()

    asked(do)


def test_nobody_takes_for_who_is_cancelled() -> None:
    async def do(to: Asked) -> None:
        waiter = to.wait()
        to.response.add_body(b"one")
        to.response.tell()
        waiter.cancel()
        await asyncio.sleep(0)
        assert not to.taken and to.response.read_available() == b"one"

    asked(do)


def test_who_waits_again_without_taking_is_woken() -> None:
    async def do(to: Asked) -> None:
        to.most = 0
        waiter = to.wait()
        await to.comes(b"one")
        await waiter
        waiter = to.response.wait_more()
        to.response.add_body(b"two")
        to.response.tell()
        await waiter
        assert to.taken == [b"one"] and to.response.read_available() == b"two"

    asked(do)
