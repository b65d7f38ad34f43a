"""Heads that came before: whatever is sent, and in whatever pieces, it is read as the parser reads it."""

import asyncio
import random
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
from uvicorn.server import ServerState

from proxy.http.asgi import HEADERS, NOTES, Receive, Scope, Send, headers_of, send_whole
from proxy.http.request_head_cache import MOST_BYTES, KnownHead
from proxy.http.server_connection import LESSONS, Connection
from whetstone.config.proxy import ProxySettings

HEAD = (
    b"POST /v1/chat/completions?a=b HTTP/1.1\r\nHost: 127.0.0.1:8000\r\nConnection: keep-alive\r\n"
    b"Authorization: Bearer wsk_1\r\nContent-Length: %d\r\nX-Twice: 1\r\nx-twice: 2\r\n\r\n"
)
SCOPE = (
    "type", "asgi", "server", "client", "scheme", "root_path", "path", "raw_path", "query_string", "http_version",
    "method", "headers", "state",
)  # fmt: skip
Seen = tuple[dict[str, Any], dict[bytes, bytes], bytes, bool]


def request(body: bytes, head: bytes = HEAD) -> bytes:
    return head % len(body) + body


class Parsing(Connection):
    """Knows no head: what it is measured by."""

    def _take_known(self, known: KnownHead, data: bytes) -> bool:
        return False


class Counting(Connection):
    """Counts what it took past the parser."""

    known = 0

    def _take_known(self, known: KnownHead, data: bytes) -> bool:
        taken = super()._take_known(known, data)
        self.known += taken
        return taken


class Transport:
    """Takes everything, as a socket that is read from."""

    def __init__(self) -> None:
        self.written = b""
        self.closing = False

    def write(self, data: bytes) -> None:
        self.written += data

    def writelines(self, data: Iterable[bytes]) -> None:
        self.write(b"".join(data))

    def close(self) -> None:
        self.closing = True

    def is_closing(self) -> bool:
        return self.closing

    def get_extra_info(self, name: str) -> tuple[str, int] | None:
        return ("127.0.0.1", 1) if name in ("peername", "sockname") else None

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


class Said:
    """What came of the pieces that were sent."""

    def __init__(self, kind: type[Connection], limits: ProxySettings) -> None:
        self.seen: list[Seen] = []
        self.states: list[tuple[Any, ...]] = []
        self.transport = Transport()
        state: Any = ServerState()
        config = SimpleNamespace(loaded=True, loaded_app=self._answer, ws_protocol_class=None, root_path="")
        more = {"asgi_version": "3.0", "limit_concurrency": None, "timeout_keep_alive": 5}
        config.__dict__.update(more)
        loop = asyncio.get_running_loop()
        self.connection = kind(limits, config=config, server_state=state, app_state={}, _loop=loop)
        transport: Any = self.transport
        self.connection.connection_made(transport)

    async def send(self, pieces: list[bytes], patience: int) -> None:
        """Let the app have so many turns after each piece."""
        for piece in pieces:
            if self.transport.closing:
                break
            self.connection.data_received(piece)
            one = self.connection
            self.states.append((one.serving(), one.idle, one._begun, one._unclaimed, one._heads_since_s is None))
            for _ in range(patience):
                await asyncio.sleep(0)
        for _ in range(30):
            await asyncio.sleep(0)
        self.connection.connection_lost(None)
        for _ in range(5):
            await asyncio.sleep(0)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        told = {name: scope[name] for name in SCOPE}
        told["headers"], headers = list(scope["headers"]), dict(headers_of(scope))
        body, whole = b"", True
        # Some are refused before they are read; what the app does to its headers is its own affair.
        while scope["path"] != "/early":
            message = await receive()
            body += message.get("body", b"")
            whole = message["type"] == "http.request"
            if not message.get("more_body"):
                break
        self.seen.append((told, headers, body, whole))
        scope["headers"].append((b"x-more", b"more"))
        scope[HEADERS][b"x-more"] = b"more"
        scope["path"], scope["state"]["left"] = "/other", True
        await send_whole(send, 200, [(b"x-place", b"%d" % len(self.seen))], body)


def said(kind: type[Connection], pieces: list[bytes], patience: int = 6, limits: ProxySettings | None = None) -> Said:
    async def run() -> Said:
        one = Said(kind, limits or ProxySettings())
        await one.send(pieces, patience)
        return one

    return asyncio.run(run())


def both(pieces: list[bytes], patience: int = 6, limits: ProxySettings | None = None) -> int:
    """See that it makes no difference whether heads are known; how many were."""
    ours, theirs = (said(kind, pieces, patience, limits) for kind in (Counting, Parsing))
    assert ours.seen == theirs.seen
    assert ours.states == theirs.states
    assert ours.transport.written == theirs.transport.written
    assert ours.transport.closing == theirs.transport.closing
    assert isinstance(ours.connection, Counting)
    return ours.connection.known


def test_what_is_said_again_is_known_whatever_its_length() -> None:
    bodies = [b"a", b"bb" * 50_000, b"c" * 9, b"d" * 10]
    assert both([request(body) for body in bodies]) == 3
    assert [body for _, _, body, _ in said(Connection, [request(one) for one in bodies]).seen] == bodies


def test_a_head_that_comes_before_its_body_is_known_too() -> None:
    head, body = HEAD % 5, b"abcde"
    assert both([head, body, head, body, head, b"ab", b"cd", b"e", head, body[:4], body[4:] + head + body]) == 3
    assert both([head, b"abcd", b"e" + head, body, request(b"x")]) == 1
    # Answered before it is read, and its body reads as a known request.
    early, smuggled = HEAD.replace(b"/v1/chat/completions", b"/early"), request(b"smuggled")
    assert both([early % 3, b"abc", early % len(early % 3), early % 3, early % 3, b"abc"]) == 2
    assert both([request(b"abc"), early % 3 + b"abc", early % len(smuggled), smuggled, request(b"abc")]) == 1


def test_a_head_that_breaks_off_is_none() -> None:
    whole = request(b"d" * 45)
    length = whole.index(b"45")
    for place in (length, length + 1, length + 2, length + 3, whole.index(b"\r\n\r\n") + 3):
        assert both([request(b"a"), request(b"b"), whole[:place], whole[place:], request(b"c")]) == 2


@pytest.mark.parametrize(
    "length",
    [b"+3", b"0x3", b"03", b" 3", b"3 ", b"3,3", b"", b"-3", b"3\r\n 4", b"4\r\nContent-Length: 3", b"3\r\n\r\n", b"0",
     b"3;", b"3\x00", b"\xb3", b"3_0", b"9" * 20, b"3\r\nTransfer-Encoding: chunked", b"3\nX: 1", b"3\r"],
)  # fmt: skip
@pytest.mark.parametrize("patience", [0, 6])
def test_an_odd_length_behind_a_known_head_is_read_as_the_parser_reads_it(length: bytes, patience: int) -> None:
    odd = HEAD.replace(b"%d", length) + b"abc" + request(b"smuggled")
    both([request(b"first"), odd], patience)
    both([odd, request(b"last"), odd], patience)
    split = odd.index(b"abc")
    both([request(b"first"), odd[:split], odd[split:]], patience)


@pytest.mark.parametrize(
    "line",
    [b"Content-Length: 3", b"content-length : 3", b" content-length: 3", b"Transfer-Encoding: chunked", b"Expect: x",
     b"Expect: 100-continue", b"Upgrade: h2c", b"Connection: close", b"X:  two", b"X:one",
     b"X: a\r\n b", b"Connection: upgrade\r\nUpgrade: websocket", b"Host: b"],
)  # fmt: skip
def test_a_head_that_is_not_plain_is_not_known(line: bytes) -> None:
    head = HEAD.replace(b"X-Twice: 1", line)
    assert both([request(b"one", head)] * 3) == 0
    both([request(b"abc"), *[request(b"one", head)] * 3, request(b"abc")])


@pytest.mark.parametrize(
    "line", [b"X: ", b"X: a ", b"X: \xff", b"X: Content-Length: 3", b"Hosts: b", b"X-Content-Length: 4"]
)
def test_what_is_strange_and_yet_plain_is_known(line: bytes) -> None:
    assert both([request(b"one", HEAD.replace(b"X-Twice: 1", line)), request(b"three", HEAD)] * 3) == 0
    assert both([request(b"one", HEAD.replace(b"X-Twice: 1", line))] * 3) == 2


@pytest.mark.parametrize("stray", [b"\r\n", b"\r", b"\n", b"\r\n\r\n\r", b" ", b"\x00", b"P"])
@pytest.mark.parametrize("head", [HEAD, HEAD.replace(b"X-Twice: 1", b"Connection: close")])
def test_what_stands_between_two_requests_is_read_by_the_parser(stray: bytes, head: bytes) -> None:
    first, second = request(b"abc"), request(b"abc", head)
    for pieces in ([first, stray, second], [first, stray + second, second], [first, second + stray, first, first]):
        both(pieces)
        both(pieces, patience=0)


def test_only_what_posts_a_body_is_known() -> None:
    assert both([request(b"abc", HEAD.replace(b"POST", b"PUT"))] * 3) == 0
    assert both([b"GET /v1/models HTTP/1.1\r\nHost: a\r\n\r\n"] * 3) == 0
    assert both([request(b"abc", HEAD.replace(b"HTTP/1.1", b"HTTP/1.0"))] * 3) == 0
    assert both([request(b"abc", HEAD.replace(b"POST", b"\r\nPOST"))] * 3) == 0


def test_a_head_is_known_on_its_own_connection_alone() -> None:
    assert [both([request(b"abc")]) for _ in range(3)] == [0, 0, 0]


def test_notes_are_of_one_head_on_one_connection() -> None:
    def notes(sent: list[bytes]) -> list[Any]:
        one: list[Any] = []

        class Noting(Said):
            async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
                one.append(scope.get(NOTES))
                await super()._answer(scope, receive, send)

        async def run() -> None:
            await Noting(Connection, ProxySettings()).send(sent, 6)

        asyncio.run(run())
        return one

    other = HEAD.replace(b"wsk_1", b"wsk_2")
    sent = [request(b"a"), request(b"b"), request(b"cc"), request(b"a", other), request(b"a")]
    first, again, more, strange, back = notes(sent)
    assert first is None and again == {} and again is more  # who asks first is not known
    assert strange is None and back is None
    assert notes([request(b"a")] * 2)[1] is not again


def test_what_is_asked_ahead_of_an_answer_is_left_to_the_parser() -> None:
    assert both([request(b"a"), request(b"b"), request(b"c")], patience=0) == 0
    assert both([request(b"a"), request(b"b") + request(b"c"), request(b"d")]) == 1


def test_a_long_head_is_not_kept() -> None:
    longest = HEAD.replace(b"X-Twice: 1", b"X: " + b"x" * (MOST_BYTES - len(HEAD) - 30))
    assert both([request(b"abc", longest)] * 2) == 1
    assert both([request(b"abc", longest.replace(b"X: ", b"X: " + b"y" * 40))] * 2) == 0


def test_a_head_that_another_length_brings_over_the_limit_is_not_kept() -> None:
    limits = ProxySettings(max_header_bytes=1024)
    names_and_values = len(HEAD.replace(b": ", b"").replace(b"\r\n", b"")) - len(b"%d") - len(HEAD.split(b"\r\n")[0])
    head = HEAD.replace(b"X-Twice: 1", b"X-Twice: 1" + b"1" * (1024 - 1 - names_and_values))
    assert both([request(b"a", head), request(b"b", head), request(b"x" * 999, head)], limits=limits) == 0
    assert len(said(Connection, [request(b"a", head), request(b"x" * 999, head)], limits=limits).seen) == 1


@pytest.mark.parametrize("early", [b"Content-Length: %d", b"Transfer-Encoding: chunked"])
def test_a_body_that_reads_as_a_known_request_is_a_body(early: bytes) -> None:
    # Answered before it is read: nothing is served any more when its body comes.
    smuggled = request(b"smuggled")
    head = HEAD.replace(b"/v1/chat/completions", b"/early").replace(b"Content-Length: %d", early)
    assert both([request(b"abc"), head.replace(b"%d", b"%d" % len(smuggled)), smuggled, request(b"abc")]) <= 1
    assert both([request(b"abc"), head[: head.index(b"X-Twice")] + b"X: ", smuggled]) == 0


def test_whose_heads_are_never_the_same_is_not_learned_for_ever() -> None:
    heads = [HEAD.replace(b"wsk_1", b"wsk_%d" % number) for number in range(LESSONS)]
    again = [request(b"abc", heads[-1])] * 3
    assert both([*[request(b"abc", head) for head in heads[1:]], *again]) == 3
    assert both([*[request(b"abc", head) for head in heads], *again]) == 0


def test_a_request_that_its_app_breaks_off_is_not_taken_for_a_whole_one() -> None:
    assert both([request(b"abc"), HEAD % 5 + b"ab"]) == 1
    *_, (_, _, body, whole) = said(Connection, [request(b"abc"), HEAD % 5 + b"ab"]).seen
    assert body == b"ab" and not whole


PARTS = [
    request(b"abc"), request(b"x" * 70_000), HEAD % 0, request(b"d", HEAD.replace(b"/v1/chat/completions", b"/early")),
    request(b"defgh", HEAD.lower().replace(b"post", b"POST").replace(b"http/", b"HTTP/")), b"\r\n",
    b"GET /v1/models HTTP/1.1\r\nHost: a\r\n\r\n", HEAD.replace(b"Content-Length: %d", b"Transfer-Encoding: chunked")
    + b"3\r\nabc\r\n0\r\n\r\n", request(b"abc", HEAD.replace(b"X-Twice: 1", b"Expect: 100-continue")),
    request(b"abc", HEAD.replace(b"X-Twice: 1", b"Connection: upgrade\r\nUpgrade: h2c")),
]  # fmt: skip
SPLICED = [b"\r\n", b"\n", b"\r", b" ", b"0", b"9", b":", b"Content-Length: 2\r\n", b"\x00", b"POST / HTTP/1.1\r\n"]


def scrambled(chance: random.Random) -> list[bytes]:
    """Requests, some of them mangled, in pieces."""
    sent = chance.choices(PARTS, [12, 1, 1, 2, 2, 1, 1, 1, 1, 1], k=chance.randint(3, 8))
    for place, part in enumerate(sent):
        if chance.random() < 0.15:
            at = chance.randrange(min(len(part), 300))
            sent[place] = part[:at] + chance.choice(SPLICED) + part[at + chance.randint(0, 2) :]
    if chance.random() < 0.6:
        return sent
    stream, pieces = b"".join(sent), []
    while stream:
        size = chance.choice([1, 7, 100, 240, len(PARTS[0]), len(PARTS[0]) - 3, len(stream)])
        pieces.append(stream[:size])
        stream = stream[size:]
    return pieces


@pytest.mark.parametrize("seed", range(60))
def test_whatever_is_sent_it_makes_no_difference(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(25):
        both(scrambled(chance), chance.choice([0, 1, 6, 6, 6]))


def test_some_of_what_is_scrambled_is_known() -> None:
    assert sum(both(scrambled(random.Random(seed))) for seed in range(100)) > 30
