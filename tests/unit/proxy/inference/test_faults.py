"""What the app gets and the record says where vLLM fails: before, within and after its answer."""

import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.unit.proxy.conftest import (
    ANSWER_IDS,
    LOGPROBS,
    STREAM,
    FakeHandler,
    FakeVllm,
    RunningProxy,
    events,
    settings_for,
)
from whetstone.config.settings import Settings


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


@pytest.mark.parametrize(
    ("script", "why"),
    [(_in_the_middle, "does not answer"), (_without_done, "broke its stream off"), (_rubbish_later, "cannot be read")],
)
def test_vllm_gone_within_a_stream_breaks_it_off_and_keeps_the_tokens(
    proxy: RunningProxy, fake_vllm: FakeVllm, script: Any, why: str
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
    assert (row.status, row.why_not_trained, why in row.error) == ("error", "error", True)
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
