"""What is refused at the door: a clear error, and nothing reaches vLLM or SQL."""

import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from proxy.domain.address import PASSED_THROUGH, RECORDED
from tests.unit.proxy.conftest import (
    FakeVllm,
    RunningProxy,
    settings_for,
)
from whetstone.config.settings import Settings

JSON = {"Content-Type": "application/json"}
MESSAGES = [{"role": "user", "content": "hi"}]
IMAGE = {"type": "image_url", "image_url": {"url": "http://169.254.169.254/latest"}}


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
        (b'{"model": "starter", "n": 257}', 400, None),
        (b'{"model": "starter", "n": "257"}', 400, None),
        (b'{"model": "starter", "n": 1e30}', 400, None),
        (b'{"model": "starter", "best_of": 100, "prompt": ["a", "b", "c"]}', 400, None),
        (b'{"model": "starter", "prompt": [' + b'"a",' * 256 + b'"a"]}', 400, None),
        (b'{"model": "starter", "messages": "\xff"}', 400, "invalid_json"),
        (b'{"model": "starter", "x": ' + b"[" * 200 + b"]" * 200 + b"}", 400, "invalid_json"),
        (b'{"model": "starter", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", 400, "invalid_json"),
    ],
)
@pytest.mark.parametrize("path", sorted(RECORDED | PASSED_THROUGH))
def test_bad_requests_get_a_clear_error_in_openais_shape(
    door: RunningProxy, path: str, body: bytes, status: int, code: str | None
) -> None:
    response = door.client.post(path, content=body, headers=JSON)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (status, code)
    assert set(error) == {"message", "type", "code", "param"}
    if status == 404:
        assert "there are: starter, starter@v0" in error["message"]


@pytest.mark.parametrize("kind", [None, "text/plain", "multipart/form-data; boundary=x", "application/jsonp", ""])
@pytest.mark.parametrize("path", sorted(RECORDED | PASSED_THROUGH))
def test_what_is_not_sent_as_json_is_refused(door: RunningProxy, path: str, kind: str | None) -> None:
    body = json.dumps({"model": "starter", "messages": MESSAGES})
    response = door.client.post(path, content=body, headers=None if kind is None else {"Content-Type": kind})
    assert response.status_code == 400
    assert "application/json" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "values"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [IMAGE]}]}),
        ("/v1/score", {"text_1": "a", "text_2": {"content": [IMAGE]}}),
        ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "file:///etc"}]}]}),
        ("/v1/messages", {"messages": [{"role": "user", "content": [
            {"type": "tool_result", "content": [{"type": "image", "source": {"type": "url", "url": "ftp://x/y"}}]}]}]}),
    ],
)  # fmt: skip
def test_media_that_the_server_would_have_to_fetch_is_refused(
    door: RunningProxy, path: str, values: dict[str, Any]
) -> None:
    response = door.client.post(path, json={"model": "starter"} | values)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "refused_field")
    assert "proxy.media_domains" in response.json()["error"]["message"]


def test_media_cannot_hide_behind_an_escape(door: RunningProxy) -> None:
    image = b'{"type": "image_\\u0075rl", "image_\\u0075rl": {"\\u0075rl": "http://169.254.169.254/"}}'
    body = b'{"model": "starter", "messages": [{"role": "user", "content": [' + image + b"]}]}"
    response = door.client.post("/v1/chat/completions", content=body, headers=JSON)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "refused_field")


def test_media_inside_the_request_or_of_an_allowed_domain_passes(
    sqlite_url: str, tmp_path: Path, fake_vllm: FakeVllm, start: Callable[[Settings], RunningProxy]
) -> None:
    proxy = start(settings_for(sqlite_url, fake_vllm.url, tmp_path, proxy={"media_domains": ("cdn.example",)}))
    for url, status in (("data:image/png;base64,AA==", 200), ("https://cdn.example/x.png", 200), ("https://x/y", 400)):
        image = {"type": "image_url", "image_url": {"url": url}}
        assert proxy.chat(messages=[{"role": "user", "content": [image]}]).status_code == status


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/feedback"])
def test_a_sender_that_is_too_slow_is_told_so_and_let_go(
    sqlite_url: str, tmp_path: Path, fake_vllm: FakeVllm, start: Callable[[Settings], RunningProxy], path: str
) -> None:
    proxy = start(settings_for(sqlite_url, fake_vllm.url, tmp_path, proxy={"body_timeout_s": 0.2}))
    with socket.create_connection(("127.0.0.1", int(proxy.url.rsplit(":", 1)[1]))) as app:
        app.settimeout(20)
        head = (
            f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{{"
        )
        app.sendall(head.encode())
        heard = b"".join(iter(lambda: app.recv(65536), b""))
    assert heard.startswith(b"HTTP/1.1 408")
    assert b"proxy.body_timeout_s" in heard
    assert proxy.chat().status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"X-Trajectory-Id": "a b"},
        {"X-Group-Id": "x" * 129},
        {"X-Turn-Id": "é".encode()},
        {"X-Turn-Id": "1"},
        {"X-Metadata": '{"a": ' + "[" * 200 + "]" * 200 + "}"},
        {"X-Split": "test"},
        {"X-Metadata": "{"},
        {"X-Metadata": "[" * 5000},
        {"Idempotency-Key": ""},
    ],
)
def test_a_bad_address_is_refused(door: RunningProxy, headers: dict[str, Any]) -> None:
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
        ("POST", "/v1/load_lora_adapter"),
        ("POST", "/v1/unload_lora_adapter"),
        ("POST", "/sleep"),
        ("GET", "/docs"),
        ("GET", "/v1/feedback/nobody"),
        ("GET", "/v1/trajectories/nobody"),
        ("GET", "/v1/groups/nobody"),
    ],
)
def test_what_is_not_there_is_404_in_openais_shape(door: RunningProxy, method: str, path: str) -> None:
    response = door.client.request(method, path)
    assert (response.status_code, response.json()["error"]["code"]) == (404, "not_found")


@pytest.mark.parametrize(
    ("method", "path", "remedy"),
    [
        ("POST", "/chat/completions", "did you leave /v1 out of the base URL?"),
        ("POST", "/completions", "did you leave /v1 out of the base URL?"),
        ("POST", "/responses", "did you leave /v1 out of the base URL?"),
        ("POST", "/messages", "did you leave /v1 out of the base URL?"),
        ("POST", "/embeddings", "did you leave /v1 out of the base URL?"),
        ("GET", "/models", "did you leave /v1 out of the base URL?"),
        ("GET", "/models/starter", "did you leave /v1 out of the base URL?"),
        ("POST", "/feedback", "did you leave /v1 out of the base URL?"),
        ("GET", "/trajectories/t", "did you leave /v1 out of the base URL?"),
        ("POST", "/groups/g/close", "did you leave /v1 out of the base URL?"),
        ("POST", "/v1/v1/messages", "is there one /v1 too many in the base URL?"),
    ],
)
def test_a_path_that_lacks_v1_or_has_it_twice_is_told_so(
    door: RunningProxy, method: str, path: str, remedy: str
) -> None:
    response = door.client.request(method, path)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (404, "not_found")
    assert error["message"] == f"no {method} {path} here; {remedy}"


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/v1/chat/completions", "POST"),
        ("DELETE", "/v1/embeddings", "POST"),
        ("PUT", "/tokenize", "POST"),
        ("POST", "/v1/models", "GET"),
        ("GET", "/v1/feedback", "POST"),
        ("PUT", "/v1/feedback/f", "DELETE, GET"),
        ("DELETE", "/v1/trajectories/t", "GET"),
        ("GET", "/admin/policies/starter/step", "POST"),
        ("PUT", "/admin/keys", "GET, POST"),
        ("POST", "/healthz", "GET"),
        ("HEAD", "/healthz", "GET"),
        ("OPTIONS", "/v1/chat/completions", "POST"),
    ],
)
def test_a_wrong_method_is_405_and_says_which_are_right(
    door: RunningProxy, method: str, path: str, allowed: str
) -> None:
    response = door.client.request(method, path)
    assert (response.status_code, response.headers["allow"]) == (405, allowed)
    if method != "HEAD":
        error = response.json()["error"]
        assert set(error) == {"message", "type", "code", "param"}
        assert (error["type"], error["code"]) == ("invalid_request_error", "method_not_supported")
        assert error["message"].startswith(f"no {method} {path} here; this path takes ")
