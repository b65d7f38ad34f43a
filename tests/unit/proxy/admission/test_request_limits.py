"""What a stranger may push at the proxy, and what it answers where that is too much, too long or too slow."""

import asyncio
import gzip
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest
import uvicorn
from uvicorn.server import ServerState

from proxy.admission.middleware import ConcurrencyLimit
from proxy.http.asgi import EXCHANGE, headers_of
from proxy.http.server_connection import MOST_PIPELINED, Connection
from proxy.trajectories.indexes import MOST_ALIKE, Repeatable, RetryTracker
from proxy.wire.decoding import MAX_EVENT_BYTES, Events
from tests.unit.proxy.conftest import FakeHandler, FakeVllm, RunningProxy, chunk, settings_for, wait_for
from whetstone.config.proxy import ProxySettings

LIMITS = {"max_url_bytes": 512, "max_header_bytes": 2048, "max_headers": 30, "headers_timeout_s": 0.3}
BODY = json.dumps({"model": "starter", "messages": [{"role": "user", "content": "hi"}]}).encode()
CHAT = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"


@pytest.fixture(scope="module")
def narrow(sqlite_template: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningProxy]:
    """One proxy with narrow limits for all that is refused before anybody asks a model server."""
    data = tmp_path_factory.mktemp("narrow")
    (data / "whetstone.db").write_bytes(sqlite_template.read_bytes())
    with FakeVllm() as fake:
        proxy = RunningProxy(settings_for(f"sqlite:///{data / 'whetstone.db'}", fake.url, data, proxy=LIMITS))
        yield proxy
        proxy.stop()


def connect(proxy: RunningProxy) -> socket.socket:
    address = urlsplit(proxy.url)
    return socket.create_connection((address.hostname, address.port), timeout=30)


def heard(connection: socket.socket) -> bytes:
    """All that is said until the connection ends."""
    parts = []
    try:
        while data := connection.recv(65536):
            parts.append(data)
    except ConnectionResetError:
        pass
    return b"".join(parts)


def said(proxy: RunningProxy, data: bytes) -> bytes:
    """The answer to these bytes, up to the end of the connection."""
    with connect(proxy) as connection:
        connection.sendall(data)
        return heard(connection)


def error_of(answer: bytes) -> tuple[int, dict[str, Any]]:
    """Status and error of an answer in OpenAI's shape."""
    head, _, body = answer.partition(b"\r\n\r\n")
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "code", "param"}
    return int(head.split(b" ")[1]), error


def get(path: str, headers: bytes = b"") -> bytes:
    return b"GET " + path.encode() + b" HTTP/1.1\r\nhost: localhost\r\n" + headers + b"\r\n"


@pytest.mark.parametrize(
    ("request_bytes", "status", "code", "setting"),
    [
        (get("/" + "a" * 600), 414, "url_too_long", "proxy.max_url_bytes"),
        (get("/healthz", b"x: y\r\n" * 40), 431, "headers_too_large", "proxy.max_headers"),
        (get("/healthz", b"x: " + b"y" * 2100 + b"\r\n"), 431, "headers_too_large", "proxy.max_header_bytes"),
        (b"GET /healthz HTTP/1.1\r\nx: " + b"y" * 4000, 431, "headers_too_large", "proxy.max_header_bytes"),
        (b"GET /" + b"a" * 4000, 431, "headers_too_large", "proxy.max_header_bytes"),
        (b"hello\r\n\r\n", 400, "invalid_http", "HTTP/1.1"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400, "invalid_http", "HTTP/1.1"),
        (b"\x16\x03\x01\x02\x00\x01\x00", 400, "invalid_http", "HTTP/1.1"),
        (b"GET /healthz HTTP/1.1\r\nhost: localhost\r\ncontent-length: -1\r\n\r\n", 400, "invalid_http", "HTTP/1.1"),
        (b"GET /\xff HTTP/1.1\r\nhost: localhost\r\n\r\n", 400, "invalid_http", "HTTP/1.1"),
        (b"GET /healthz HTTP/1.1\r\nhost: evil.test\r\nHost: localhost\r\n\r\n", 400, "invalid_http", "one Host"),
        (b"GET /healthz HTTP/1.1\r\nhost: localhost\r\nHost: localhost\r\n\r\n", 400, "invalid_http", "one Host"),
        (b"GET /healthz HTTP/1.0\r\nhost: evil.test\r\nHost: localhost\r\n\r\n", 400, "invalid_http", "one Host"),
        (b"GET /healthz HTTP/1.1\r\n\r\n", 400, "invalid_http", "one Host"),
        (CHAT + b"host: localhost\r\ncontent-length: %d\r\n\r\n" % len(BODY) + BODY, 400, "invalid_http", "one Host"),
    ],
)
def test_a_head_out_of_bounds_is_refused_and_the_connection_ends(
    narrow: RunningProxy, request_bytes: bytes, status: int, code: str, setting: str
) -> None:
    answered, error = error_of(said(narrow, request_bytes))
    assert (answered, error["code"]) == (status, code)
    assert setting in error["message"]


def test_a_second_host_is_seen_behind_a_head_that_is_known(plain_proxy: RunningProxy, fake_vllm: FakeVllm) -> None:
    request = CHAT + b"content-length: %d\r\n\r\n" % len(BODY) + BODY
    twice = request.replace(b"host: localhost\r\n", b"host: evil.test\r\nhost: localhost\r\n")
    with connect(plain_proxy) as connection:
        for _ in range(3):
            connection.sendall(request)
            answer = b""
            while not answer.endswith(b"}"):
                answer += connection.recv(65536)
            assert answer.startswith(b"HTTP/1.1 200")
        connection.sendall(twice)
        status, error = error_of(heard(connection))
    assert (status, error["code"]) == (400, "invalid_http")
    assert "one Host header, this one has 2" in error["message"]
    assert len(fake_vllm.requests) == 3


def test_a_head_behind_another_request_is_bounded_as_well(narrow: RunningProxy) -> None:
    large = b"GET /healthz HTTP/1.1\r\nhost: localhost\r\nx: " + b"y" * 2100 + b"\r\n\r\n"
    asked = b"POST /v1/nothing HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2\r\n\r\n{}"
    assert b" 200 OK" not in said(narrow, asked + large)
    assert b" 200 OK" in said(narrow, asked + get("/healthz", b"connection: close\r\n"))


def test_headers_that_do_not_come_are_not_waited_for(narrow: RunningProxy) -> None:
    status, error = error_of(said(narrow, CHAT))
    assert (status, error["code"]) == (408, "headers_too_slow")
    assert "proxy.headers_timeout_s" in error["message"]


def test_the_next_headers_are_not_waited_for_either(narrow: RunningProxy) -> None:
    answers = said(narrow, get("/healthz") + b"GET /heal")
    assert answers.startswith(b"HTTP/1.1 200 OK")
    assert b"HTTP/1.1 408" in answers


def test_a_connection_that_says_nothing_ends_without_a_word(narrow: RunningProxy) -> None:
    assert said(narrow, b"") == b""


def test_a_body_that_goes_on_after_its_request_was_refused_ends_the_connection(narrow: RunningProxy) -> None:
    refused = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n"
    with connect(narrow) as connection:
        connection.sendall(refused)
        assert connection.recv(65536).startswith(b"HTTP/1.1 400")
        connection.sendall(b"1\r\na\r\n")
        assert heard(connection) == b""


def test_what_comes_behind_a_body_is_no_header(plain_proxy: RunningProxy) -> None:
    chunked = b"transfer-encoding: chunked\r\nconnection: close\r\n\r\n%x\r\n%s\r\n0\r\n" % (len(BODY), BODY)
    answer = said(plain_proxy, CHAT + chunked + b"x-trajectory-id: theirs\r\nhost: example.com\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200 OK")
    assert b"theirs" not in answer


@pytest.mark.parametrize("endless", [b"x: y\r\n" * 1000, b"x: " + b"y" * 6000], ids=["many", "one"])
def test_what_comes_behind_a_body_without_end_ends_the_connection(narrow: RunningProxy, endless: bytes) -> None:
    chunked = b"transfer-encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n" % (len(BODY), BODY)
    with connect(narrow) as connection:
        connection.sendall(CHAT + chunked)
        with pytest.raises(ConnectionError):
            while True:
                connection.sendall(endless)
        assert b"200 OK" not in heard(connection)


def test_requests_sent_ahead_are_answered_in_their_order(narrow: RunningProxy) -> None:
    answers = said(narrow, get("/healthz") + get("/nothing") + get("/healthz", b"connection: close\r\n"))
    assert [int(part[:3]) for part in answers.split(b"HTTP/1.1 ")[1:]] == [200, 404, 200]


def test_too_many_requests_sent_ahead_end_the_connection(narrow: RunningProxy) -> None:
    answers = said(narrow, get("/v1/models") * 200)
    assert answers.count(b"HTTP/1.1 200 OK") <= MOST_PIPELINED + 1


def test_http_1_0_is_answered_and_the_connection_ends(narrow: RunningProxy) -> None:
    answer = said(narrow, b"GET /healthz HTTP/1.0\r\nhost: localhost\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200 OK")
    assert b"connection: close" in answer


def test_a_websocket_is_not_opened(narrow: RunningProxy) -> None:
    upgrade = (
        b"connection: upgrade, close\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\nsec-websocket-key: eA==\r\n"
    )
    answer = said(narrow, get("/v1/models", upgrade))
    assert answer.startswith(b"HTTP/1.1 200 OK")
    assert b" 101 " not in answer


@pytest.mark.parametrize("offered", [b"h2c", b"websocket"])
@pytest.mark.parametrize("pause_s", [0.0, 0.05])
def test_what_follows_an_offer_to_speak_another_protocol_is_the_requests_body(
    plain_proxy: RunningProxy, fake_vllm: FakeVllm, offered: bytes, pause_s: float
) -> None:
    """Java's client makes one with the first request that it sends unencrypted. A body must not pass for a request."""
    inner = get("/healthz").decode()
    body = json.dumps({"model": "starter", "messages": [{"role": "user", "content": f"hi\r\n\r\n{inner}"}]}).encode()
    offer = CHAT + b"connection: upgrade, http2-settings\r\nupgrade: " + offered + b"\r\nhttp2-settings: AAMAAABk\r\n"
    with connect(plain_proxy) as connection:
        connection.sendall(offer + b"content-length: %d\r\n\r\n" % len(body))
        time.sleep(pause_s)
        connection.sendall(body + get("/healthz", b"connection: close\r\n"))
        answers = heard(connection)
    assert [int(part[:3]) for part in answers.split(b"HTTP/1.1 ")[1:]] == [200, 200]
    assert [request["messages"][0]["content"] for request in fake_vllm.requests] == [f"hi\r\n\r\n{inner}"]


def test_there_are_no_tunnels(narrow: RunningProxy) -> None:
    assert error_of(said(narrow, b"CONNECT localhost:80 HTTP/1.1\r\nhost: localhost\r\n\r\n"))[0] == 400


def test_an_app_that_goes_is_noticed_though_it_has_sent_a_request_ahead(
    plain_proxy: RunningProxy, fake_vllm: FakeVllm
) -> None:
    fake_vllm.script = lambda handler, _: handler.until_hung_up()
    with connect(plain_proxy) as connection:
        connection.sendall(CHAT + b"content-length: %d\r\n\r\n" % len(BODY) + BODY)
        wait_for(lambda: fake_vllm.requests)
        connection.sendall(get("/healthz"))
        time.sleep(0.05)
    assert fake_vllm.hung_up.wait(30)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/feedback", "/v1/embeddings", "/v1/trajectories/t/end"])
@pytest.mark.parametrize("encoding", ["gzip", "GZIP", "deflate, gzip", "x"])
def test_a_compressed_body_is_refused(narrow: RunningProxy, path: str, encoding: str) -> None:
    headers = {"Content-Encoding": encoding, "Content-Type": "application/json"}
    response = narrow.client.post(path, content=gzip.compress(BODY), headers=headers)
    assert (response.status_code, response.json()["error"]["code"]) == (415, "content_encoding")
    assert "send it as it is" in response.json()["error"]["message"]


def test_a_body_that_says_it_is_not_encoded_passes(plain_proxy: RunningProxy) -> None:
    assert plain_proxy.chat({"Content-Encoding": "identity"}).status_code == 200


class Held:
    """A fake vLLM's answers, which wait until `go`."""

    def __init__(self, fake: FakeVllm) -> None:
        self.go = threading.Event()
        self.asked = threading.Semaphore(0)
        fake.script = self

    def __call__(self, handler: FakeHandler, body: dict[str, Any]) -> None:
        self.asked.release()
        assert self.go.wait(60)
        handler.speak(body)


@pytest.fixture
def limited(
    sqlite_url: str, fake_vllm: FakeVllm, tmp_path: Path, start: Callable[..., RunningProxy]
) -> Callable[..., RunningProxy]:
    """Starts a proxy with these limits."""
    return lambda **limits: start(settings_for(sqlite_url, fake_vllm.url, tmp_path, proxy={"max_wait_s": 0.2} | limits))


def chat(length: int = 2) -> bytes:
    body = json.dumps({"model": "starter", "messages": [{"role": "user", "content": "h" * length}]}).encode()
    return CHAT + b"content-length: %d\r\n\r\n" % len(body) + body


@pytest.mark.parametrize(
    ("limits", "length"),
    [({"max_in_flight": 1}, 2), ({"max_in_flight_bytes": 2**20}, 600_000)],
    ids=["requests", "bytes"],
)
def test_more_than_may_be_served_at_once_is_told_to_come_again(
    limited: Callable[..., RunningProxy], fake_vllm: FakeVllm, limits: dict[str, int], length: int
) -> None:
    held, proxy = Held(fake_vllm), limited(**limits)
    with connect(proxy) as first:
        first.sendall(chat(length))
        assert held.asked.acquire(timeout=30)
        response = proxy.chat(messages=[{"role": "user", "content": "h" * length}])
        error = response.json()["error"]
        assert (response.status_code, error["code"], response.headers["retry-after"]) == (503, "busy", "1")
        assert f"proxy.{next(iter(limits))}" in error["message"]
        assert proxy.client.get("/healthz").status_code == 200
        held.go.set()
        assert first.recv(65536).startswith(b"HTTP/1.1 200 OK")
    assert wait_for(lambda: proxy.chat().status_code == 200)


@pytest.mark.parametrize(
    ("more", "size"),
    [({}, 5), ({}, 0), ({"method": "GET"}, 5), ({"headers": [(b"content-encoding", b"")]}, 5), ({}, 11), ({}, None)],
)
def test_an_acquired_place_is_released_and_a_refused_request_is_not_counted(
    more: dict[str, Any], size: int | None
) -> None:
    in_flight = ConcurrencyLimit(ProxySettings().model_copy(update={"max_in_flight": 1, "max_in_flight_bytes": 10}))
    scope = {"method": "POST", "headers": [], EXCHANGE: SimpleNamespace(whole_bytes=lambda: size)} | more
    enters = not more and size is not None and size <= 10
    assert in_flight.try_acquire(scope, headers_of(scope)) == (size if enters else None)
    if size is not None and enters:
        assert (in_flight.requests, in_flight.bytes) == (1, size)
        assert in_flight.try_acquire(scope, headers_of(scope)) is None  # one is enough
        in_flight.release(size)
    assert (in_flight.requests, in_flight.bytes) == (0, 0)


def test_one_connection_too_many_takes_the_place_of_an_idle_one(limited: Callable[..., RunningProxy]) -> None:
    proxy = limited(max_connections=2)
    with ExitStack() as opened:
        connections = []
        for _ in range(3):
            connections.append(opened.enter_context(connect(proxy)))
            connections[-1].sendall(get("/healthz"))
            assert connections[-1].recv(65536).startswith(b"HTTP/1.1 200 OK")
        first, second, _ = connections
        assert heard(first) == b""
        second.sendall(get("/healthz"))
        assert second.recv(65536).startswith(b"HTTP/1.1 200 OK")


def test_one_connection_too_many_among_busy_ones_is_refused(
    limited: Callable[..., RunningProxy], fake_vllm: FakeVllm
) -> None:
    held, proxy = Held(fake_vllm), limited(max_connections=2)
    with connect(proxy) as first, connect(proxy) as second:
        for connection in (first, second):
            connection.sendall(chat())
            assert held.asked.acquire(timeout=30)
        status, error = error_of(said(proxy, b""))
        assert (status, error["code"]) == (503, "too_many_connections")
        assert "proxy.max_connections" in error["message"]
        held.go.set()
        assert first.recv(65536).startswith(b"HTTP/1.1 200 OK")
        assert second.recv(65536).startswith(b"HTTP/1.1 200 OK")


def test_a_client_that_does_not_read_its_stream_is_hung_up_on(
    limited: Callable[..., RunningProxy], fake_vllm: FakeVllm
) -> None:
    event = chunk({"content": "o" * 60_000})
    written = 0

    def endless(handler: FakeHandler, _body: dict[str, Any]) -> None:
        nonlocal written
        handler.begin()
        try:
            while True:
                handler.say(event)
                written += len(event)
        except ConnectionError:
            handler.close_connection = True
            fake_vllm.hung_up.set()

    fake_vllm.script = endless
    proxy = limited(write_timeout_s=0.3)
    with connect(proxy) as connection:
        body = BODY[:-1] + b', "stream": true}'
        connection.sendall(CHAT + b"content-length: %d\r\n\r\n" % len(body) + body)
        assert fake_vllm.hung_up.wait(60)
        (row,) = proxy.recorded()
    assert row.status == "aborted"
    assert written < 64 * 2**20  # what the kernel's buffers take, and no more


class Unread:
    """A transport, of whose bytes so many are not taken in yet."""

    def __init__(self) -> None:
        self.size = 0
        self.ended = False

    def get_write_buffer_size(self) -> int:
        return self.size

    def get_extra_info(self, _name: str) -> None:
        return None

    def is_closing(self) -> bool:
        return self.ended

    def abort(self) -> None:
        self.ended = True


@pytest.mark.parametrize(
    ("sizes", "ends"),
    [
        ([90, 90, 90, 90], True),
        ([90, 80, 70, 60, 50], False),
        ([90, 95, 99, 99], True),
        ([90, 0, 90, 0, 90], False),
        ([0, 0, 0, 0, 0], False),
    ],
)
def test_only_who_takes_in_nothing_is_hung_up_on(sizes: list[int], ends: bool) -> None:
    connection, transport = unread_by_a_client()
    connection.look(0.0)
    for second, size in enumerate(sizes, start=1):
        transport.size = size
        connection.look(float(second))
    assert transport.ended is ends


def test_who_has_just_been_answered_has_time_to_take_it_in() -> None:
    connection, transport = unread_by_a_client()
    transport.size = 90
    for second, ends in ((1000.0, False), (1002.0, False), (1003.0, True)):
        connection.look(second)
        assert transport.ended is ends


def unread_by_a_client() -> tuple[Connection, Any]:
    """A connection whose client may take 2.5 s, and its transport."""
    loop = asyncio.new_event_loop()
    config = uvicorn.Config(lambda: None, interface="asgi3", log_config=None)
    limits = ProxySettings(write_timeout_s=2.5, headers_timeout_s=100_000)
    connection = Connection(limits, config=config, server_state=ServerState(), app_state={}, _loop=loop)
    transport: Any = Unread()
    connection.connection_made(transport)
    loop.close()
    return connection, transport


def compressed(handler: FakeHandler, _body: dict[str, Any]) -> None:
    handler.send_response(200)
    handler.send_header("content-type", "application/json")
    handler.send_header("content-encoding", "gzip")
    handler.send_header("content-length", "0")
    handler.end_headers()


def too_long(handler: FakeHandler, _body: dict[str, Any]) -> None:
    handler.whole(200, b" " * (2**20 + 1))


@pytest.mark.parametrize(("script", "why"), [(compressed, "compresses"), (too_long, "proxy.max_answer_bytes")])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/embeddings"])
def test_an_answer_that_is_compressed_or_too_long_is_not_taken(
    limited: Callable[..., RunningProxy], fake_vllm: FakeVllm, script: Any, why: str, path: str
) -> None:
    fake_vllm.script = script
    response = limited(max_answer_bytes=2**20).client.post(
        path, content=BODY, headers={"Content-Type": "application/json"}
    )
    assert (response.status_code, response.json()["error"]["code"]) == (503, "upstream_down")
    assert why in response.json()["error"]["message"]


def test_a_stream_that_is_too_long_breaks_off(limited: Callable[..., RunningProxy], fake_vllm: FakeVllm) -> None:
    def endless(handler: FakeHandler, _body: dict[str, Any]) -> None:
        handler.begin()
        try:
            while True:
                handler.say(chunk({"content": "o" * 10_000}))
        except ConnectionError:
            handler.close_connection = True

    fake_vllm.script = endless
    proxy = limited(max_answer_bytes=2**20)
    body = BODY[:-1] + b', "stream": true}'
    answer = said(proxy, CHAT + b"content-length: %d\r\n\r\n" % len(body) + body)
    assert answer.startswith(b"HTTP/1.1 200 OK")
    assert not answer.endswith(b"0\r\n\r\n")
    (row,) = proxy.recorded()
    assert (row.status, "proxy.max_answer_bytes" in row.error) == ("error", True)


def test_an_event_without_end_is_not_kept() -> None:
    events = Events()
    with pytest.raises(ValueError, match="bytes"):
        for _ in range(MAX_EVENT_BYTES // 2**20 + 1):
            events.feed(b"x" * 2**20)


def test_after_all_of_that_the_proxy_serves(narrow: RunningProxy) -> None:
    assert wait_for(lambda: narrow.chat().status_code == 200)


def test_equal_bodies_that_break_off_are_not_kept_for_ever() -> None:
    repeats: RetryTracker[str] = RetryTracker(1000)
    for number in range(1000):
        repeats.add("digest", f"call-{number}", Repeatable("t", None, None, float(number) / 1000))
    known = repeats.of("digest", None, 1.0)
    assert list(known) == [f"call-{number}" for number in range(1000 - MOST_ALIKE, 1000)]
    repeats.answered("digest", "call-0")
    assert len(repeats.of("digest", None, 1.0)) == MOST_ALIKE
