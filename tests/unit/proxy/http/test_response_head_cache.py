"""Heads of answers that came before: whatever a server says, in whatever pieces, it is read as the parser reads it."""

import asyncio
import math
import random
import time
from collections.abc import Iterable
from typing import Any

import pytest

from proxy.http.client import LEARN_EVERY_S, Client, _Connection
from proxy.http.client_response import Response
from proxy.http.response_head_cache import MOST_BODY_BYTES, MOST_BYTES, KnownAnswer
from tests.unit.proxy.conftest import next_of

HEAD = (
    b"HTTP/1.1 200 OK\r\ndate: Mon, 23 Nov 2026 05:47:31 GMT\r\nserver: uvicorn\r\ncontent-length: %d\r\n"
    b"Content-Type: application/json; charset=utf-8\r\nX-Request-Id: chatcmpl-1\r\n\r\n"
)
OWN = {b"content-length", b"date", b"x-request-id"}
Told = tuple[Any, ...]


def answer(body: bytes = b"said", head: bytes = HEAD) -> bytes:
    return head % len(body) + body


class Parsing(Client):
    """Knows no head: what it is measured by."""

    @property
    def known(self) -> KnownAnswer | None:  # type: ignore[override]
        return None

    @known.setter
    def known(self, known: KnownAnswer | None) -> None: ...


class Transport:
    """Takes everything; `unsent_bytes` are still to go out."""

    def __init__(self, unsent_bytes: int = 0) -> None:
        self.unsent_bytes = unsent_bytes
        self.ended = self.paused = False

    def write(self, data: bytes) -> None: ...

    def writelines(self, data: Iterable[bytes]) -> None: ...

    def is_closing(self) -> bool:
        return self.ended

    def get_write_buffer_size(self) -> int:
        return self.unsent_bytes

    def abort(self) -> None:
        self.ended = True

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False


class Asking:
    """One side: a client, asked again and again over connections without sockets."""

    def __init__(self, kind: type[Client], *, patient: bool = False, unsent_bytes: int = 0) -> None:
        self.client = kind("http://127.0.0.1:1/v1", 10)
        self.unsent_bytes = unsent_bytes
        self.known = 0
        """Answers whose head was known."""
        self._patient = patient

    def ask(self, pieces: list[bytes]) -> list[Told]:
        """Ask once and be answered so; what was to be seen after each piece."""
        if not self._patient:
            self.client.learns_s = -math.inf
        response = self.client.begin(b"POST", b"{}")
        if response is None:
            made = _Connection(self.client)
            transport: Any = Transport(self.unsent_bytes)
            made.connection_made(transport)
            response = made.ask(b"POST", b"{}", made.heard_s)
        connection: Any = response._source
        connection.transport.flush()  # as it is before anybody answers
        waiter, told = response.news(), []
        for piece in pieces:
            if connection.transport._transport.ended:
                break
            connection.data_received(piece)
            told.append((waiter.done(), *self._seen(response), *self._state(connection)))
        known = self.client.known
        self.known += known is not None and response.headers is known.headers
        response.leave()
        return [*told, self._state(connection)]

    @staticmethod
    def _seen(response: Response) -> Told:
        headers = {name: value for name, value in response.headers.items() if name not in OWN}
        whole = response.whole(2**30)
        return (
            response.status, response.content_type, headers, response.done, whole, b"".join(response._parts),
            response.unread_bytes, response.any, repr(response._error),
        )  # fmt: skip

    def _state(self, connection: Any) -> Told:
        transport = connection.transport._transport
        kept = connection in self.client.idle
        return (kept, transport.ended, transport.paused, connection.paused, connection.response is None)


def both(answers: list[list[bytes]], **how: Any) -> int:
    """See that it makes no difference whether heads are known; how many were."""

    async def run() -> int:
        ours, theirs = (Asking(kind, **how) for kind in (Client, Parsing))
        for pieces in answers:
            assert ours.ask(pieces) == theirs.ask(pieces)
        assert theirs.known == 0
        return ours.known

    return asyncio.run(run())


def alone(*answers: bytes, **how: Any) -> int:
    """As `both`, where each answer comes in one piece."""
    return both([[one] for one in answers], **how)


def test_what_is_answered_again_is_known_whatever_its_length() -> None:
    assert alone(*(answer(body) for body in (b"a", b"b" * 9, b"c" * 10, b"d" * 100_000, b"\r\n\r\n", b"e"))) == 5


def test_each_has_its_own_date_and_id() -> None:
    later = HEAD.replace(b"05:47:31", b"15:47:32").replace(b"chatcmpl-1", b"")
    assert alone(answer(), answer(head=later), answer(head=HEAD.replace(b"chatcmpl-1", b"a b, " * 50))) == 2


def test_a_head_is_known_on_each_connection_to_its_server() -> None:
    unlike = answer(head=HEAD.replace(b"uvicorn", b"other\r\nconnection: close"))
    assert alone(answer(), unlike, answer(), unlike, answer()) == 2


def test_whoever_asks_is_told_its_type_and_the_headers_that_all_have() -> None:
    async def run() -> None:
        asking = Asking(Client)
        asking.ask([answer()])
        for place in range(2):
            response = asking.client.begin(b"POST", b"{}")
            assert response is not None
            asking.client.idle.extend(asking.client.idle)
            connection: Any = response._source
            connection.data_received(answer(b"more" * place or b"said"))
            assert response.content_type == "application/json"
            assert response.headers == {b"server": b"uvicorn", b"content-type": b"application/json; charset=utf-8"}
            assert await response.read(100) == await next_of(response) == (b"more" * place or b"said")
            assert await next_of(response) == b""

    asyncio.run(run())


@pytest.mark.parametrize("at", [1, len(HEAD) - 10, len(HEAD) - 2, len(HEAD), len(HEAD) + 1])
def test_what_comes_in_pieces_is_left_to_the_parser(at: int) -> None:
    whole = answer()
    pieces = [whole[:at], whole[at:]]
    assert both([pieces, pieces, [whole], pieces, [whole]]) == 1
    assert both([[whole], [whole[:3], whole], [whole]]) == 1


@pytest.mark.parametrize("more", [b"\r\n", b"\n", b"x", b"HTTP/1.1 200 OK\r\n", answer(), answer(b"longer")])
def test_what_stands_before_or_behind_an_answer_is_left_to_the_parser(more: bytes) -> None:
    assert alone(answer() + more, answer() + more) == 0
    assert alone(answer(), answer() + more, answer()) <= 2
    assert alone(answer(), more + answer(), answer()) <= 2


@pytest.mark.parametrize("early", [b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 103 Early\r\nserver: x\r\n\r\n"])
def test_an_answer_that_something_goes_before_is_left_to_the_parser(early: bytes) -> None:
    assert alone(early + answer(), early + answer(), answer(), early + answer(), answer()) == 1
    assert both([[answer()], [early, answer()], [answer()]]) == 1


@pytest.mark.parametrize(
    "length",
    [b"+4", b"0x4", b"04", b" 4", b"4 ", b"4,4", b"", b"-4", b"4\r\n 5", b"5\r\nContent-Length: 4", b"4\r\n\r\n", b"0",
     b"3", b"5", b"4;", b"4\x00", b"\xb4", b"4_0", b"9" * 20, b"4\r\nTransfer-Encoding: chunked", b"4\nX: 1", b"4\r"],
)  # fmt: skip
def test_an_odd_length_is_read_as_the_parser_reads_it(length: bytes) -> None:
    odd = HEAD.replace(b"%d", length) + b"said"
    assert alone(answer(), odd, answer()) <= 2
    alone(odd, odd, answer())


@pytest.mark.parametrize(
    "line",
    [b"content-length: 4", b"Content-length : 4", b" x: 1", b"Transfer-Encoding: chunked", b"Connection: close",
     b"Content-Encoding: gzip", b"Content-Encoding: identity", b"Upgrade: h2c", b"Connection: upgrade\r\nUpgrade: h2c",
     b"X:  two", b"X:one", b"X: ", b"X: a ", b"X: a\r\n b", b"X: \xff", b"X: a\tb", b"Trailer: x", b"server: again"],
)  # fmt: skip
def test_a_head_that_is_not_plain_is_not_known(line: bytes) -> None:
    head = HEAD.replace(b"server: uvicorn", b"server: uvicorn\r\n" + line)
    assert alone(*[answer(head=head)] * 3) == 0
    assert alone(answer(), *[answer(head=head)] * 2, answer()) <= 1


@pytest.mark.parametrize(
    "value",
    [
        b"\n",
        b"a\nb",
        b"\x00",
        b"a\x01",
        b"\x7f",
        b"\xff",
        b"\t",
        b"a\r\ntransfer-encoding: chunked",
        b"a\rb",
    ],
)
@pytest.mark.parametrize("name", [b"date", b"X-Request-Id"])
def test_what_is_an_answers_own_is_plain(name: bytes, value: bytes) -> None:
    before, after = HEAD.split(name + b": ", 1)
    odd = before + name + b": " + value + b"\r\n" + after.split(b"\r\n", 1)[1]
    assert alone(answer(), answer(head=odd), answer()) <= 1
    assert alone(*[answer(head=odd)] * 3) == 0


@pytest.mark.parametrize(
    "first", [b"HTTP/1.0 200 OK", b"HTTP/1.1 201 Made", b"HTTP/1.1 404 No", b"HTTP/1.1 500 No", b"HTTP/1.1  200 OK"]
)
def test_only_what_is_answered_with_200_is_known(first: bytes) -> None:
    head = HEAD.replace(b"HTTP/1.1 200 OK", first)
    assert alone(*[answer(head=head)] * 3) == 0
    assert alone(answer(), answer(head=head), answer()) == 1


def test_an_answer_without_a_body_or_with_a_long_one_is_left_to_the_parser() -> None:
    assert alone(answer(), answer(b""), answer(b"")) == 0
    assert alone(answer(), answer(b"x" * MOST_BODY_BYTES), answer(b"x" * (MOST_BODY_BYTES + 1))) == 1


def test_what_stands_behind_the_longest_body_is_not_passed_over() -> None:
    assert alone(answer(), answer(b"x" * MOST_BODY_BYTES) + answer(), answer()) == 1


def test_a_connection_that_has_not_sent_all_is_not_kept() -> None:
    assert alone(*[answer()] * 3, unsent_bytes=1) == 0


def test_a_long_head_is_not_kept() -> None:
    longest = HEAD.replace(b"uvicorn", b"x" * (MOST_BYTES - len(HEAD)))
    assert alone(*[answer(head=longest)] * 2) == 1
    assert alone(*[answer(head=longest.replace(b"OK", b"OK" + b"y" * 20))] * 2) == 0


def test_heads_are_not_learned_again_and_again() -> None:
    other = answer(head=HEAD.replace(b"uvicorn", b"other"))
    assert alone(answer(), other, other, answer(), patient=True) == 1

    async def run() -> int:
        asking = Asking(Client, patient=True)
        for one in (answer(), other):
            asking.ask([one])
        asking.client.learns_s -= LEARN_EVERY_S
        for one in (other, other, answer()):
            asking.ask([one])
        return asking.known

    assert asyncio.run(run()) == 1


def test_heads_that_are_never_alike_are_learned_more_and_more_seldom() -> None:
    async def run() -> list[float]:
        asking, waits = Asking(Client, patient=True), []
        for place in range(5):
            asking.client.learns_s = -math.inf
            asking.ask([answer(head=HEAD.replace(b"uvicorn", b"%d" % place))])
            waits.append(asking.client.learns_s - time.monotonic())
        asking.ask([answer(head=HEAD.replace(b"uvicorn", b"4"))])
        asking.client.learns_s = -math.inf
        asking.ask([answer()])
        return [*waits, asking.client.learns_s - time.monotonic()]

    assert asyncio.run(run()) == pytest.approx([1, 2, 4, 8, 16, 1], abs=0.9)


CHUNKED = HEAD.replace(b"content-length: %d", b"Transfer-Encoding: chunked") + b"4\r\nsaid\r\n0\r\n\r\n"
PARTS = [
    answer(), answer(b"x" * 300_000), answer(b'{"a": 1}', HEAD.replace(b"05:47", b"06:01")), answer(b""),
    answer(head=HEAD.lower().replace(b"http", b"HTTP")), CHUNKED, answer(head=HEAD.replace(b"200", b"404")),
    b"HTTP/1.1 100 Continue\r\n\r\n" + answer(),
    HEAD.replace(b"application/json", b"text/event-stream") % 4 + b"said", answer(head=HEAD.replace(b"date", b"dated")),
    HEAD.replace(b"content-length: %d\r\n", b"") + b"said", b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nsaid",
]  # fmt: skip
SPLICED = [
    b"\r\n", b"\n", b"\r", b" ", b"0", b"9", b":", b"Content-Length: 2\r\n", b"\x00", b"\xff", b"HTTP/1.1 200 OK\r\n",
    b"\r\n\r\n", b"\r\ntransfer-encoding: chunked", b"\r\nconnection: close", b"\r\ncontent-encoding: gzip",
]  # fmt: skip


def scrambled(chance: random.Random) -> list[list[bytes]]:
    """Answers, some of them mangled, some in pieces, some with another one behind them."""
    answers = []
    for part in chance.choices(PARTS, [12, 1, 4, 1, 2, 1, 1, 1, 1, 2, 1, 4], k=chance.randint(3, 8)):
        sent = part
        if chance.random() < 0.3:
            at = chance.randrange(min(len(sent), 250))
            sent = sent[:at] + chance.choice(SPLICED) + sent[at + chance.randint(0, 2) :]
        if chance.random() < 0.05:
            sent += chance.choice(PARTS)
        pieces = []
        while sent:
            size = chance.choice([1, 7, 100, len(HEAD)]) if chance.random() < 0.1 else len(sent)
            pieces.append(sent[:size])
            sent = sent[size:]
        answers.append(pieces)
    return answers


@pytest.mark.parametrize("seed", range(40))
def test_whatever_is_answered_it_makes_no_difference(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(25):
        both(scrambled(chance))


def test_some_of_what_is_scrambled_is_known() -> None:
    assert sum(both(scrambled(random.Random(seed))) for seed in range(100)) > 60
