"""A request and its answer on a connection: how it is framed, what is refused, who is told that an app has gone."""

import asyncio
import gc
import json
import socket
import weakref
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import pytest
from uvicorn.protocols.http.flow_control import FlowControl

from proxy.http.asgi import Header, Scope, more_of, send_whole, unless_disconnected
from proxy.http.request_cycle import RequestCycle
from tests.unit.proxy.conftest import FakeHandler, FakeVllm, RunningProxy, wait_for

DEFAULT: list[Header] = [(b"date", b"now")]
Answer = Callable[[RequestCycle], Awaitable[None]]


class Transport:
    """What is written, write by write."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.closing = self.reading = False

    def write(self, data: bytes) -> None:
        self.written.append(data)

    def close(self) -> None:
        self.closing = True

    def is_closing(self) -> bool:
        return self.closing

    def resume_reading(self) -> None:
        self.reading = True

    def pause_reading(self) -> None:
        self.reading = False


def answered(answer: Answer, *, keep_alive: bool = True, method: str = "GET", version: str = "1.1") -> Transport:
    """What goes out where the app answers so."""
    transport: Any = Transport()

    async def run() -> None:
        scope: Scope = {"type": "http", "method": method, "http_version": version}
        exchange = RequestCycle(
            scope,
            transport,
            FlowControl(transport),
            DEFAULT,
            lambda: None,
            keep_alive=keep_alive,
            expects_continue=False,
        )
        exchange.end()

        async def app(_scope: Scope, _receive: Any, _send: Any) -> None:
            await answer(exchange)

        await exchange.run(app)

    asyncio.run(run())
    assert isinstance(transport, Transport)
    return transport


def say(status: int, headers: Iterable[Header], *bodies: bytes) -> Answer:
    async def answer(exchange: RequestCycle) -> None:
        await exchange.send({"type": "http.response.start", "status": status, "headers": list(headers)})
        for place, body in enumerate(bodies, 1):
            await exchange.send({"type": "http.response.body", "body": body, "more_body": place < len(bodies)})

    return answer


LENGTH_4 = [(b"content-length", b"4")]


def test_an_answer_in_one_piece_is_one_write() -> None:
    out = answered(say(200, LENGTH_4, b"said"))
    assert out.written == [b"HTTP/1.1 200 OK\r\ndate: now\r\ncontent-length: 4\r\n\r\nsaid"]
    assert not out.closing


@pytest.mark.parametrize("keep_alive", [True, False])
@pytest.mark.parametrize(("method", "version"), [("GET", "1.1"), ("HEAD", "1.1"), ("GET", "1.0")])
@pytest.mark.parametrize("status", [200, 204, 404])
@pytest.mark.parametrize("header", [(b"x-said", b"it"), (b"connection", b"close"), (b"x-said", b"a\r\nb: c")])
def test_an_answer_told_whole_is_the_same_as_in_two_messages(
    status: int, header: Header, method: str, version: str, keep_alive: bool
) -> None:
    async def whole(exchange: RequestCycle) -> None:
        await send_whole(exchange, status, [header], b"said")

    outs = [
        answered(answer, keep_alive=keep_alive, method=method, version=version)
        for answer in (whole, say(status, [header, *LENGTH_4], b"said"))
    ]
    assert outs[0].written == outs[1].written and outs[0].closing == outs[1].closing


def test_an_answer_that_begins_as_one_before_is_checked_and_said_all_the_same() -> None:
    def out(status: int, *headers: Header, body: bytes = b"100%b") -> Transport:
        return answered(lambda exchange: send_whole(exchange, status, list(headers), body))

    for value, body in ((b"one", b"100%b"), (b"50%d", b""), (b"one", b"\r\n")):
        lines = b"date: now\r\nx-%%b: " + value + b"\r\nx-said: it\r\ncontent-length: " + str(len(body)).encode()
        told = out(200, (b"x-%%b", value), (b"x-said", b"it"), body=body).written
        assert told == [b"HTTP/1.1 200 OK\r\n" + lines + b"\r\n\r\n" + body]
    assert out(503, (b"x-%%b", b"1"), (b"x-said", b"it")).written[0].startswith(b"HTTP/1.1 503 ")
    for bad in ((b"x-%%b", b"a\nb"), (b"x-%%b", b"a\rb"), (b"x-%%b", b"\0"), (b"x-a\r\nb", b"1")):
        for _ in range(2):
            (told,) = out(200, bad, (b"x-said", b"it")).written
            assert told.startswith(b"HTTP/1.1 500 ")
    # Whose headers are not those of the values.
    assert b"x-said: a\r\nx-said: b\r\n" in out(200, (b"x-said", b"a"), (b"x-said", b"b")).written[0]


@pytest.mark.parametrize("keep_alive", [True, False])
@pytest.mark.parametrize(("status", "method"), [(200, "GET"), (204, "GET"), (404, "HEAD")])
@pytest.mark.parametrize("first", [(b"x-said", b"it"), (b"connection", b"close")])
def test_headers_told_as_lines_go_out_as_any_others(status: int, method: str, first: Header, keep_alive: bool) -> None:
    own = [(b"x-own", b"50%b: it"), (b"x-group", b"g")]
    lines = b"x-own: 50%b: it\r\nx-group: g\r\n"
    written = [
        answered(answer, keep_alive=keep_alive, method=method).written
        for answer in (
            lambda exchange: send_whole(exchange, status, [first], b"said", lines),
            lambda exchange: send_whole(exchange.send, status, [first], b"said", lines),
            lambda exchange: send_whole(exchange, status, [first, *own], b"said"),
        )
    ]
    assert written[0] == written[1] == written[2] and b"x-own: 50%b: it\r\nx-group: g\r\n" in written[0][0]


def test_how_an_answer_begins_is_not_said_again_with_another_date() -> None:
    before = DEFAULT[:]
    try:
        for now in (b"now", b"then"):
            DEFAULT[:] = [(b"date", now)]
            (told,) = answered(lambda exchange: send_whole(exchange, 200, [(b"x-said", b"it")], b"said")).written
            assert told.startswith(b"HTTP/1.1 200 OK\r\ndate: " + now + b"\r\n")
    finally:
        DEFAULT[:] = before


def test_what_has_begun_is_not_told_whole_as_well() -> None:
    async def answer(exchange: RequestCycle) -> None:
        await say(200, [], b"sa", b"id")(exchange)
        await exchange.whole(200, [], b"again")

    out = answered(answer)
    assert b"".join(out.written).endswith(b"2\r\nid\r\n0\r\n\r\n") and out.closing


def test_pieces_without_a_length_are_chunks() -> None:
    out = answered(say(200, [], b"sa", b"", b"id"))
    head = b"HTTP/1.1 200 OK\r\ndate: now\r\ntransfer-encoding: chunked\r\n\r\n"
    assert out.written == [head + b"2\r\nsa\r\n", b"2\r\nid\r\n0\r\n\r\n"]


def test_a_piece_of_a_begun_stream_goes_out_at_once_where_nothing_is_in_its_way() -> None:
    sent: list[bool] = []

    async def answer(exchange: RequestCycle) -> None:
        more, flow = more_of(exchange), exchange._flow
        sent.append(more(b"early"))
        await exchange.send({"type": "http.response.start", "status": 200, "headers": []})
        sent.append(more(b"before the head"))
        await exchange.send({"type": "http.response.body", "body": b"sa", "more_body": True})
        sent.append(more(b"id"))
        sent.append(more(b""))
        flow.pause_writing()
        sent.append(more(b"paused"))
        flow.resume_writing()
        sent.append(more(b"."))
        await exchange.send({"type": "http.response.body", "body": b"", "more_body": False})
        sent.append(more(b"late"))

    out = answered(answer)
    assert sent == [False, False, True, False, False, True, False]
    assert b"".join(out.written).endswith(b"\r\n\r\n2\r\nsa\r\n2\r\nid\r\n1\r\n.\r\n0\r\n\r\n") and not out.closing


@pytest.mark.parametrize(
    ("told", "headers", "gone", "said"),
    [
        ({"version": "1.0"}, [], False, b"said"),
        ({"method": "HEAD"}, [], False, b""),
        ({}, LENGTH_4, False, b"said"),
        ({}, [], True, b"2\r\nsa\r\n"),
    ],
)
def test_a_piece_that_is_no_chunk_or_that_nobody_waits_for_is_left_to_the_message(
    told: dict[str, Any], headers: list[Header], gone: bool, said: bytes
) -> None:
    async def answer(exchange: RequestCycle) -> None:
        await exchange.send({"type": "http.response.start", "status": 200, "headers": headers})
        await exchange.send({"type": "http.response.body", "body": b"sa", "more_body": True})
        if gone:
            exchange.lost()
        assert not exchange.more(b"id")
        await exchange.send({"type": "http.response.body", "body": b"id", "more_body": False})

    assert b"".join(answered(answer, **told).written).partition(b"\r\n\r\n")[2] == said


@pytest.mark.parametrize("status", [204, 304])
def test_what_has_no_body_has_no_framing(status: int) -> None:
    (out,) = answered(say(status, [], b"")).written
    assert out.endswith(b"\r\ndate: now\r\n\r\n")


def test_the_answer_to_head_is_its_headers() -> None:
    (out,) = answered(say(200, LENGTH_4, b"said"), method="HEAD").written
    assert out.endswith(b"content-length: 4\r\n\r\n")


@pytest.mark.parametrize("headers", [[], [(b"connection", b"close")]])
def test_a_connection_that_is_not_kept_says_so_and_ends(headers: list[Header]) -> None:
    out = answered(say(200, [*headers, *LENGTH_4], b"said"), keep_alive=bool(headers))
    assert b"".join(out.written).count(b"connection: close\r\n") == 1 and out.closing


@pytest.mark.parametrize("value", [b"a\r\nset-cookie: b", b"a\nb", b"a\rb", b"a\0b"])
def test_no_header_makes_another(value: bytes) -> None:
    out = answered(say(200, [(b"x-said", value), *LENGTH_4], b"said"))
    assert [one.split(b"\r\n", 1)[0] for one in out.written] == [b"HTTP/1.1 500 Internal Server Error"] and out.closing


@pytest.mark.parametrize("bodies", [(b"too long",), (b"sho",), (b"sa", b"i")])
def test_an_answer_of_another_length_than_told_breaks_off(bodies: tuple[bytes, ...]) -> None:
    out = answered(say(200, LENGTH_4, *bodies))
    assert out.closing and not b"".join(out.written).endswith(b"said")


@pytest.mark.parametrize("status", [204, 304])
def test_a_status_without_a_body_has_none_whatever_is_said(status: int) -> None:
    (out,) = answered(say(status, LENGTH_4, b"said")).written
    assert out.endswith(b"\r\n\r\n")


@pytest.mark.parametrize(("status", "told"), [(204, 0), (304, 1), (200, 1)])
def test_an_answer_in_one_piece_tells_its_length_where_that_may_be_told(status: int, told: int) -> None:
    async def answer(exchange: RequestCycle) -> None:
        await exchange.whole(status, [(b"x-said", b"a")], b"")

    (out,) = answered(answer).written
    assert out.count(b"content-length: 0\r\n") == told


def test_who_speaks_http_1_0_gets_no_chunks() -> None:
    out = answered(say(200, [], b"sa", b"id"), keep_alive=False, version="1.0")
    assert (
        b"transfer-encoding" not in out.written[0] and b"".join(out.written).endswith(b"\r\n\r\nsaid") and out.closing
    )


def test_nothing_waits_for_the_collector() -> None:
    """A request that is refused before its body is read must not keep it."""
    kept: list[weakref.ref[RequestCycle]] = []

    async def answer(exchange: RequestCycle) -> None:
        exchange.feed_body(b"x" * 10_000)
        kept.append(weakref.ref(exchange))
        await say(401, LENGTH_4, b"said")(exchange)

    gc.disable()
    try:
        answered(answer)
        assert kept[0]() is None
    finally:
        gc.enable()


def test_an_app_that_answers_nothing_or_half_ends_the_connection() -> None:
    async def nothing(_exchange: RequestCycle) -> None:
        pass

    async def half(exchange: RequestCycle) -> None:
        await exchange.send({"type": "http.response.start", "status": 200, "headers": []})
        await exchange.send({"type": "http.response.body", "body": b"sa", "more_body": True})

    assert answered(nothing).closing and answered(half).closing


def test_who_serves_is_cancelled_when_the_app_goes() -> None:
    ended: list[bool] = []

    async def answer(exchange: RequestCycle) -> None:
        async def serve() -> None:
            asyncio.get_running_loop().call_soon(exchange.lost)
            await asyncio.sleep(60)

        ended.append(await unless_disconnected(serve(), exchange.scope, exchange.receive))
        assert await exchange.receive() == {"type": "http.disconnect"}
        task = asyncio.current_task()
        assert task is not None and not task.cancelling(), "what comes then may wait again"

    assert answered(answer).written == []
    assert ended == [False]


def test_who_has_gone_before_it_is_served_is_not_served() -> None:
    served: list[str] = []

    async def answer(exchange: RequestCycle) -> None:
        async def serve() -> None:
            await asyncio.sleep(0)
            served.append("still here")

        exchange.lost()
        assert not await unless_disconnected(serve(), exchange.scope, exchange.receive)

    answered(answer)
    assert not served


def test_who_goes_once_it_is_served_cancels_nobody() -> None:
    ended: list[str] = []

    async def answer(exchange: RequestCycle) -> None:
        async def serve() -> None:
            await asyncio.sleep(0)

        assert await unless_disconnected(serve(), exchange.scope, exchange.receive)
        exchange.lost()
        await asyncio.sleep(0)
        ended.append("by itself")

    answered(answer)
    assert ended == ["by itself"]


@pytest.mark.parametrize(("limit_bytes", "body"), [(4, b"said"), (3, None)])
def test_a_body_that_is_there_is_taken_up_to_its_limit(limit_bytes: int, body: bytes | None) -> None:
    taken: list[bytes | None] = []

    async def answer(exchange: RequestCycle) -> None:
        exchange.feed_body(b"said")
        exchange.end()
        taken.append(exchange.whole_body(limit_bytes))
        await say(200, LENGTH_4, b"said")(exchange)

    answered(answer)
    assert taken == [body]


def test_an_app_that_goes_is_noticed_however_long_its_request_is(
    fake_vllm: FakeVllm, plain_proxy: RunningProxy
) -> None:
    """More than is read ahead of whoever serves it."""

    def silent(handler: FakeHandler, _body: dict[str, Any]) -> None:
        handler.until_hung_up()

    fake_vllm.script = silent
    body = json.dumps({"model": "starter", "messages": [{"role": "user", "content": "x" * 300_000}]}).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", int(plain_proxy.url.rsplit(":", 1)[1]))) as app:
        app.sendall(head + b"content-length: %d\r\n\r\n" % len(body) + body)
        wait_for(lambda: fake_vllm.requests)
    assert fake_vllm.hung_up.wait(30)
    assert plain_proxy.recorded(1)[0].status == "aborted"
