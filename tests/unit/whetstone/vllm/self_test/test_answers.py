"""Chat answers as vLLM 0.32 writes them, read."""

import json
import math
from typing import Any

import pytest

from whetstone.vllm.self_test.answers import Function, ToolCall, read

PLAIN = """
{"id":"chatcmpl-95","object":"chat.completion","created":1795279114,"model":"starter@v0","choices":[{"index":0,
"message":{"role":"assistant","content":null,"refusal":null,"annotations":null,"audio":null,"function_call":null,
"reasoning":"Hello"},"logprobs":{"content":[{"token":"token_id:470","logprob":-0.001,"bytes":[72],
"top_logprobs":[{"token":"token_id:470","logprob":-0.001,"bytes":[116]},{"token":"token_id:307","logprob":-8.6,
"bytes":[116]}]},{"token":"token_id:2","logprob":-0.0002,"bytes":[60],"top_logprobs":[{"token":"token_id:2",
"logprob":-0.0002,"bytes":[116]}]}]},"finish_reason":"stop","stop_reason":null,"token_ids":[470,2],
"routed_experts":null}],"system_fingerprint":"vllm-0.32.0","usage":{"prompt_tokens":3,"total_tokens":5,
"completion_tokens":2,"prompt_tokens_details":null},"prompt_logprobs":null,"prompt_token_ids":[1,269,201],
"prompt_text":null,"kv_transfer_params":null}
"""
STREAM = """
{"id":"c","choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}],\
"prompt_token_ids":[1,269,201],"prompt_text":null}
{"id":"c","choices":[{"index":0,"delta":{"content":"Hel"},"logprobs":{"content":[{"token":"Hel","logprob":-0.5,\
"bytes":[72],"top_logprobs":[]}]},"finish_reason":null,"token_ids":[470]}]}
{"id":"c","choices":[{"index":0,"delta":{"content":"lo"},"logprobs":{"content":[{"token":"lo","logprob":-1,\
"bytes":[72],"top_logprobs":[]}]},"finish_reason":null,"token_ids":[471]}]}
{"id":"c","choices":[{"index":0,"delta":{},"logprobs":{"content":[{"token":"","logprob":-2.5,"bytes":[60],\
"top_logprobs":[]}]},"finish_reason":"stop","stop_reason":null,"token_ids":[2]}]}
{"id":"c","choices":[],"usage":{"prompt_tokens":3,"total_tokens":6,"completion_tokens":3}}
"""


def test_a_plain_answer_is_read() -> None:
    answer = read([json.loads(PLAIN)])
    assert (answer.prompt_token_ids, answer.token_ids) == ([1, 269, 201], [470, 2])
    assert answer.logprobs == [-0.001, -0.0002]
    assert answer.top == {"token_id:470": -0.001, "token_id:307": -8.6}
    assert (answer.prompt_tokens, answer.completion_tokens) == (3, 2)
    assert (answer.content, answer.reasoning, answer.tool_calls) == ("", "Hello", [])
    assert answer.finish_reason == "stop"


def test_a_stream_is_read_as_one_answer() -> None:
    answer = read([json.loads(line) for line in STREAM.strip().splitlines()])
    assert (answer.prompt_token_ids, answer.token_ids) == ([1, 269, 201], [470, 471, 2])
    assert answer.logprobs == [-0.5, -1.0, -2.5]
    assert (answer.prompt_tokens, answer.completion_tokens) == (3, 3)
    assert (answer.content, answer.finish_reason) == ("Hello", "stop")


def test_tool_calls_are_read_as_apps_see_them() -> None:
    call = {"id": "call-1", "type": "function", "function": {"name": "look_up", "arguments": "{}"}}
    answer = read([{"choices": [{"message": {"content": None, "tool_calls": [call]}}]}])
    assert answer.tool_calls == [ToolCall("call-1", Function("look_up", "{}"))]


def test_what_is_missing_stays_missing() -> None:
    answer = read([{"choices": [{"message": {"content": "Hello"}, "logprobs": None}]}])
    assert (answer.prompt_token_ids, answer.token_ids, answer.logprobs, answer.top) == ([], [], [], {})
    assert (answer.prompt_tokens, answer.completion_tokens, answer.finish_reason) == (0, 0, None)


def test_a_null_logprob_is_no_number_and_no_zero() -> None:
    (logprob,) = read([{"choices": [{"logprobs": {"content": [{"logprob": None}]}}]}]).logprobs
    assert math.isnan(logprob)


@pytest.mark.parametrize(
    "part", [None, [], "hello", {}, {"choices": None}, {"choices": [{"token_ids": ["470"]}]}, {"error": {"code": 500}}]
)
def test_what_is_no_answer_is_refused(part: Any) -> None:
    with pytest.raises(ValueError):
        read([part])
