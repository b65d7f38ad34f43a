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

from proxy.journal import Journal
from proxy.wire.chat_events import ChatStream
from tests.proxy.conftest import (
    ANSWER_IDS,
    LOGPROBS,
    PROMPT_IDS,
    FakeHandler,
    FakeVllm,
    RunningProxy,
    chunk,
    events,
    settings_for,
    wait_for,
)
from whetstone.settings import Settings

HEAD = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
    b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n"
)
STREAM = {"model": "starter", "messages": [{"role": "user", "content": "hi"}], "stream": True}


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
    """More than sockets hold: the app is waited for, and the model server too."""
    count, said = 400, []

    def much(handler: FakeHandler, _body: Any) -> None:
        handler.begin()
        for number in range(count):
            handler.say(chunk({"content": f"{number:05d}" + "o" * 50_000}, token_ids=[number]))
            said.append(number)
        handler.say(b"data: [DONE]\n\n")
        handler.end()

    fake_vllm.script = much
    with plain_proxy.client.stream("POST", "/v1/chat/completions", json=STREAM, headers=headers) as response:
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


def test_an_event_that_cannot_be_read_breaks_a_begun_stream_off(plain_proxy: RunningProxy, fake_vllm: FakeVllm) -> None:
    heard = [threading.Event(), threading.Event()]

    def bad(handler: FakeHandler, _body: Any) -> None:
        handler.begin()
        for event, before in zip(events()[:2], heard, strict=True):
            handler.say(event)
            assert before.wait(5)
        handler.say(b'data: {"choices": [\n\n')
        handler.end()

    fake_vllm.script = bad
    came = b""
    with (
        pytest.raises(httpx.RemoteProtocolError),
        plain_proxy.client.stream("POST", "/v1/chat/completions", json=STREAM) as response,
    ):
        for piece in response.iter_raw():
            came += piece
            heard[came.count(b"data: ") - 1].set()
    assert came.count(b"data: ") == 2
    (row,) = plain_proxy.recorded()
    assert (row.status, row.token_ids, "cannot be read" in row.error) == ("error", ANSWER_IDS[:1], True)


def test_the_choices_of_a_call_are_siblings(proxy: RunningProxy) -> None:
    response = proxy.chat(n=3)
    assert len(response.json()["choices"]) == 3
    first, *others = proxy.recorded(3)
    assert {row.call_id for row in others} == {first.id}
    assert [row.choice for row in (first, *others)] == [0, 1, 2]


# --- vLLM fails


@pytest.mark.parametrize("stream", [False, True])
def test_without_vllm_the_answer_is_503_and_when_to_come_back(
    sqlite_url: str, tmp_path: Path, start: Callable[[Settings], RunningProxy], stream: bool
) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        proxy = start(settings_for(sqlite_url, f"http://127.0.0.1:{unused.getsockname()[1]}", tmp_path))
        response = proxy.chat(stream=stream)
    assert response.status_code == 503
    assert int(response.headers["retry-after"]) > 0
    assert response.json()["error"]["code"] == "upstream_down"
    (row,) = proxy.recorded()
    assert (row.status, row.why_not_trained, row.token_ids) == ("error", "error", None)
    assert proxy.client.get("/readyz").status_code == 503
    assert proxy.client.get("/healthz").status_code == 200


def _before_headers(handler: FakeHandler, _body: Any) -> None:
    handler.hang_up()


def _after_headers(handler: FakeHandler, _body: Any) -> None:
    handler.begin()
    handler.hang_up()


def _in_half_an_event(handler: FakeHandler, _body: Any) -> None:
    handler.begin()
    handler.say(events()[0][:20])
    handler.hang_up()


def _ended_early(handler: FakeHandler, _body: Any) -> None:
    handler.begin()
    handler.end()


def _rubbish(handler: FakeHandler, _body: Any) -> None:
    handler.begin()
    handler.say(b'data: {"choices": 1}\n\n')
    handler.end()


def _not_an_answer(handler: FakeHandler, _body: Any) -> None:
    handler.whole(200, b"<html>")


def _half_an_answer(handler: FakeHandler, _body: Any) -> None:
    handler.send_response(200)
    handler.send_header("content-type", "application/json")
    handler.send_header("content-length", "1000")
    handler.end_headers()
    handler.wfile.write(b'{"id":')
    handler.hang_up()


def _silent(handler: FakeHandler, _body: Any) -> None:
    handler.until_hung_up()


@pytest.mark.parametrize(
    "script",
    [_before_headers, _after_headers, _in_half_an_event, _ended_early, _rubbish, _not_an_answer, _half_an_answer],
)
def test_vllm_gone_before_the_first_event_is_503_and_recorded(
    plain_proxy: RunningProxy, fake_vllm: FakeVllm, script: Any
) -> None:
    fake_vllm.script = script
    response = plain_proxy.chat(stream=True)
    assert response.status_code == 503
    assert "retry-after" in response.headers
    (row,) = plain_proxy.recorded()
    assert (row.status, row.token_ids) == ("error", None)
    assert row.error
    fake_vllm.script = FakeHandler.speak
    assert plain_proxy.chat().status_code == 200


def test_a_vllm_that_says_nothing_is_given_up(
    sqlite_url: str, tmp_path: Path, fake_vllm: FakeVllm, start: Callable[[Settings], RunningProxy]
) -> None:
    proxy = start(settings_for(sqlite_url, fake_vllm.url, tmp_path, proxy={"upstream_timeout_s": 0.2}))
    fake_vllm.script = _silent
    assert proxy.chat().status_code == 503
    assert fake_vllm.hung_up.wait(5)
    proxy.recorded(status="error")


def _in_the_middle(handler: FakeHandler, _body: Any) -> None:
    handler.begin()
    for event in events()[:3]:
        handler.say(event)
    handler.hang_up()


def _without_done(handler: FakeHandler, _body: Any) -> None:
    handler.begin()
    for event in events()[:3]:
        handler.say(event)
    handler.end()


def _rubbish_later(handler: FakeHandler, _body: Any) -> None:
    handler.begin()
    for event in (*events()[:3], b"data: {\n\n"):
        handler.say(event)
        time.sleep(0.05)
    handler.end()


@pytest.mark.parametrize("script", [_in_the_middle, _without_done, _rubbish_later])
def test_vllm_gone_within_a_stream_breaks_it_off_and_keeps_the_tokens(
    proxy: RunningProxy, fake_vllm: FakeVllm, script: Any
) -> None:
    fake_vllm.script = script
    heard = b""
    with (
        pytest.raises(httpx.RemoteProtocolError),
        proxy.client.stream("POST", "/v1/chat/completions", json=STREAM) as response,
    ):
        assert response.status_code == 200
        for data in response.iter_raw():
            heard += data
    assert heard.count(b"data: ") == 3
    (row,) = proxy.recorded()
    assert (row.status, row.why_not_trained) == ("error", "error")
    assert (row.token_ids, row.inference_logprobs, row.response_text) == (ANSWER_IDS[:2], LOGPROBS[:2], "Hello")


def test_vllm_gone_after_its_last_event_harms_nobody(plain_proxy: RunningProxy, fake_vllm: FakeVllm) -> None:
    def script(handler: FakeHandler, _body: Any) -> None:
        handler.begin()
        for event in events():
            handler.say(event)
        handler.hang_up()

    fake_vllm.script = script
    assert plain_proxy.chat(stream=True).content.endswith(b"data: [DONE]\n\n")
    plain_proxy.recorded(status="complete")


def test_a_stream_that_says_nothing_but_its_end_begins_and_ends_for_the_app_too(
    plain_proxy: RunningProxy, fake_vllm: FakeVllm
) -> None:
    def script(handler: FakeHandler, _body: Any) -> None:
        handler.begin()
        handler.say(events()[-1])
        handler.end()

    fake_vllm.script = script
    answer = plain_proxy.chat(stream=True)
    assert (answer.status_code, answer.content) == (200, b"data: [DONE]\n\n")
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    (row,) = plain_proxy.recorded(status="complete")
    assert row.ttft_ms is None


def test_an_error_event_reaches_the_app_and_the_record(plain_proxy: RunningProxy, fake_vllm: FakeVllm) -> None:
    def script(handler: FakeHandler, _body: Any) -> None:
        handler.begin()
        for event in (*events()[:2], b'data: {"error":{"message":"engine died"}}\n\n', events()[-1]):
            handler.say(event)
        handler.end()

    fake_vllm.script = script
    body = plain_proxy.chat(stream=True).content
    assert b"engine died" in body
    (row,) = plain_proxy.recorded()
    assert (row.status, row.token_ids) == ("error", ANSWER_IDS[:1])
    assert "engine died" in row.error


def test_a_500_of_vllm_is_passed_on_and_recorded(plain_proxy: RunningProxy, fake_vllm: FakeVllm) -> None:
    fake_vllm.script = lambda handler, _: handler.whole(500, b'{"error":{"message":"EngineDeadError"}}')
    response = plain_proxy.chat()
    assert (response.status_code, response.json()["error"]["message"]) == (500, "EngineDeadError")
    (row,) = plain_proxy.recorded()
    assert row.status == "error"
    assert "EngineDeadError" in row.error


def test_a_400_of_vllm_is_passed_on_under_the_apps_name_and_recorded(
    plain_proxy: RunningProxy, fake_vllm: FakeVllm
) -> None:
    fake_vllm.script = lambda handler, _: handler.whole(400, b'{"error":{"message":"starter@v0 cannot do that"}}')
    response = plain_proxy.chat()
    assert (response.status_code, response.json()["error"]["message"]) == (400, "starter cannot do that")
    (row,) = plain_proxy.recorded()
    assert (row.status, row.why_not_trained) == ("error", "error")
    assert row.error == '400: {"error":{"message":"starter@v0 cannot do that"}}'


def test_an_adapter_that_vllm_lost_is_503_until_it_is_loaded_again(
    plain_proxy: RunningProxy, fake_vllm: FakeVllm
) -> None:
    fake_vllm.script = lambda handler, _: handler.whole(
        404, b'{"error":{"message":"The model `starter@v0` does not exist."}}'
    )
    response = plain_proxy.chat()
    assert (response.status_code, response.json()["error"]["code"]) == (503, "adapter_loading")
    assert "retry-after" in response.headers


def test_an_engine_that_died_is_503_until_it_runs_again(plain_proxy: RunningProxy, fake_vllm: FakeVllm) -> None:
    dead = b'{"error":{"message":"EngineCore encountered an issue. See stack trace (above).","code":500}}'
    fake_vllm.script = lambda handler, _: handler.whole(500, dead)
    response = plain_proxy.chat()
    assert (response.status_code, response.json()["error"]["code"]) == (503, "upstream_down")
    assert "retry-after" in response.headers
    (row,) = plain_proxy.recorded()
    assert (row.status, row.error) == ("error", f"500: {dead.decode()}")


@pytest.mark.parametrize("body", [b'{"choices":' + b"[" * 5000, b"\xff", b"[]"])
def test_an_answer_that_cannot_be_read_is_503_and_recorded(
    plain_proxy: RunningProxy, fake_vllm: FakeVllm, body: bytes
) -> None:
    fake_vllm.script = lambda handler, _: handler.whole(200, body)
    assert plain_proxy.chat().status_code == 503
    (row,) = plain_proxy.recorded()
    assert row.status == "error"


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


def asked_still(proxy: RunningProxy) -> int:
    """Requests that are kept to be known again while their calls run."""
    return len(proxy.app.tenants["default"].threads._running._by_asked)


def test_a_call_that_cannot_be_told_is_over_all_the_same(
    plain_proxy: RunningProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of its request stays, and what it went on from is free."""
    first = plain_proxy.chat().json()["choices"][0]["message"]
    went_on = STREAM | {"messages": [*STREAM["messages"], first, {"role": "user", "content": "more"}]}  # type: ignore[misc]
    with monkeypatch.context() as patched:
        patched.setattr(ChatStream, "heard", property(lambda _: 1 / 0))
        with contextlib.suppress(httpx.RemoteProtocolError):
            plain_proxy.client.post("/v1/chat/completions", json=went_on)
        wait_for(lambda: not asked_still(plain_proxy), timeout_s=10)
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
    assert not asked_still(proxy)
