"""The client of the servers that answer, against servers that speak bytes: what HTTP allows, and what it does not."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import pytest

from proxy.errors import NotReached, UpstreamDown
from proxy.http.client import MAX_HEAD_BYTES, Client
from proxy.http.client_response import MOST_UNREAD_BYTES, Response
from tests.unit.proxy.conftest import next_of

HEAD = b"POST /v1 HTTP/1.1\r\nhost: here\r\ncontent-length: 2\r\n\r\n"
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nsaid"
MOST = 2**20

Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@dataclass
class Served:
    """A server, and what came to it."""

    client: Client
    accepted: int = 0
    requests: int = 0
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    """A client has hung up."""

    async def ask(self, *, repeatable: bool = False) -> Response:
        return await self.client.send(HEAD, b"{}", repeatable=repeatable)

    async def answer(self) -> tuple[int, bytes]:
        with await self.ask() as response:
            return response.status, await response.read(MOST)


def served(answers: bytes | list[bytes] | Answer, do: Callable[[Served], Awaitable[Any]], silence_s: float = 10) -> Any:
    """Do it with a server that answers so: always the same, one after the other (hanging up after the last), or by
    itself."""

    async def run() -> Any:
        left = list(answers) if isinstance(answers, list) else None

        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            told.accepted += 1
            writers.append(writer)
            with suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
                if callable(answers):
                    await answers(reader, writer)
                while not callable(answers):
                    await reader.readexactly(len(HEAD) + 2)
                    told.requests += 1
                    writer.write(answers if left is None else left.pop(0))
                    await writer.drain()
                    if left == []:
                        break
            writer.close()
            told.gone.set()

        writers: list[asyncio.StreamWriter] = []
        server = await asyncio.start_server(connected, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        told = Served(Client(f"http://127.0.0.1:{port}/v1", silence_s))
        try:
            async with asyncio.timeout(30):
                return await do(told)
        finally:
            told.client.close()
            server.close()
            for writer in writers:
                if not writer.transport.is_closing():
                    writer.transport.abort()
            if writers:
                await told.gone.wait()
            await asyncio.sleep(0.01)

    return asyncio.run(run())


def test_a_connection_is_kept_for_the_next_request() -> None:
    async def do(to: Served) -> None:
        assert [await to.answer() for _ in range(5)] == [(200, b"said")] * 5
        assert (to.accepted, to.requests) == (1, 5)

    served(OK, do)


def test_as_many_are_opened_as_are_asked_at_once() -> None:
    async def do(to: Served) -> None:
        for _ in range(2):
            assert set(await asyncio.gather(*(to.answer() for _ in range(20)))) == {(200, b"said")}
        assert (to.accepted, to.requests) == (20, 40)

    served(OK, do)


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nsa\r\n2\r\nid\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n4\r\nsaid\r\n0\r\ncontent-type: late\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\ncontent-type: early\r\n\r\n" + OK,
        b"HTTP/1.1 103 Early Hints\r\nlink: </x>\r\n\r\n" + OK,
    ],
)
def test_every_framing_is_read(answer: bytes) -> None:
    async def do(to: Served) -> None:
        for _ in range(2):
            with await to.ask() as response:
                assert (await response.read(MOST), response.content_type) == (b"said", "")
        assert to.accepted == 1

    served(answer, do)


def test_without_a_length_the_answer_ends_with_the_connection() -> None:
    async def do(to: Served) -> None:
        assert await to.answer() == (200, b"all of it")

    served([b"HTTP/1.1 200 OK\r\n\r\nall of it"], do)


def test_a_short_answer_is_told_of_once_when_all_of_it_is_there() -> None:
    async def slowly(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(len(HEAD) + 2)
        writer.write(OK.removesuffix(b"said"))
        await asyncio.sleep(0.1)
        writer.write(b"said")
        await reader.read()

    async def do(to: Served) -> None:
        with await to.ask() as response:
            assert (response.whole(MOST), response.whole(3)) == (b"said", None)

    served(slowly, do)


@pytest.mark.parametrize("head", [b"content-type: text/event-stream\r\ncontent-length: 4", b"content-length: 100000"])
def test_what_is_long_or_a_stream_is_told_of_as_it_comes(head: bytes) -> None:
    async def slowly(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(len(HEAD) + 2)
        writer.write(b"HTTP/1.1 200 OK\r\n" + head + b"\r\n\r\nsa")
        await taken.wait()
        writer.write(b"id")
        await reader.read()

    async def do(to: Served) -> None:
        with await to.ask() as response:
            assert response.whole(MOST) is None
            assert await next_of(response) == b"sa"
            taken.set()
            assert await next_of(response) == b"id"

    taken = asyncio.Event()
    served(slowly, do)


def test_a_short_answer_that_stays_out_is_an_error() -> None:
    async def halfway(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(len(HEAD) + 2)
        writer.write(OK.removesuffix(b"id"))
        await reader.read()

    async def do(to: Served) -> None:
        with pytest.raises(UpstreamDown, match="TimeoutError"):
            await to.answer()

    served(halfway, do, silence_s=0.1)


def test_a_body_can_be_read_twice() -> None:
    async def do(to: Served) -> None:
        with await to.ask() as response:
            assert await response.read(MOST) == await response.read(MOST) == b"said"

    served(OK, do)


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 200 OK\r\ncontent-le",
        b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nsaid",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n9\r\nsaid",
        b"nothing of HTTP\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nno number\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: other\r\nconnection: upgrade\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx: " + b"y" * (MAX_HEAD_BYTES + 1),
    ],
)
def test_what_is_no_whole_answer_is_an_error(answer: bytes) -> None:
    async def do(to: Served) -> None:
        with pytest.raises(UpstreamDown, match="does not answer"):
            await to.answer()

    served([answer], do)


@pytest.mark.parametrize("status", [b"600", b"999"])
def test_a_status_that_http_does_not_have_is_an_error(status: bytes) -> None:
    async def do(to: Served) -> None:
        with pytest.raises(UpstreamDown, match=status.decode()):
            await to.ask()

    served(b"HTTP/1.1 " + status + b" Odd\r\ncontent-length: 4\r\n\r\nsaid", do)


def test_what_came_before_the_break_is_read_first() -> None:
    async def do(to: Served) -> None:
        with await to.ask() as response:
            assert await next_of(response) == b"said"
            with pytest.raises(UpstreamDown):
                await next_of(response)

    served([b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nsaid"], do)


def test_a_body_in_pieces_ends_with_nothing() -> None:
    async def do(to: Served) -> None:
        with await to.ask() as response:
            assert [await next_of(response) for _ in range(3)] == [b"said", b"", b""]

    served(OK, do)


def test_nobody_there_is_told_apart() -> None:
    async def do(to: Served) -> None:
        nobody = Client("http://127.0.0.1:1/v1", 10)
        with pytest.raises(NotReached):
            await nobody.send(HEAD, b"{}")
        nobody.close()

    served(OK, do)


def test_silence_is_an_error() -> None:
    async def silent(reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async def do(to: Served) -> None:
        with pytest.raises(UpstreamDown, match="TimeoutError"):
            await to.ask()

    served(silent, do, silence_s=0.01)


def test_who_leaves_early_hangs_up() -> None:
    async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n4\r\nsaid\r\n")
        while await reader.read(1000):
            pass

    async def do(to: Served) -> None:
        with await to.ask() as response:
            assert await next_of(response) == b"said"
        await to.gone.wait()

    served(endless, do)


def test_who_is_cancelled_before_the_headers_came_hangs_up() -> None:
    async def silent(reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        while await reader.read(1000):
            pass

    async def do(to: Served) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await to.ask()
        await to.gone.wait()

    served(silent, do)


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 500 No\r\ncontent-length: 4\r\n\r\nsaid",
        b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\nconnection: close\r\n\r\nsaid",
        b"HTTP/1.0 200 OK\r\ncontent-length: 4\r\n\r\nsaid",
        OK + b"and more that nobody asked for",
        OK + OK,
    ],
)
def test_some_connections_are_not_used_again(answer: bytes) -> None:
    async def do(to: Served) -> None:
        for _ in range(3):
            assert (await to.answer())[1] == b"said"
            await asyncio.sleep(0.01)
        assert to.accepted == 3

    served(answer, do)


def test_a_connection_whose_request_was_not_all_sent_is_not_used_again() -> None:
    async def hasty(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(len(HEAD))
        writer.write(OK)
        await asyncio.sleep(0.3)

    async def do(to: Served) -> None:
        for _ in range(2):
            with await to.client.send(HEAD, bytes(20 * 2**20)) as response:
                assert await response.read(MOST) == b"said"
        assert to.accepted == 2

    served(hasty, do)


def test_a_connection_that_was_held_up_is_not_used_again() -> None:
    """Its server may have hung up behind the answer, unseen."""
    size = 4 * MOST_UNREAD_BYTES

    async def do(to: Served) -> None:
        for _ in range(2):
            with await to.ask() as response:
                await asyncio.sleep(0.1)
                assert len(await response.read(2 * size)) == size
        assert to.accepted == 2

    served(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size + bytes(size), do)


def test_a_kept_connection_that_the_server_has_closed_is_not_used() -> None:
    async def do(to: Served) -> None:
        assert await to.answer() == (200, b"said")
        await to.gone.wait()
        await asyncio.sleep(0.05)
        with suppress(UpstreamDown):
            await to.answer()
        assert to.accepted == 2

    served([OK], do)


@pytest.mark.parametrize("repeatable", [False, True])
def test_only_a_read_is_repeated_where_a_kept_connection_breaks_under_it(repeatable: bool) -> None:
    first: list[bool] = []

    async def once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(len(HEAD) + 2)
        writer.write(OK)
        if not first:
            first.append(True)
            await reader.readexactly(len(HEAD) + 2)  # the second one comes, and nobody answers
        else:
            await reader.read()

    async def do(to: Served) -> None:
        assert await to.answer() == (200, b"said")
        if repeatable:
            with await to.ask(repeatable=True) as response:
                assert await response.read(MOST) == b"said"
        else:
            with pytest.raises(UpstreamDown):
                await to.ask()
        assert to.accepted == 1 + repeatable

    served(once, do)


def test_more_than_may_come_is_an_error() -> None:
    async def do(to: Served) -> None:
        with pytest.raises(UpstreamDown, match="over 3 bytes"), await to.ask() as response:
            await response.read(3)

    served(OK, do)


def test_a_server_waits_for_an_app_that_takes_nothing_in() -> None:
    size = 64 * 2**20
    sent: list[int] = []

    async def much(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(len(HEAD) + 2)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size)
        for _ in range(size // 2**16):
            writer.write(bytes(2**16))
            await writer.drain()
            sent.append(2**16)

    async def do(to: Served) -> None:
        with await to.ask() as response:
            before = -1
            while sum(sent) != before:
                before = sum(sent)
                await asyncio.sleep(0.2)
            # What is on its way is the kernel's; here is no more than may be unread, and one read.
            assert before < size / 2
            assert response._size <= 2 * MOST_UNREAD_BYTES
            came = 0
            while piece := await next_of(response):
                came += len(piece)
            assert came == size

    served(much, do)
