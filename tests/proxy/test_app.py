"""The proxy as it runs, before a fake vLLM that can do what the real one cannot be asked for."""

import json
import os
import signal
import socket
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import text

from migrations import schema
from tests.proxy.conftest import (
    ANSWER_IDS,
    LOGPROBS,
    PROMPT_IDS,
    FakeHandler,
    FakeVllm,
    RunningProxy,
    events,
    own_process,
    settings_for,
    wait_for,
)
from whetstone.settings import Settings

JSON = {"Content-Type": "application/json"}
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
        assert any(path.stat().st_size > 100 for path in plain_proxy.journal.iterdir())
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
        app.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
            % len(body)
        )
        app.sendall(body)
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
        app.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
        )
    assert plain_proxy.chat().status_code == 200
    assert len(plain_proxy.recorded()) == 1


# --- what is refused at the door


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"hello", 400, "invalid_json"),
        (b'{"model": "starter", "x": NaN}', 400, "invalid_json"),
        (b"[]", 400, "invalid_json"),
        (b'{"messages": []}', 400, None),
        (b'{"model": "nobody"}', 404, "model_not_found"),
        (b'{"model": "starter@v7"}', 404, "model_not_found"),
        (b'{"model": "starter", "chat_template": "x"}', 400, "refused_field"),
        (b'{"model": "starter", "prompt_logprobs": 1}', 400, "refused_field"),
    ],
)
def test_bad_requests_get_a_clear_error_in_openais_shape(
    door: RunningProxy, body: bytes, status: int, code: str | None
) -> None:
    response = door.client.post("/v1/chat/completions", content=body, headers=JSON)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (status, code)
    assert set(error) == {"message", "type", "code", "param"}
    if status == 404:
        assert "there are: starter, starter@v0" in error["message"]


@pytest.mark.parametrize("headers", [{"X-Trajectory-Id": "a b"}, {"X-Split": "test"}, {"X-Metadata": "{"}])
def test_a_bad_address_is_refused(door: RunningProxy, headers: dict[str, str]) -> None:
    assert door.chat(headers).status_code == 400


@pytest.mark.parametrize(
    "headers",
    [{"Host": "example.com"}, {"Origin": "https://example.com"}, {"Origin": "null"}, {"X-Forwarded-For": "10.0.0.1"}],
)
@pytest.mark.parametrize("path", ["/v1/models", "/healthz", "/v1/chat/completions"])
def test_without_keys_nobody_from_outside_may_ask(door: RunningProxy, headers: dict[str, str], path: str) -> None:
    method = "POST" if path.endswith("completions") else "GET"
    response = door.client.request(method, path, headers=headers)
    assert (response.status_code, response.json()["error"]["code"]) == (403, "forbidden")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/feedback"])
def test_a_body_too_large_is_refused(
    sqlite_url: str, tmp_path: Path, fake_vllm: FakeVllm, start: Callable[[Settings], RunningProxy], path: str
) -> None:
    proxy = start(settings_for(sqlite_url, fake_vllm.url, tmp_path, proxy={"max_body_bytes": 2000}))
    response = proxy.client.post(path, content=b" " * 1_000_000, headers=JSON)
    assert (response.status_code, response.json()["error"]["code"]) == (413, "body_too_large")
    assert "proxy.max_body_bytes" in response.json()["error"]["message"]
    assert proxy.chat().status_code == 200


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/chat/completions"),
        ("POST", "/v1/load_lora_adapter"),
        ("POST", "/v1/unload_lora_adapter"),
        ("POST", "/sleep"),
        ("GET", "/v1/feedback"),
        ("GET", "/docs"),
        ("GET", "/v1/feedback/nobody"),
        ("GET", "/v1/trajectories/nobody"),
        ("GET", "/v1/groups/nobody"),
    ],
)
def test_what_is_not_there_is_404_in_openais_shape(door: RunningProxy, method: str, path: str) -> None:
    response = door.client.request(method, path)
    assert (response.status_code, response.json()["error"]["code"]) == (404, "not_found")


# --- the other routes


def test_models_are_the_policies_and_their_served_versions(proxy: RunningProxy) -> None:
    models = proxy.client.get("/v1/models").json()
    assert models["object"] == "list"
    assert [model["id"] for model in models["data"]] == ["starter", "starter@v0"]


def test_a_version_that_goes_live_speaks_next_and_the_old_one_can_be_named(proxy: RunningProxy) -> None:
    proxy.chat({"X-Trajectory-Id": "t"})
    proxy.recorded()
    version = {"project": "default", "policy": "starter", "state": "live", "served": True}
    row = proxy.rows(schema.policies)[0]
    with proxy.engine.begin() as connection:
        values = version | {"id": "starter@v1", "version": 1, "created_at": row.created_at}
        connection.execute(schema.policy_versions.insert().values(**values))
        connection.execute(schema.policies.update().values(live_version=1))
    wait_for(lambda: proxy.chat({"X-Trajectory-Id": "t"}).headers["x-policy-version"] == "1")
    named = proxy.chat({"X-Trajectory-Id": "t"}, model="starter@v0")
    assert (named.headers["x-policy-version"], named.json()["model"]) == ("0", "starter@v0")
    wait_for(lambda: {row.policy_version for row in proxy.rows()} == {0, 1})
    (trajectory,) = proxy.rows(schema.trajectories)
    assert trajectory.first_version == 0


def test_feedback_is_committed_when_it_is_acknowledged(proxy: RunningProxy) -> None:
    proxy.chat({"X-Trajectory-Id": "t"})
    response = proxy.client.post("/v1/feedback", json={"trajectory_id": "t", "reward": 0.5, "comment": "a\x00b"})
    assert response.status_code == 202
    (row,) = proxy.rows(schema.feedback)
    assert (row.id, row.reward, row.state) == (response.json()["id"], 0.5, "waiting")
    assert proxy.client.get(f"/v1/feedback/{row.id}").json()["state"] == "waiting"
    assert proxy.client.get("/v1/trajectories/t").json()["state"] == "open"


def test_a_batch_of_feedback_is_answered_item_by_item(proxy: RunningProxy) -> None:
    proxy.chat({"X-Trajectory-Id": "t", "X-Group-Id": "g"})
    body = [{"trajectory_id": "t", "thumbs": "up"}, {"group_id": "g", "rewards": {"t": 1}}]
    results = proxy.client.post("/v1/feedback", json=body).json()
    assert [result["id"] for result in results] == [row.id for row in proxy.rows(schema.feedback)]
    group = proxy.client.get("/v1/groups/g").json()
    assert [member["id"] for member in group["members"]] == ["t"]


def test_feedback_with_the_same_key_is_one_feedback(proxy: RunningProxy) -> None:
    body = {"trajectory_id": "t", "reward": 1, "idempotency_key": "k"}
    first, second = (proxy.client.post("/v1/feedback", json=body).json()["id"] for _ in range(2))
    assert first == second
    assert len(proxy.rows(schema.feedback)) == 1


@pytest.mark.parametrize("reward", [b"NaN", b"Infinity", b'"1"', b"null"])
def test_a_reward_that_is_no_number_is_400_and_nothing_is_stored(door: RunningProxy, reward: bytes) -> None:
    response = door.client.post("/v1/feedback", content=b'{"trajectory_id": "t", "reward": %s}' % reward)
    assert response.status_code == 400
    assert door.rows(schema.feedback) == []


def test_readiness_tells_what_is_missing(plain_proxy: RunningProxy) -> None:
    ready = plain_proxy.client.get("/readyz")
    assert (ready.status_code, ready.json()) == (200, {"status": "ok", "vllm": True, "unwritten": 0})


# --- disk and database fail


def test_a_database_that_is_away_refuses_feedback_keeps_calls_and_catches_up(plain_proxy: RunningProxy) -> None:
    assert plain_proxy.chat().status_code == 200
    plain_proxy.recorded()
    with plain_proxy.engine.begin() as connection:
        for table in ("trajectories", "feedback"):
            connection.execute(text(f"ALTER TABLE {table} RENAME TO {table}_away"))
    assert plain_proxy.chat().status_code == 200
    refused = plain_proxy.client.post("/v1/feedback", json={"trajectory_id": "t", "reward": 1})
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "not_recorded")
    assert "retry-after" in refused.headers
    read = plain_proxy.client.get("/v1/feedback/x")
    assert (read.status_code, read.json()["error"]["code"]) == (503, "database_away")
    with plain_proxy.engine.begin() as connection:
        for table in ("trajectories", "feedback"):
            connection.execute(text(f"ALTER TABLE {table}_away RENAME TO {table}"))
    assert len(plain_proxy.recorded(2)) == 2
    assert plain_proxy.client.post("/v1/feedback", json={"trajectory_id": "t", "reward": 1}).status_code == 202


# A file may grow to this size and no further, until SIGUSR1: a full disk for the journal, not for the database.
LIMITED = """
import resource, signal
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
signal.signal(signal.SIGUSR2, lambda *_: resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard)))
signal.signal(signal.SIGUSR1, lambda *_: resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard)))
"""


@pytest.mark.parametrize("stream", [False, True])
def test_a_journal_that_cannot_be_written_is_503_and_works_again(
    sqlite_url: str, tmp_path: Path, fake_vllm: FakeVllm, stream: bool
) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(LIMITED)
    settings = settings_for(sqlite_url, fake_vllm.url, tmp_path)
    path = os.pathsep.join([str(tmp_path / "site"), str(Path.cwd())])
    body = STREAM | {"stream": stream}
    with own_process(settings, PYTHONPATH=path) as (url, process), httpx.Client(base_url=url, trust_env=False) as app:
        process.send_signal(signal.SIGUSR2)
        wait_for(lambda: app.post("/v1/chat/completions", json=STREAM | {"stream": False}).status_code == 503)
        refused = app.post("/v1/chat/completions", json=body)
        if stream:
            assert b"[DONE]" not in refused.content
            assert b'"code":"not_recorded"' in refused.content
        else:
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "not_recorded")
            assert "retry-after" in refused.headers
        process.send_signal(signal.SIGUSR1)
        wait_for(
            lambda: (
                app.post("/v1/chat/completions", json=body | {"user": "after"}).content.endswith(b"\n\n")
                if stream
                else app.post("/v1/chat/completions", json=body | {"user": "after"}).is_success
            )
        )
        assert app.get("/readyz").json()["status"] == "ok"


def test_what_was_answered_survives_kill_9_before_it_is_in_sql(
    database_url: str, tmp_path: Path, fake_vllm: FakeVllm, start: Callable[[Settings], RunningProxy]
) -> None:
    """The database is locked against the writer: the calls are in the journal alone when the process dies."""
    from migrations.database import connect

    settings = settings_for(database_url, fake_vllm.url, tmp_path)
    engine = connect(database_url)
    lock = "LOCK TABLE trajectories IN EXCLUSIVE MODE" if engine.dialect.name == "postgresql" else "SELECT 1"
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    with own_process(settings) as (url, process), httpx.Client(base_url=url, trust_env=False) as app:
        with engine.begin() as connection:
            connection.execute(text(lock))
            for turn in range(3):
                body = STREAM | {"stream": turn == 1, "tools": tools, "user": f"turn {turn}"}
                headers = {"X-Trajectory-Id": "t", "X-Metadata": '{"a": [1.5]}'}
                assert app.post("/v1/chat/completions", json=body, headers=headers).is_success
            process.kill()
            process.wait()
        with engine.connect() as connection:
            assert connection.execute(schema.completions.select()).all() == []
    engine.dispose()
    proxy = start(settings)
    rows = proxy.recorded(3)
    assert [row.end_user for row in sorted(rows, key=lambda row: row.turn)] == ["turn 0", "turn 1", "turn 2"]
    for row in rows:
        assert (row.status, row.token_ids, row.inference_logprobs) == ("complete", ANSWER_IDS, LOGPROBS)
        assert row.tools == tools
    assert proxy.rows(schema.trajectories)[0].metadata == {"a": [1.5]}
    wait_for(lambda: proxy.client.get("/readyz").json()["unwritten"] == 0)


def test_a_journal_that_cannot_be_made_stops_the_start(sqlite_url: str, tmp_path: Path, fake_vllm: FakeVllm) -> None:
    (tmp_path / "journal").touch()
    with own_process(settings_for(sqlite_url, fake_vllm.url, tmp_path)) as (_, process):
        assert process.wait(timeout=20) != 0


def test_the_journal_is_for_its_owner_alone(plain_proxy: RunningProxy) -> None:
    plain_proxy.chat()
    (segment,) = plain_proxy.journal.glob("*.journal")
    assert stat.S_IMODE(segment.stat().st_mode) == 0o600


def test_many_at_once_are_all_answered_and_recorded_once(proxy: RunningProxy) -> None:
    ids: list[str] = []

    def talk(number: int) -> None:
        ids.extend(proxy.chat({"X-Trajectory-Id": f"t{number}"}).headers["x-completion-id"] for _ in range(5))

    threads = [threading.Thread(target=talk, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rows = proxy.recorded(40)
    assert sorted(row.id for row in rows) == sorted(ids)
    assert sorted((row.trajectory_id, row.turn) for row in rows) == [(f"t{n}", k) for n in range(8) for k in range(5)]
