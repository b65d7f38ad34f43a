"""What is written within one turn of the event loop goes out together, in order, and never later than that turn."""

import asyncio
import gc
import weakref
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvicorn
import uvloop
from uvicorn.server import ServerState

from proxy.http.server_connection import Connection
from proxy.http.write_batching import MOST_BYTES, MOST_QUEUED, BatchedTransport
from whetstone.config.proxy import ProxySettings


class Wire:
    """What went out on all connections, in order."""

    def __init__(self) -> None:
        self.out: list[tuple[str, bytes]] = []

    def connection(self, name: str) -> tuple[BatchedTransport, "Transport"]:
        transport: Any = Transport(self, name)
        return BatchedTransport(transport, asyncio.get_running_loop()), transport

    def pair(self, pieces: int) -> tuple[BatchedTransport, "Transport", BatchedTransport]:
        """Connection a with its transport, and connection b, when so many pieces were read."""
        (one, transport), (other, _) = self.connection("a"), self.connection("b")
        for _ in range(pieces):
            one.outbox.read()
        return one, transport, other


class Transport:
    """Takes everything at once."""

    def __init__(self, wire: Wire, name: str) -> None:
        self._wire, self._name = wire, name
        self.closing = False

    def write(self, data: bytes) -> None:
        self._wire.out.append((self._name, bytes(memoryview(data))))

    def get_write_buffer_size(self) -> int:
        return 5

    def get_extra_info(self, _name: str) -> None:
        return None

    def is_closing(self) -> bool:
        return self.closing

    def close(self) -> None:
        self.write(b"closed")
        self.closing = True

    def abort(self) -> None:
        self.write(b"aborted")
        self.closing = True


def run(main: Callable[[Wire], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(main(Wire()), 20))


async def turn() -> None:
    """Until the loop has made one."""
    await asyncio.sleep(0)
    await asyncio.sleep(0)


def test_who_writes_alone_writes_at_once() -> None:
    async def main(wire: Wire) -> None:
        one, _ = wire.connection("a")
        one.write(b"1")
        one.outbox.read()
        one.write(b"2")
        one.write(b"3")
        assert wire.out == [("a", b"1"), ("a", b"2"), ("a", b"3")]
        # Nor does that count against who is due later.
        one.outbox.read()
        one.outbox.read()
        one.write(b"4")
        assert len(wire.out) == 3

    run(main)


def test_who_was_read_from_together_is_written_to_together() -> None:
    async def main(wire: Wire) -> None:
        ones = [wire.connection(name)[0] for name in "abc"]
        for _ in range(2):
            for one in ones:
                one.outbox.read()
            for place, one in enumerate(ones):
                assert wire.out == []
                one.write(b"%d" % place)
            assert wire.out == [("a", b"0"), ("b", b"1"), ("c", b"2")]
            await turn()
            wire.out.clear()

    run(main)


def test_nobody_waits_beyond_the_turn_for_who_does_not_write() -> None:
    async def main(wire: Wire) -> None:
        one, _, other = wire.pair(3)
        one.write(b"1")
        other.write(b"2")
        assert wire.out == []
        one.outbox.read()  # meanwhile, and that one is still expected to write
        one.outbox.read()
        await turn()
        assert wire.out == [("a", b"1"), ("b", b"2")]
        other.write(b"3")
        await turn()
        assert wire.out[2:] == [("b", b"3")]
        other.write(b"4")
        assert wire.out[3:] == [("b", b"4")]

    run(main)


def test_what_came_after_something_was_held_is_waited_for_in_the_next_turn() -> None:
    async def main(wire: Wire) -> None:
        one, _, other = wire.pair(3)
        loop = asyncio.get_running_loop()
        one.write(b"1")
        # As the loop does: it reads, tells of the turn's end, and then runs whom it read for.
        for each in (one, other):
            each.outbox.read()
            loop.call_soon(each.write, b"2")
        done = loop.create_future()
        loop.call_soon(lambda: done.set_result(list(wire.out)))
        assert await done == [("a", b"1"), ("a", b"2"), ("b", b"2")]

    run(main)


@pytest.mark.parametrize("ends", [False, True])
def test_nothing_overtakes_what_is_held(ends: bool) -> None:
    async def main(wire: Wire) -> None:
        one, transport, other = wire.pair(4)
        one.write(b"1")
        other.write(b"2")
        one.write(b"3")
        assert wire.out == []
        assert one.get_write_buffer_size() == 5 + 2
        if ends:
            one.close()
            assert one.is_closing() and transport.closing
            assert wire.out == [("a", b"13"), ("a", b"closed")]
        else:
            one.abort()
            assert wire.out == [("a", b"aborted")]
        wire.out.clear()
        assert one.get_write_buffer_size() == 5
        await turn()
        assert wire.out == [("b", b"2")]

    run(main)


def test_what_is_held_for_who_has_gone_is_dropped() -> None:
    async def main(wire: Wire) -> None:
        one, transport, _ = wire.pair(2)
        one.write(b"1")
        transport.closing = True
        await turn()
        assert wire.out == []

    run(main)


def test_no_more_is_held_than_may_be() -> None:
    async def main(wire: Wire) -> None:
        ones = [wire.connection(f"{number:02d}")[0] for number in range(MOST_QUEUED + 1)]
        for _ in range(3 * MOST_QUEUED):
            ones[0].outbox.read()
        for one in ones[:-1]:
            assert wire.out == []
            one.write(b"1")
        assert [name for name, _ in wire.out] == [f"{number:02d}" for number in range(MOST_QUEUED)]
        wire.out.clear()
        ones[-1].write(b" " * MOST_BYTES)
        assert wire.out == []
        ones[-1].write(b"!")
        assert [len(data) for _, data in wire.out] == [MOST_BYTES + 1]
        ones[-1].write(b"?")
        await turn()
        assert [data[-1:] for _, data in wire.out] == [b"!", b"?"]

    run(main)


def test_nobody_else_loses_what_is_held_where_somebody_wrote_nonsense(caplog: pytest.LogCaptureFixture) -> None:
    async def main(wire: Wire) -> None:
        one, transport, other = wire.pair(3)
        nonsense: Any = "no bytes"
        one.write(nonsense)
        other.write(b"2")
        await turn()
        assert wire.out == [("a", b"aborted"), ("b", b"2")]
        assert transport.closing

    run(main)
    assert "cannot be written" in caplog.text


def test_a_connection_says_what_it_holds_before_it_closes_behind_its_client() -> None:
    async def main(wire: Wire) -> None:
        config = uvicorn.Config(lambda: None, interface="asgi3", log_config=None)
        values = {"server_state": ServerState(), "app_state": {}, "_loop": asyncio.get_running_loop()}
        connection = Connection(ProxySettings(), config=config, **values)
        transport: Any = Transport(wire, "a")
        connection.connection_made(transport)
        connection.transport.outbox.read()
        connection.transport.outbox.read()
        connection.transport.write(b"1")
        assert wire.out == []
        connection.eof_received()
        assert wire.out == [("a", b"1")]

    run(main)


class Served(asyncio.Protocol):
    """A connection as `proxy.http.server_connection` keeps it; what it hears is answered by who is given."""

    def __init__(self, answer: Callable[["Served"], Awaitable[None]]) -> None:
        self._answer = answer

    def connection_made(self, transport: Any) -> None:
        self.out = BatchedTransport(transport, asyncio.get_running_loop())

    def data_received(self, data: bytes) -> None:
        # Others were read from too, and say nothing.
        self.out.outbox.read()
        self.out.outbox.read()
        self.task = asyncio.ensure_future(self._answer(self))

    def eof_received(self) -> None:
        self.out.flush()


def heard(answer: Callable[[Served], Awaitable[None]]) -> bytes:
    """What a client hears that asks, says that it has no more to say, and reads slowly."""

    async def main() -> bytes:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: Served(answer), "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        await asyncio.sleep(0.02)
        writer.write(b"asked")
        writer.write_eof()
        await asyncio.sleep(0.1)
        told = await asyncio.wait_for(reader.read(), 20)
        writer.close()
        server.close()
        return told

    return uvloop.run(main())


def test_who_has_no_more_to_say_is_answered() -> None:
    async def answer(served: Served) -> None:
        served.out.write(b"answer")

    assert [heard(answer) for _ in range(10)] == [b"answer"] * 10


def test_nothing_is_missing_in_what_still_goes_out_on_a_connection_that_closes() -> None:
    backlog = b" " * 20_000_000

    async def answer(served: Served) -> None:
        served.out.write(backlog)
        await asyncio.sleep(0.05)
        assert served.out.is_closing()
        for place in range(4):
            for _ in range(place % 2 * 2):
                served.out.outbox.read()
            served.out.write(b"%d" % place)
            await asyncio.sleep(0.005)

    assert heard(answer)[len(backlog) :] == b"0123"


def test_each_event_loop_has_its_own() -> None:
    async def outbox() -> Any:
        one, _ = Wire().connection("a")
        other, _ = Wire().connection("b")
        assert one.outbox is other.outbox
        return one.outbox

    one, other = asyncio.run(outbox()), asyncio.run(outbox())
    assert one is not other
    forgotten = weakref.ref(one)
    del one
    gc.collect()
    assert forgotten() is None
