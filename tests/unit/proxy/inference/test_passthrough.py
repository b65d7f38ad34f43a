"""Reads that sample nothing pass, unrecorded; what reaches into vLLM does not."""

import json
from typing import Any

import pytest

from proxy.domain.address import PASSED_THROUGH
from tests.unit.proxy.conftest import FakeHandler, FakeVllm, RunningProxy


@pytest.mark.parametrize("path", sorted(PASSED_THROUGH))
def test_a_read_passes_under_the_apps_name_and_leaves_no_record(
    plain_proxy: RunningProxy, fake_vllm: FakeVllm, path: str
) -> None:
    seen = []

    def script(handler: FakeHandler, body: dict[str, Any]) -> None:
        seen.append((handler.path, body))
        handler.whole(200, b'{"model":"starter@v0","data":["starter@v0",1.50]}')

    fake_vllm.script = script
    response = plain_proxy.client.post(path, json={"model": "starter", "input": "hi", "x": 1})
    assert response.content == b'{"model":"starter","data":["starter@v0",1.50]}'
    assert seen == [(path, {"model": "starter@v0", "input": "hi", "x": 1})]
    plain_proxy.chat()
    fake_vllm.script = FakeHandler.speak
    plain_proxy.chat()
    assert {row.endpoint for row in plain_proxy.recorded(2)} == {"chat.completions"}


def test_its_errors_pass_too(plain_proxy: RunningProxy, fake_vllm: FakeVllm) -> None:
    fake_vllm.script = lambda handler, _: handler.whole(400, b'{"error":{"message":"starter@v0 embeds nothing"}}')
    response = plain_proxy.client.post("/v1/embeddings", json={"model": "starter", "input": "hi"})
    assert (response.status_code, response.json()["error"]["message"]) == (400, "starter embeds nothing")


@pytest.mark.parametrize(
    ("status", "answer", "message"),
    [
        # What vLLM 0.32 answers where its model has no such route.
        (404, b'{"detail":"Not Found"}',
         "the model 'starter' does not take /v1/embeddings: the model server answers {\"detail\":\"Not Found\"}"),
        (422, b'{"detail":"starter@v0"}', 'the model server answers /v1/embeddings with 422: {"detail":"starter"}'),
        (502, b"<html>Bad Gateway</html>",
         "the model server answers /v1/embeddings with 502: <html>Bad Gateway</html>"),
        (500, b"", "the model server answers /v1/embeddings with 500: "),
    ],
)  # fmt: skip
def test_an_error_that_has_not_openais_shape_gets_it(
    plain_proxy: RunningProxy, fake_vllm: FakeVllm, status: int, answer: bytes, message: str
) -> None:
    fake_vllm.script = lambda handler, _: handler.whole(status, answer)
    response = plain_proxy.client.post("/v1/embeddings", json={"model": "starter", "input": "hi"})
    assert (response.status_code, response.headers["content-type"]) == (status, "application/json")
    error = response.json()["error"]
    assert set(error) == {"message", "type", "code", "param"}
    assert error["message"] == message
    assert error["type"] == ("invalid_request_error" if status < 500 else "server_error")


@pytest.mark.parametrize(
    "path",
    ["/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/sleep", "/wake_up", "/reset_prefix_cache", "/pause",
     "/inference/v1/generate", "/v1/chat/completions/render", "/invocations", "/pooling", "/v1/audio/transcriptions",
     "/v1/chat/completions/", "//v1/chat/completions", "/v1/../sleep"],
)  # fmt: skip
@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE"])
def test_nothing_else_of_vllm_can_be_reached(door: RunningProxy, method: str, path: str) -> None:
    response = door.client.request(method, path, content=json.dumps({"model": "starter"}))
    assert (response.status_code, response.json()["error"]["code"]) == (404, "not_found")
