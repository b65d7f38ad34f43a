"""What is served and recorded, before a fake vLLM that can do what the real one cannot be asked for."""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from proxy.recording.journal.log import Journal
from proxy.wire.chat.stream import ChatStream
from tests.unit.proxy.conftest import (
    ANSWER_IDS,
    LOGPROBS,
    PROMPT_IDS,
    STREAM,
    FakeHandler,
    FakeVllm,
    RunningProxy,
    chunk,
    events,
    settings_for,
    wait_for,
)
from whetstone.config.settings import Settings

HEAD = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
    b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n"
)


def test_a_plain_call_is_answered_stripped_and_recorded(proxy: RunningProxy, fake_vllm: FakeVllm) -> None:
    response = proxy.chat({"X-Trajectory-Id": "t", "X-Group-Id": "g", "Authorization": "Bearer secret"}, temperature=1)
    assert response.status_code == 200
    assert response.json()["model"] == "starter"
    assert response.json()["choices"][0]["token_ids"] is None
    headers = response.headers
    assert (headers["x-trajectory-id"], headers["x-group-id"], headers["x-threaded-by"]) == ("t", "g", "header")
    assert headers["x-policy-version"] == "0"
    (row,) = proxy.recorded()
    assert row.id == headers["x-completion-id"]
    assert (row.prompt_token_ids, row.token_ids, row.inference_logprobs) == (PROMPT_IDS, ANSWER_IDS, LOGPROBS)
    assert (row.status, row.policy_version, row.streamed, row.ttft_ms) == ("complete", 0, False, None)
    assert row.why_not_trained is None
    (sent,), (sent_headers,) = fake_vllm.requests, fake_vllm.headers
    assert (sent["model"], sent["cache_salt"]) == ("starter@v0", "default")
    assert sent_headers["x-request-id"] == row.id
    assert "authorization" not in sent_headers


def test_a_stream_is_passed_on_stripped_and_recorded(proxy: RunningProxy) -> None:
    with proxy.client.stream("POST", "/v1/chat/completions", json=STREAM) as response:
        body = response.read()
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["x-accel-buffering"] == "no"
    assert response.headers["x-threaded-by"] == "new"
    assert "x-group-id" not in response.headers
    assert body.endswith(b"data: [DONE]\n\n")
    assert body.count(b"data: ") == len(events())
    (row,) = proxy.recorded()
    assert (row.token_ids, row.inference_logprobs, row.status) == (ANSWER_IDS, LOGPROBS, "complete")
    assert row.trajectory_id == response.headers["x-trajectory-id"]
    assert row.streamed
    assert 0 < row.ttft_ms <= row.total_ms


def test_the_record_is_durable_before_the_last_byte(plain_proxy: RunningProxy) -> None:
    """Between the record and SQL the journal has it: with the database locked the app is still answered."""
    with plain_proxy.engine.begin():
        assert plain_proxy.chat().status_code == 200
        assert plain_proxy.rows() == []
        assert any(len(path.read_bytes().strip(b"\0")) > 100 for path in plain_proxy.journal.iterdir())
    plain_proxy.recorded()


def test_each_event_is_passed_on_as_it_comes(plain_proxy: RunningProxy, fake_vllm: FakeVllm) -> None:
    heard = threading.Event()

    def slow(handler: FakeHandler, _body: Any) -> None:
        handler.begin()
        handler.say(events()[0])
        assert heard.wait(5), "the first event was held back"
        for event in events()[1:]:
            handler.say(event)
        handler.end()

    fake_vllm.script = slow
    with plain_proxy.client.stream("POST", "/v1/chat/completions", json=STREAM) as response:
        for _ in response.iter_raw():
            heard.set()
    plain_proxy.recorded(status="complete")


@pytest.mark.parametrize("headers", [{}, {"X-Request-Id": "gateway-1"}])
def test_an_app_that_reads_late_gets_every_event_in_its_order(
    plain_proxy: RunningProxy, fake_vllm: FakeVllm, headers: dict[str, str]
) -> None:
    """More than sockets hold: the app is waited for, and the model server too.

    50 MB: Linux lets the receiving end of the model server's connection grow to 32 MiB, and each sending end to 4 MiB.
    """
    count, said = 1000, []

    def much(handler: FakeHandler, _body: Any) -> None:
        handler.begin()
        for number in range(count):
            handler.say(chunk({"content": f"{number:05d}" + "o" * 50_000}, token_ids=[number]))
            said.append(number)
        handler.say(b"data: [DONE]\n\n")
        handler.end()

    fake_vllm.script = much
    small = httpx.HTTPTransport(socket_options=[(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**16)])
    with (
        httpx.Client(base_url=plain_proxy.url, transport=small, timeout=60) as client,
        client.stream("POST", "/v1/chat/completions", json=STREAM, headers=headers) as response,
    ):
        before = -1
        while len(said) != before:
            before = len(said)
            time.sleep(0.3)
        assert 0 < before < count
        told = response.read().split(b"\n\n")
    assert response.headers.get("x-request-id") == headers.get("X-Request-Id")
    numbers = [json.loads(event[6:])["choices"][0]["delta"]["content"][:5] for event in told[:count]]
    assert numbers == [f"{number:05d}" for number in range(count)] and told[count:] == [b"data: [DONE]", b""]
    (row,) = plain_proxy.recorded(status="complete")
    assert row.token_ids == list(range(count))


def test_the_choices_of_a_call_are_siblings(proxy: RunningProxy) -> None:
    response = proxy.chat(n=3)
    assert len(response.json()["choices"]) == 3
    first, *others = proxy.recorded(3)
    assert {row.call_id for row in others} == {first.id}
    assert [row.choice for row in (first, *others)] == [0, 1, 2]


# --- the app hangs up


@pytest.mark.parametrize("stream", [False, True])
def test_a_disconnect_reaches_vllm_and_keeps_the_tokens_already_spoken(
    proxy: RunningProxy, fake_vllm: FakeVllm, stream: bool
) -> None:
    began = threading.Event()

    def script(handler: FakeHandler, _body: Any) -> None:
        if stream:
            handler.begin()
            for event in events()[:3]:
                handler.say(event)
        began.set()
        handler.until_hung_up()

    fake_vllm.script = script
    with socket.create_connection(("127.0.0.1", int(proxy.url.rsplit(":", 1)[1]))) as app:
        body = json.dumps(STREAM | {"stream": stream}).encode()
        app.sendall(HEAD % len(body) + body)
        assert began.wait(5)
        if stream:
            heard = b""
            while heard.count(b"data: ") < 3:
                heard += app.recv(65536)
    (row,) = proxy.recorded()
    assert fake_vllm.hung_up.wait(5)
    assert (row.status, row.why_not_trained) == ("aborted", "aborted")
    assert (row.token_ids, row.inference_logprobs) == ((ANSWER_IDS[:2], LOGPROBS[:2]) if stream else (None, None))


def test_an_app_that_hangs_up_within_its_request_leaves_nothing(plain_proxy: RunningProxy) -> None:
    with socket.create_connection(("127.0.0.1", int(plain_proxy.url.rsplit(":", 1)[1]))) as app:
        app.sendall(HEAD % 100 + b"{")
    assert plain_proxy.chat().status_code == 200
    assert len(plain_proxy.recorded()) == 1


def running_requests(proxy: RunningProxy) -> int:
    """The number of requests that are tracked while their calls run."""
    return len(proxy.app.tenants["default"].threads._running._by_request)


def test_a_call_that_cannot_be_recorded_is_over_all_the_same(
    plain_proxy: RunningProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of its request stays, and what it went on from is free."""
    first = plain_proxy.chat().json()["choices"][0]["message"]
    went_on = STREAM | {"messages": [*STREAM["messages"], first, {"role": "user", "content": "more"}]}
    with monkeypatch.context() as patched:
        patched.setattr(ChatStream, "results", property(lambda _: 1 / 0))
        with contextlib.suppress(httpx.RemoteProtocolError):
            plain_proxy.client.post("/v1/chat/completions", json=went_on)
        wait_for(lambda: not running_requests(plain_proxy), timeout_s=10)
    again = plain_proxy.client.post("/v1/chat/completions", json=went_on)
    assert again.headers["x-threaded-by"] == "content"


def test_a_call_that_is_not_recorded_is_over_all_the_same(
    sqlite_url: str,
    tmp_path: Path,
    fake_vllm: FakeVllm,
    start: Callable[[Settings], RunningProxy],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    proxy = start(settings_for(sqlite_url, fake_vllm.url, tmp_path, proxy={"when_full": "unrecorded"}))

    def full(*_: object) -> None:
        raise OSError("full")

    monkeypatch.setattr(Journal, "append", full)
    assert proxy.chat().headers["x-whetstone-recorded"] == "false"
    assert not running_requests(proxy)
