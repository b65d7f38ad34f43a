"""Which of several vLLM servers answers, and what becomes of requests that none can answer yet."""

import asyncio
import math
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from migrations import schema
from proxy.errors import UpstreamDown
from proxy.upstream.load_balancer import LOAD_FACTOR, MOST_MISLED, Replica, Replicas, choose
from proxy.upstream.server import Request, Upstream
from tests.unit.proxy.conftest import FakeHandler, FakeVllm, RunningProxy, events, settings_for, wait_for

Start = Callable[..., RunningProxy]
NAME = "starter@v0"
REQUEST = Request("/v1/chat/completions", b'{"model": "starter@v0"}', "c", NAME, "t")

# --- the choice


@dataclass(eq=False)
class Server:
    url: str
    in_flight: int = 0


def servers(*loads: int) -> list[Server]:
    return [Server(f"http://10.0.0.{place}:8000", load) for place, load in enumerate(loads)]


@given(st.text(min_size=1, max_size=40), st.integers(2, 6), st.randoms())
def test_a_trajectory_stays_with_its_server_whatever_others_come_and_go(name: str, count: int, random: Any) -> None:
    among = servers(*[0] * count)
    chosen = choose(name, among)
    random.shuffle(among)
    assert choose(name, among) is chosen
    others = [one for one in among if one is not chosen]
    assert choose(name, [*others[1:], chosen]) is chosen
    assert choose(name, others) is not chosen


def test_trajectories_are_spread_evenly() -> None:
    among = servers(0, 0, 0)
    taken = Counter(choose(f"trajectory {n}", among).url for n in range(3000))  # type: ignore[union-attr]
    assert all(900 < count < 1100 for count in taken.values()), taken


@given(st.integers(1, 6), st.lists(st.sampled_from("abcdef"), max_size=60))
def test_no_server_has_more_than_its_share_and_a_quarter(count: int, names: list[str]) -> None:
    among = servers(*[0] * count)
    for number, name in enumerate(names, 1):
        chosen = choose(name, among)
        assert chosen is not None
        chosen.in_flight += 1
        assert chosen.in_flight <= math.ceil(LOAD_FACTOR * number / count)


def test_of_none_none_is_chosen() -> None:
    assert choose("t", []) is None


# --- where a request goes


def with_servers(urls: list[str], ask: Callable[[Replicas], Awaitable[Any]], **limits: Any) -> Any:
    """Do it with these servers, all of which are thought to be well and to have version 0."""

    async def run() -> Any:
        replicas = Replicas([Replica(url, Upstream(url + "/v1", 60)) for url in urls], **LIMITS | limits)
        for replica in replicas:
            replica.healthy, replica.names = True, frozenset({NAME})
        try:
            return await ask(replicas)
        finally:
            for replica in replicas:
                await replica.upstream.close()

    return asyncio.run(run())


LIMITS: dict[str, Any] = {"max_waiting": 10, "max_wait_s": 0.2}


async def answered(replicas: Replicas, trajectory_id: str) -> int:
    asked = Request(REQUEST.path, REQUEST.body, "c", NAME, trajectory_id)
    with await replicas.ask(lambda: asked) as response:
        await response.read(10_000)
        return response.status


def test_what_there_is_to_do_while_a_server_works_is_done_and_where_it_fails_nothing_stays_in_flight(
    fake_vllm: FakeVllm,
) -> None:
    done = []

    def fails() -> None:
        done.append(1)
        raise RuntimeError("no")

    async def ask(replicas: Replicas) -> None:
        asked = msgspec.structs.replace(REQUEST, meanwhile=fails)
        with pytest.raises(RuntimeError, match="no"):
            await replicas.ask(lambda: asked)
        (replica,) = replicas
        assert (done, replica.in_flight, replica.using, replica.healthy) == ([1], 0, {NAME: 0}, True)
        assert await answered(replicas, "t") == 200

    with_servers([fake_vllm.url], ask)


def test_a_refused_connection_goes_to_the_other_server(fake_vllm: FakeVllm) -> None:
    gone = FakeVllm()
    gone.close()

    async def ask(replicas: Replicas) -> None:
        assert {await answered(replicas, f"t{n}") for n in range(20)} == {200}
        assert [replica.healthy for replica in replicas] == [False, True]
        assert "Connect" in str(next(iter(replicas)).why_away)
        assert [replica.in_flight for replica in replicas] == [0, 0]

    with_servers([gone.url, fake_vllm.url], ask)
    assert len(fake_vllm.requests) == 20


def test_a_server_that_has_lost_the_adapter_is_not_asked_for_it_again(fake_vllm: FakeVllm) -> None:
    async def ask(replicas: Replicas) -> None:
        assert {await answered(replicas, f"t{n}") for n in range(20)} == {200}
        assert [replica.names for replica in replicas] == [frozenset(), frozenset({NAME})]

    with FakeVllm(base_names=["another@v0"]) as other:
        with_servers([other.url, fake_vllm.url], ask)
        assert len(other.requests) == 1, "it said that it has none of that name"
    assert len(fake_vllm.requests) == 20


def test_an_engine_that_died_is_asked_no_more(fake_vllm: FakeVllm) -> None:
    dead = b'{"error":{"message":"EngineCore encountered an issue. See stack trace (above).","code":500}}'

    async def ask(replicas: Replicas) -> None:
        statuses = Counter([await answered(replicas, f"t{n}") for n in range(20)])
        assert statuses == {200: 19, 500: 1}, "what was sent is not sent again"
        assert [replica.healthy for replica in replicas] == [False, True]

    with FakeVllm() as other:
        other.script = lambda handler, _: handler.whole(500, dead)
        with_servers([other.url, fake_vllm.url], ask)


def test_a_request_goes_by_what_holds_when_its_wait_is_over(fake_vllm: FakeVllm) -> None:
    """While it waited another version went live."""
    asked = [REQUEST]

    async def ask(replicas: Replicas) -> None:
        replicas.hold("step")

        async def post() -> int:
            with await replicas.ask(lambda: asked[-1]) as response:
                return response.status

        waiting = asyncio.ensure_future(post())
        while not replicas.waiting:
            await asyncio.sleep(0)
        asked.append(Request(REQUEST.path, b'{"model": "starter@v1"}', "c", "starter@v1", "t"))
        (replica,) = replicas
        replica.names |= {"starter@v1"}
        replicas.hold(None)
        assert await waiting == 200
        assert replicas.waiting == replicas.in_flight == 0

    fake_vllm.adapters["starter@v1"] = "/adapters/starter@v1"
    with_servers([fake_vllm.url], ask, max_wait_s=20)
    assert [request["model"] for request in fake_vllm.requests] == ["starter@v1"]


@pytest.mark.parametrize("kept", [False, True])
def test_a_request_that_is_given_up_is_counted_no_more(fake_vllm: FakeVllm, kept: bool) -> None:
    """On a kept connection as on a new one; its server is hung up on, and aborts."""

    async def ask(replicas: Replicas) -> None:
        (replica,) = replicas
        if kept:
            assert await answered(replicas, "t") == 200
        fake_vllm.script = lambda handler, _: handler.until_hung_up()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await answered(replicas, "t")
        assert (replicas.in_flight, replica.using) == (0, {NAME: 0})
        assert await asyncio.to_thread(fake_vllm.hung_up.wait, 10)
        assert not replica.look_now.is_set()

    with_servers([fake_vllm.url], ask)


def test_a_connection_that_breaks_is_counted_no_more_and_its_server_looked_at(fake_vllm: FakeVllm) -> None:
    async def ask(replicas: Replicas) -> None:
        (replica,) = replicas
        assert await answered(replicas, "t") == 200
        fake_vllm.script = lambda handler, _: handler.hang_up()
        with pytest.raises(UpstreamDown):
            await answered(replicas, "t")
        assert (replicas.in_flight, replica.using) == (0, {NAME: 0})
        assert replica.look_now.is_set()

    with_servers([fake_vllm.url], ask)
    assert len(fake_vllm.requests) == 2, "what was sent is not sent again"


def test_names_that_are_over_are_not_counted_for_ever() -> None:
    async def run() -> None:
        replica = Replica("http://127.0.0.1:1", Upstream("http://127.0.0.1:1/v1", 10))
        replica.take("busy")
        for version in range(100):
            replica.names = frozenset({f"starter@v{version}"})
            replica.take(f"starter@v{version}")
            replica.is_through(f"starter@v{version}")
        assert replica.using == {"busy": 1, "starter@v99": 0}
        assert replica.in_flight == 1

    asyncio.run(run())


def test_a_server_that_says_otherwise_than_it_answers_is_not_asked_again_and_again(fake_vllm: FakeVllm) -> None:
    """It lists the name whenever it is looked at, and answers 404."""
    fake_vllm.base_names = []

    async def ask(replicas: Replicas) -> None:
        (replica,) = replicas

        async def look_at_once() -> None:
            while True:
                await asyncio.sleep(0)
                replica.names = frozenset({NAME})
                replicas.changed()

        looking = asyncio.ensure_future(look_at_once())
        with pytest.raises(UpstreamDown, match="starter@v0 is being loaded"):
            await answered(replicas, "t")
        looking.cancel()

    with_servers([fake_vllm.url], ask, max_wait_s=60)
    assert len(fake_vllm.requests) == MOST_MISLED + 1


# --- the proxy before two servers


@pytest.fixture
def two() -> Iterator[tuple[FakeVllm, FakeVllm]]:
    with FakeVllm() as one, FakeVllm() as other:
        yield one, other


@pytest.fixture
def served(two: tuple[FakeVllm, FakeVllm], sqlite_url: str, tmp_path: Path, start: Start) -> RunningProxy:
    return start(settings_for(sqlite_url, [fake.url for fake in two], tmp_path))


def said_to(fake: FakeVllm) -> Counter[str]:
    """What a server was asked, by the first message."""
    return Counter(request["messages"][0]["content"] for request in fake.requests)


def test_the_turns_of_a_trajectory_go_to_one_server(served: RunningProxy, two: tuple[FakeVllm, FakeVllm]) -> None:
    names = [f"t{n}" for n in range(16)]
    for _ in range(3):
        for name in names:
            served.chat({"X-Trajectory-Id": name}, messages=[{"role": "user", "content": name}])
    one, other = (said_to(fake) for fake in two)
    assert one.keys() & other.keys() == set()
    assert one + other == Counter(dict.fromkeys(names, 3))
    assert one and other


def test_a_busy_server_lets_the_other_answer(served: RunningProxy, two: tuple[FakeVllm, FakeVllm]) -> None:
    go_on = threading.Event()

    def hold(handler: FakeHandler, body: dict[str, Any]) -> None:
        go_on.wait(60)
        handler.speak(body)

    for fake in two:
        fake.script = hold
    with ThreadPoolExecutor(8) as threads:
        asked = [threads.submit(served.chat, {"X-Trajectory-Id": "t"}, user=str(n)) for n in range(8)]
        wait_for(lambda: sum(len(fake.requests) for fake in two) == 8)
        shares = sorted(len(fake.requests) for fake in two)
        metrics = served.client.get("/metrics").text
        go_on.set()
        assert {one.result().status_code for one in asked} == {200}
    assert shares == [3, 5], "at most ceil(1.25 * 8 / 2) go to the trajectory's own"
    for fake in two:
        assert f'whetstone_in_flight_calls{{replica="{fake.url}"}} {float(len(fake.requests))}' in metrics
        assert f'whetstone_replica_up{{replica="{fake.url}"}} 1.0' in metrics


def _at_once(handler: FakeHandler, _body: Any) -> None:
    handler.hang_up()


def _midway(handler: FakeHandler, _body: Any) -> None:
    handler.begin()
    for event in events()[:2]:
        handler.say(event)
    handler.hang_up()


@pytest.mark.parametrize("dies", [_at_once, _midway])
def test_what_was_sent_is_never_sent_again(served: RunningProxy, two: tuple[FakeVllm, FakeVllm], dies: Any) -> None:
    for fake in two:
        fake.script = dies
    if dies is _at_once:
        refused = served.chat(stream=True)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "upstream_down")
    else:
        with pytest.raises(httpx.RemoteProtocolError):
            served.chat(stream=True)
    assert sum(len(fake.requests) for fake in two) == 1
    assert [row.status for row in served.recorded()] == ["error"]


def test_one_that_dies_costs_no_request_that_was_not_sent_to_it(
    served: RunningProxy, two: tuple[FakeVllm, FakeVllm]
) -> None:
    one, other = two
    for n in range(8):
        assert served.chat({"X-Trajectory-Id": f"t{n}"}).status_code == 200
    one.close()
    for n in range(20):
        assert served.chat({"X-Trajectory-Id": f"t{n}"}).status_code == 200
    wait_for(lambda: served.client.get("/readyz").json()["replicas"][one.url]["state"] == "away")
    ready = served.client.get("/readyz")
    assert (ready.status_code, ready.json()["replicas"][other.url]["state"]) == (200, "serving")
    assert f'whetstone_replica_up{{replica="{one.url}"}} 0.0' in served.client.get("/metrics").text


# --- waiting


def waiting(proxy: RunningProxy) -> int:
    return int(proxy.client.get("/readyz").json()["waiting"])


@pytest.fixture
def asked() -> Iterator[Callable[..., "Future[httpx.Response]"]]:
    """Asks in a thread of its own."""
    with ThreadPoolExecutor(8) as threads:
        yield threads.submit


def test_requests_wait_while_the_server_starts_again(
    sqlite_url: str, fake_vllm: FakeVllm, tmp_path: Path, start: Start, asked: Any
) -> None:
    proxy = start(settings_for(sqlite_url, fake_vllm.url, tmp_path, proxy={"max_wait_s": 60}))
    fake_vllm.close()
    answers = [asked(proxy.chat, stream=stream) for stream in (False, True)]
    wait_for(lambda: waiting(proxy) == 2)
    assert "whetstone_waiting_calls 2.0" in proxy.client.get("/metrics").text
    with FakeVllm(fake_vllm.server_port) as again:
        assert [answer.result().status_code for answer in answers] == [200, 200]
        assert len(again.requests) == 2
        assert waiting(proxy) == 0
    assert {row.status for row in proxy.recorded(2)} == {"complete"}


def test_no_more_wait_than_may_and_none_for_longer(
    sqlite_url: str, fake_vllm: FakeVllm, tmp_path: Path, start: Start, asked: Any
) -> None:
    limits = {"max_wait_s": 3, "max_waiting": 1}
    proxy = start(settings_for(sqlite_url, fake_vllm.url, tmp_path, proxy=limits))
    fake_vllm.close()
    first = asked(proxy.chat)
    wait_for(lambda: waiting(proxy) == 1)
    second = proxy.chat()
    assert (second.status_code, second.json()["error"]["code"]) == (503, "too_many_waiting")
    assert int(second.headers["retry-after"]) > 0
    too_late = first.result()
    assert (too_late.status_code, too_late.json()["error"]["code"]) == (503, "upstream_down")
    assert int(too_late.headers["retry-after"]) > 0
    assert {row.status for row in proxy.recorded(2)} == {"error"}


def test_an_app_that_hangs_up_waits_no_more(sqlite_url: str, fake_vllm: FakeVllm, tmp_path: Path, start: Start) -> None:
    proxy = start(settings_for(sqlite_url, fake_vllm.url, tmp_path, proxy={"max_wait_s": 60}))
    fake_vllm.close()
    with (
        httpx.Client(base_url=proxy.url, timeout=1, trust_env=False, verify=False) as app,
        pytest.raises(httpx.ReadTimeout),
    ):
        app.post("/v1/chat/completions", json={"model": "starter", "messages": [{"role": "user", "content": "hi"}]})
    proxy.recorded(status="aborted")
    assert waiting(proxy) == 0


def test_a_name_that_was_loaded_this_moment_is_found(served: RunningProxy, two: tuple[FakeVllm, FakeVllm]) -> None:
    """By the trainer, say: nobody waits for the next look."""
    one, _ = two
    v = {"project": "default", "policy": "starter", "state": "retired", "served": True}
    with served.engine.begin() as connection:
        row = connection.execute(schema.policies.select()).one()
        connection.execute(
            schema.policy_versions.insert().values(id="starter@v1", version=1, created_at=row.created_at, **v)
        )
    wait_for(lambda: served.client.get("/v1/models/starter@v1").status_code == 200)
    refused = served.chat(model="starter@v1")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "adapter_loading")
    one.adapters["starter@v1"] = "/adapters/starter@v1"
    assert served.chat(model="starter@v1").headers["x-policy-version"] == "1"
