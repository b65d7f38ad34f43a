"""What an app may ask for: aliases, several policies, models of other servers."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from migrations import schema
from tests.unit.proxy.conftest import FakeHandler, FakeVllm, RunningProxy, chunk, own_process, settings_for
from whetstone.config.settings import Settings

KEY = "sk-of-the-teacher"


@pytest.fixture
def teacher() -> Iterator[FakeVllm]:
    """Another OpenAI-compatible server; it tells no ids."""
    fake = FakeVllm(base_names=["gpt-9"])

    def script(handler: FakeHandler, body: dict[str, Any]) -> None:
        if body.get("stream"):
            handler.begin()
            handler.say(chunk({"role": "assistant", "content": "Hi"}).replace(b"starter@v0", b"gpt-9"))
            handler.say(b"data: [DONE]\r\n\r\n")
            handler.end()
        else:
            message = {"index": 0, "message": {"role": "assistant", "content": "Hi"}, "finish_reason": "stop"}
            handler.whole(200, json.dumps({"id": "x-1", "model": "gpt-9", "choices": [message]}).encode())

    fake.script = script
    yield fake
    fake.close()


@pytest.fixture
def many(
    database_url: str,
    fake_vllm: FakeVllm,
    teacher: FakeVllm,
    tmp_path: Path,
    start: Callable[[Settings], RunningProxy],
    monkeypatch: pytest.MonkeyPatch,
) -> RunningProxy:
    """A proxy with two policies, an alias each, and a teacher."""
    monkeypatch.setenv("TEACHER_KEY", KEY)
    server = {"url": teacher.url + "/v1", "api_key_env": "TEACHER_KEY", "models": {"teacher": "gpt-9"}}
    settings = settings_for(
        database_url,
        fake_vllm.url,
        tmp_path,
        policies=("second",),
        aliases={"gpt-4o": "starter", "gpt-4o-mini": "second", "gpt-5": "teacher"},
        upstreams={"elsewhere": server},
        vllm={"max_loras": 8},
    )
    return start(settings)


def test_an_alias_is_answered_under_its_own_name(many: RunningProxy, fake_vllm: FakeVllm) -> None:
    plain, stream = many.chat(model="gpt-4o"), many.chat(model="gpt-4o-mini", stream=True)
    assert plain.json()["model"] == "gpt-4o"
    assert stream.text.count('"model":"gpt-4o-mini"') == 4
    assert "@v0" not in plain.text + stream.text
    assert [request["model"] for request in fake_vllm.requests] == ["starter@v0", "second@v0"]
    assert [row.policy for row in many.recorded(2)] == ["starter", "second"]


def test_models_lists_every_name(many: RunningProxy) -> None:
    names = [model["id"] for model in many.client.get("/v1/models").json()["data"]]
    assert names == ["second", "gpt-4o-mini", "second@v0", "starter", "gpt-4o", "starter@v0", "teacher", "gpt-5"]
    assert many.client.get("/v1/models/gpt-4o").json()["id"] == "gpt-4o"
    assert many.client.get("/v1/models/gpt-4o@v0").json()["id"] == "gpt-4o@v0"
    assert many.client.get("/v1/models/nobody").status_code == 404


@pytest.mark.parametrize("stream", [False, True])
def test_another_server_gets_the_request_as_it_came_and_our_key(
    many: RunningProxy, teacher: FakeVllm, stream: bool
) -> None:
    headers = {"Authorization": "Bearer the-apps-own", "X-Group-Id": "g"}
    response = many.chat(headers, model="gpt-5", stream=stream, temperature=0.5)
    assert response.status_code == 200
    assert "gpt-9" not in response.text
    assert '"gpt-5"' in response.text
    messages = [{"role": "user", "content": "hi"}]
    assert teacher.requests == [{"model": "gpt-9", "messages": messages, "stream": stream, "temperature": 0.5}]
    (sent,) = teacher.headers
    assert sent["authorization"] == f"Bearer {KEY}"
    assert "the-apps-own" not in str(sent)
    (row,) = many.recorded()
    assert (row.policy, row.response_text, row.why_not_trained) == ("teacher", "Hi", "demonstration")
    assert (row.token_ids, row.inference_logprobs) == (None, None)


def test_a_key_that_another_server_refuses_is_our_fault_not_the_apps(many: RunningProxy, teacher: FakeVllm) -> None:
    teacher.script = lambda handler, _: handler.whole(401, b'{"error": {"message": "bad key sk-of"}}')
    response = many.chat(model="teacher")
    assert (response.status_code, response.json()["error"]["code"]) == (502, "upstream_refused")
    assert "upstreams.elsewhere.api_key_env" in response.json()["error"]["message"]
    assert [row.status for row in many.recorded()] == ["error"]


def test_a_redirect_of_another_server_is_not_followed(many: RunningProxy, teacher: FakeVllm) -> None:
    def script(handler: FakeHandler, _body: Any) -> None:
        handler.send_response(307)
        handler.send_header("location", "/elsewhere")
        handler.send_header("content-length", "0")
        handler.end_headers()

    teacher.script = script
    assert many.chat(model="teacher").status_code == 307
    assert len(teacher.requests) == 1


def test_when_to_come_back_is_passed_on(many: RunningProxy, teacher: FakeVllm) -> None:
    def script(handler: FakeHandler, _body: Any) -> None:
        handler.send_response(429)
        handler.send_header("retry-after", "7")
        handler.send_header("content-length", "2")
        handler.end_headers()
        handler.wfile.write(b"{}")

    teacher.script = script
    response = many.chat(model="teacher")
    assert (response.status_code, response.headers["retry-after"]) == (429, "7")


def test_messages_for_another_server_pass_with_their_version(many: RunningProxy, teacher: FakeVllm) -> None:
    said = {"id": "msg_1", "type": "message", "model": "gpt-9", "content": [{"type": "text", "text": "Hi"}]}
    teacher.script = lambda handler, _: handler.whole(200, json.dumps(said).encode())
    response = many.client.post(
        "/v1/messages",
        json={"model": "gpt-5", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]},
        headers={"anthropic-version": "2023-06-01", "x-api-key": "the-apps-own"},
    )
    assert response.json() == said | {"model": "gpt-5"}
    (sent,) = teacher.headers
    assert (sent["anthropic-version"], sent["x-api-key"]) == ("2023-06-01", KEY)
    (row,) = many.recorded()
    assert (row.endpoint, row.response_text, row.upstream_id) == ("messages", "Hi", "msg_1")


def test_a_key_that_is_missing_stops_the_start(many: RunningProxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TEACHER_KEY")
    with own_process(many.settings) as (_, process):
        assert process.wait(timeout=20) != 0


def test_what_the_settings_no_longer_name_is_no_longer_there(many: RunningProxy, start: Any) -> None:
    alone = start(many.settings.model_copy(update={"policies": (), "upstreams": {}, "aliases": {}}))
    assert {model["id"] for model in alone.client.get("/v1/models").json()["data"]} == {
        "starter", "gpt-4o", "starter@v0"
    }  # fmt: skip
    assert len(many.rows(schema.policies)) == 3
