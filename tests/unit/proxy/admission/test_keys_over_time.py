"""A change of a key, its expiry or its limit applies to the next request on the same connection."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest

from proxy.admission.api_keys import Keys
from proxy.admission.feedback_tokens import FeedbackTokens
from proxy.admission.middleware import AdmissionMiddleware, ConcurrencyLimit
from proxy.admission.rate_limits import RateLimiter
from proxy.http.asgi import EXCHANGE, HEADERS, PRINCIPAL, Receive, Scope, Send
from whetstone.config.settings import ProxySettings
from whetstone.domain.api_keys import Principal, hash_of

CHAT = "/v1/chat/completions"
PASSED = 299
"""Status of what the routes were asked."""
EARLIER_S = 1_000_000.0
"""A moment, some seconds before its minute ends."""


class Table:
    """Keys in memory: text -> who, and until when."""

    def __init__(self) -> None:
        self.keys: dict[str, tuple[Principal, float | None]] = {}
        self.changes = 0
        self.used: list[Mapping[tuple[str, str], datetime]] = []

    def state(self) -> tuple[int, int, datetime | None]:
        return self.changes, len(self.keys), None

    def living(self, now: datetime) -> dict[str, tuple[Principal, datetime | None]]:
        made = {hash_of(key.encode()): (who, until_s) for key, (who, until_s) in self.keys.items()}
        return {one: (who, None if s is None else datetime.fromtimestamp(s, UTC)) for one, (who, s) in made.items()}

    def note_used(self, minutes: Mapping[tuple[str, str], datetime]) -> None:
        self.used.append(minutes)


class World:
    """The admission middleware before routes that answer everything."""

    def __init__(self, **limits: Any) -> None:
        self.table, self.now_s = Table(), EARLIER_S
        self.keys = Keys(self.table, "home", on_loopback=True, now_s=lambda: self.now_s)
        self.in_flight = ConcurrencyLimit(ProxySettings().model_copy(update=limits))
        unused: Any = None
        quotas = RateLimiter(lambda: 0, lambda: self.now_s)
        tokens = FeedbackTokens([b"s" * 32], 3600, lambda: self.now_s)
        self.door = AdmissionMiddleware(
            self.keys, tokens, quotas, self.in_flight, "home", ("https://ours",), self._route, unused
        )
        self.asked: list[tuple[str, Principal | None]] = []

    def change(self, key: str = "k1", **values: Any) -> None:
        """Make a key, or have it be otherwise."""
        until_s = values.pop("until_s", None)
        made: dict[str, Any] = {"project": "home", "key_id": key, "scopes": frozenset({"inference"})} | values
        self.table.keys[key] = Principal(**made), until_s
        self.table.changes += 1

    def refresh(self) -> None:
        asyncio.run(self.keys.refresh())

    def ask(self, headers: dict[bytes, bytes], path: str = CHAT, size: int = 5) -> tuple[int, dict[bytes, bytes]]:
        """What a request is answered: its status and its headers."""
        exchange = SimpleNamespace(whole_bytes=lambda: size)
        scope = {"type": "http", "method": "POST", "path": path, "headers": [*headers.items()]}
        scope |= {HEADERS: dict(headers), EXCHANGE: exchange}
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        async def serve() -> None:
            await self.door.serve(scope, _never, send)

        asyncio.run(serve())
        assert (self.in_flight.requests, self.in_flight.bytes) == (0, 0)
        return sent[0]["status"], dict(sent[0]["headers"])

    def _route(self, project: str, method: str, path: str) -> Callable[[Scope, Receive, Send], Awaitable[None]]:
        async def answer(scope: Scope, _receive: Receive, send: Send) -> None:
            assert (scope["method"], scope["path"]) == (method, path)
            self.asked.append((project, scope[PRINCIPAL]))
            await send({"type": "http.response.start", "status": PASSED, "headers": []})

        return answer


async def _never() -> Any:
    raise AssertionError("nobody is to ask for its body")


def bearer(key: str = "k1") -> dict[bytes, bytes]:
    return {b"authorization": b"Bearer " + key.encode()}


@pytest.fixture
def world() -> World:
    made = World()
    made.change()
    made.refresh()
    assert [made.ask(bearer())[0] for _ in range(3)] == [PASSED] * 3
    return made


def test_each_request_has_its_keys_principal(world: World) -> None:
    assert {project for project, _ in world.asked} == {"home"}
    assert [who and who.key_id for _, who in world.asked] == ["k1"] * 3


def test_a_key_that_is_revoked_opens_nothing_at_once(world: World) -> None:
    del world.table.keys["k1"]
    world.table.changes += 1
    world.refresh()
    assert world.ask(bearer())[0] == 401


def test_a_key_that_expires_opens_nothing_from_then_on() -> None:
    world = World()
    world.change(until_s=EARLIER_S + 1)
    world.refresh()
    assert [world.ask(bearer())[0] for _ in range(2)] == [PASSED] * 2
    world.now_s += 1
    assert world.ask(bearer())[0] == 401


def test_a_key_that_loses_its_scope_or_moves_does_so_at_once(world: World) -> None:
    world.change(project="acme")
    world.refresh()
    assert world.ask(bearer())[0] == PASSED and world.asked[-1][0] == "acme"
    world.change(scopes=frozenset({"feedback"}))
    world.refresh()
    assert world.ask(bearer())[0] == 403


def test_a_key_that_gets_a_quota_has_it_at_once_and_it_counts_each_request(world: World) -> None:
    world.change(requests_per_min=3)
    world.refresh()
    told = [world.ask(bearer()) for _ in range(4)]
    assert [status for status, _ in told] == [PASSED] * 3 + [429]
    assert [headers[b"x-ratelimit-remaining-requests"] for _, headers in told] == [b"2", b"1", b"0", b"0"]


def test_the_first_key_closes_the_door_to_who_came_without_one() -> None:
    world = World()
    world.refresh()
    here = {b"host": b"localhost"}
    assert [world.ask(here)[0] for _ in range(2)] == [PASSED] * 2
    world.change()
    world.refresh()
    assert world.ask(here)[0] == 401


def test_a_key_is_noted_as_used_in_each_minute(world: World) -> None:
    world.refresh()
    for _ in range(2):
        world.now_s += 60
        assert [world.ask(bearer())[0] for _ in range(2)] == [PASSED] * 2
        world.refresh()
    minutes = [minute.timestamp() for one in world.table.used for minute in one.values()]
    assert minutes == [EARLIER_S // 60 * 60 + 60 * number for number in range(3)]


def test_what_is_too_much_is_refused_each_time() -> None:
    world = World(max_in_flight_bytes=10)
    world.change()
    world.refresh()
    assert [world.ask(bearer(), size=size)[0] for size in (5, 10, 11, 10)] == [PASSED, PASSED, 503, PASSED]


@pytest.mark.parametrize(
    ("more", "status"),
    [
        ({b"origin": b"https://ours"}, PASSED),
        ({b"origin": b"https://theirs"}, 403),
        ({b"x-request-id": b"r1"}, PASSED),
        ({b"content-encoding": b"gzip"}, 415),
        ({b"content-encoding": b"identity"}, PASSED),
    ],
)
def test_other_headers_are_checked_each_time(world: World, more: dict[bytes, bytes], status: int) -> None:
    told = [world.ask(bearer() | more) for _ in range(3)]
    assert [one for one, _ in told] == [status] * 3
    assert {headers.get(b"x-request-id") for _, headers in told} == {more.get(b"x-request-id")}
    assert {headers.get(b"access-control-allow-origin") for _, headers in told} <= {more.get(b"origin"), None}
    assert told[0] == told[1] == told[2]


@pytest.mark.parametrize("path", ["/v1/feedback", "/r/trajectory/t1/v1/chat/completions", "/healthz", "/v1/nowhere"])
def test_other_paths_are_admitted_each_time(path: str) -> None:
    world = World()
    world.change(scopes=frozenset({"admin"}))
    world.refresh()
    assert [world.ask(bearer(), path)[0] for _ in range(3)] == [PASSED] * 3
