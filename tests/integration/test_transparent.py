"""The same request through the proxy and straight to a real vLLM: the app must not be able to tell them apart."""

import asyncio
import json
import math
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.unit.proxy.both import Both
from tests.unit.proxy.conftest import RunningProxy, wait_for

pytestmark = pytest.mark.stack

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "system", "content": "You play tic-tac-toe."}, {"role": "user", "content": "Hello there!"}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "move",
            "description": "Take a cell",
            "parameters": {"type": "object", "properties": {"cell": {"type": "integer"}}, "required": ["cell"]},
        },
    }
]
TOOL_TURN = [
    *MESSAGES,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "call-1", "type": "function", "function": {"name": "move", "arguments": '{"cell": 4}'}}],
    },
    {"role": "tool", "tool_call_id": "call-1", "content": "X..\n.O.\n..."},
]
USAGE = {"stream_options": {"include_usage": True}}

VALID: dict[str, dict[str, Any]] = {
    "plain": {},
    "logprobs": {"logprobs": True},
    "top_logprobs": {"logprobs": True, "top_logprobs": 3},
    "no top_logprobs": {"logprobs": True, "top_logprobs": 0},
    "logprobs false": {"logprobs": False},
    "logprobs null": {"logprobs": None, "top_logprobs": None},
    "logprobs 1": {"logprobs": 1},
    "token ids": {"return_token_ids": True},
    "token ids and logprobs": {"return_token_ids": True, "logprobs": True, "top_logprobs": 1},
    "token ids false": {"return_token_ids": False},
    "tokens as ids": {"logprobs": True, "return_tokens_as_token_ids": True},
    "tools": {"tools": TOOLS},
    "tools and logprobs": {"tools": TOOLS, "logprobs": True},
    "no tool": {"tools": TOOLS, "tool_choice": "none"},
    "tool result": {"tools": TOOLS, "messages": TOOL_TURN},
    "named tool": {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "move"}}},
    "stop": {"stop": ["o", "e"], "max_tokens": 24},
    "stop included": {"stop": "o", "include_stop_str_in_output": True},
    "one token": {"max_tokens": 1},
    "max_completion_tokens": {"max_tokens": None, "max_completion_tokens": 3},
    "sampled by seed": {"temperature": 1, "seed": 7},
    "hot and cut": {"temperature": 1.5, "seed": 3, "top_p": 0.9, "top_k": 20},
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1},
    "three choices": {"n": 3, "temperature": 1, "seed": 5},
    "three choices and logprobs": {"n": 3, "temperature": 1, "seed": 5, "logprobs": True, "top_logprobs": 2},
    "reasoning hidden": {"include_reasoning": False, "logprobs": True, "return_token_ids": True},
    "min tokens": {"min_tokens": 5, "ignore_eos": True},
    "json": {"response_format": {"type": "json_object"}, "max_tokens": 6},
    "user and metadata": {"user": "u", "metadata": {"a": "b"}},
    "unknown field": {"unknown_field": [1]},
    "content parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]},
}
STREAMED = VALID | {
    "usage": USAGE,
    "usage and logprobs": USAGE | {"logprobs": True},
    "running usage": {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    "running usage with tools": {
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "tools": TOOLS,
    },
    "usage of three": USAGE | {"n": 3, "temperature": 1, "seed": 5},
}
INVALID: dict[str, dict[str, Any]] = {
    "cold": {"temperature": -1},
    "too many tokens": {"max_tokens": 100_000},
    "no messages": {"messages": []},
    "messages of text": {"messages": "hi"},
    "no role": {"messages": [{"content": "hi"}]},
    "top_logprobs alone": {"top_logprobs": 2},
    "top_logprobs of all alone": {"top_logprobs": -1},
    "top_logprobs of text": {"top_logprobs": "two"},
    "top_logprobs below": {"logprobs": True, "top_logprobs": -2},
    "too many top_logprobs": {"logprobs": True, "top_logprobs": 1000},
    "logprobs of text": {"logprobs": "maybe"},
    "logprobs 5": {"logprobs": 5},
    "chosen ids alone": {"logprob_token_ids": [1]},
    "token ids of text": {"return_token_ids": "maybe"},
    "reasoning null": {"include_reasoning": None},
    "no choice": {"n": 0},
    "empty tools": {"tools": []},
    "tool_choice without tools": {"tool_choice": "required"},
    "top_p": {"top_p": 2},
    "options without stream": {"stream_options": {"include_usage": True}},
}


@pytest.fixture(scope="module")
def both(real: RunningProxy, vllm_url: str) -> Iterator[Both]:
    both = Both(real, vllm_url)
    yield both
    both.close()


@pytest.fixture(scope="module")
def direct(vllm_url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=vllm_url, timeout=120, trust_env=False, verify=False) as client:
        yield client


def body_of(values: dict[str, Any]) -> dict[str, Any]:
    body = {"model": "starter", "messages": MESSAGES, "max_tokens": 8, "temperature": 0} | values
    return {key: value for key, value in body.items() if not (key == "max_tokens" and value is None)}


def events_of(response: httpx.Response) -> list[Any]:
    """A stream's events, decoded, `[DONE]` as it is."""
    *events, rest = response.text.split("\n\n")
    assert rest == ""
    data = [event.removeprefix("data: ") for event in events]
    return [piece if piece == "[DONE]" else json.loads(piece) for piece in data]


def check_record(real: RunningProxy, response: httpx.Response, captured: bool) -> list[Any]:
    """Every choice is recorded with its ids and logprobs, and the version that answered."""
    call_id = response.headers["x-completion-id"]
    rows = wait_for(lambda: real.rows(call_id=call_id))
    for row in rows:
        assert (row.status, row.policy_version, row.upstream_id) == ("complete", 0, f"chatcmpl-{call_id}")
        if captured:
            assert row.prompt_tokens == len(row.prompt_token_ids) > 0
            assert row.completion_tokens == len(row.token_ids) == len(row.inference_logprobs) > 0
            assert all(math.isfinite(logprob) and logprob <= 0 for logprob in row.inference_logprobs)
            assert row.why_not_trained not in ("no_token_ids", "no_logprobs")
    return rows


@pytest.mark.parametrize("name", VALID)
def test_a_plain_answer_is_that_of_vllm_alone(both: Both, name: str) -> None:
    response = both.ask(CHAT, body_of(VALID[name]))
    body = response.json()
    rows = check_record(both.proxy, response, captured=name != "logprobs 1")
    assert body["model"] == "starter"
    assert body["id"] == rows[0].upstream_id
    assert [choice["message"]["content"] for choice in body["choices"]] == [row.response_text for row in rows]
    assert [choice["finish_reason"] for choice in body["choices"]] == [row.finish_reason for row in rows]
    assert body["usage"]["prompt_tokens"] == rows[0].prompt_tokens
    if name != "logprobs 1":
        assert body["usage"]["completion_tokens"] == sum(row.completion_tokens for row in rows)


@pytest.mark.parametrize("name", STREAMED)
def test_a_stream_is_that_of_vllm_alone(both: Both, name: str) -> None:
    response = both.ask(CHAT, body_of(STREAMED[name] | {"stream": True}))
    *events, done = events_of(response)
    rows = check_record(both.proxy, response, captured=name != "logprobs 1")
    assert done == "[DONE]"
    assert {event["model"] for event in events} == {"starter"}
    assert {event["id"] for event in events} == {rows[0].upstream_id}
    for row in rows:
        choices = [choice for event in events for choice in event["choices"] if choice["index"] == row.choice]
        assert "".join(choice["delta"].get("content") or "" for choice in choices) == (row.response_text or "")
        assert choices[-1]["finish_reason"] == row.finish_reason
    usage = events[-1].get("usage")
    if usage and not events[-1]["choices"]:
        assert usage["completion_tokens"] == sum(row.completion_tokens for row in rows)
        assert usage["prompt_tokens"] == rows[0].prompt_tokens


@pytest.mark.parametrize(
    ("name", "stream"),
    [
        (name, stream)
        for name in INVALID
        for stream in (False, True)
        if not (stream and "stream_options" in INVALID[name])
    ],
)
def test_an_error_is_that_of_vllm_alone(both: Both, name: str, stream: bool) -> None:
    response = both.ask(CHAT, body_of(INVALID[name] | ({"stream": True} if stream else {})))
    # What vLLM finds out late it says within the stream.
    assert response.status_code == 400 or '{"error":' in response.text


def test_plain_and_stream_record_the_same(real: RunningProxy) -> None:
    body = body_of({"temperature": 1, "seed": 11, "max_tokens": 16})
    responses = [real.client.post("/v1/chat/completions", json=body | {"stream": stream}) for stream in (False, True)]
    (plain,), (streamed,) = (check_record(real, response, captured=True) for response in responses)
    assert plain.token_ids == streamed.token_ids
    assert plain.inference_logprobs == pytest.approx(streamed.inference_logprobs, abs=1e-4)
    assert (plain.response, plain.finish_reason) == (streamed.response, streamed.finish_reason)


def test_a_conversation_is_stored_once_and_its_ids_are_exact(real: RunningProxy, direct: httpx.Client) -> None:
    """Each turn extends the one before, token for token; what is stored adds up to the prompt that vLLM gets."""
    messages: list[Any] = [MESSAGES[0]]
    whole: list[int] = []
    for turn in range(4):
        messages.append({"role": "user", "content": f"board {turn}"})
        body = body_of({"messages": messages, "temperature": 1, "seed": turn})
        response = real.client.post("/v1/chat/completions", json=body, headers={"X-Trajectory-Id": "talk"})
        (row,) = check_record(real, response, captured=False)
        whole += row.prompt_token_ids
        alone = direct.post("/v1/chat/completions", json=body | {"model": "starter@v0", "return_token_ids": True})
        assert whole == alone.json()["prompt_token_ids"]
        assert row.turn == turn
        assert (row.follows is None) == (turn == 0)
        assert row.new_messages == messages[-1:] if turn else messages
        assert row.prompt_tokens == len(whole)
        whole += row.token_ids
        messages.append({"role": "assistant", "content": response.json()["choices"][0]["message"]["content"]})


def test_a_disconnect_stops_the_generation_and_keeps_the_tokens_so_far(real: RunningProxy) -> None:
    body = body_of({"stream": True, "max_tokens": 1500, "ignore_eos": True, "temperature": 1})
    for _ in range(5):
        with real.client.stream("POST", "/v1/chat/completions", json=body) as response:
            call_id = response.headers["x-completion-id"]
            lines = response.iter_lines()
            received = [next(lines) for _ in range(8)]
        (row,) = wait_for(lambda call_id=call_id: real.rows(call_id=call_id))
        # On a busy machine the answer may be complete before the proxy notices that the app left.
        if row.status == "aborted":
            break
    assert row.status == "aborted"
    assert sum(line.startswith("data:") for line in received) - 1 <= len(row.token_ids) < 1500
    assert len(row.token_ids) == len(row.inference_logprobs)


def test_the_stock_client_needs_nothing_but_a_base_url(real: RunningProxy) -> None:
    with openai.OpenAI(base_url=real.url + "/v1", api_key="none") as client:
        assert [model.id for model in client.models.list()] == ["starter", "starter@v0"]
        whole = client.chat.completions.create(
            model="starter", messages=MESSAGES, max_tokens=8, temperature=0, logprobs=True, top_logprobs=2
        )
        assert whole.choices[0].logprobs is not None
        with client.chat.completions.create(
            model="starter", messages=MESSAGES, max_tokens=8, temperature=0, stream=True
        ) as events:
            text = "".join(event.choices[0].delta.content or "" for event in events)
        assert text == whole.choices[0].message.content
        with pytest.raises(openai.NotFoundError, match="starter@v0"):
            client.chat.completions.create(model="gpt-4o", messages=MESSAGES)
        with pytest.raises(openai.BadRequestError, match="'priority' is a field of the server"):
            client.chat.completions.create(model="starter", messages=MESSAGES, extra_body={"priority": 1})
        raw = client.chat.completions.with_raw_response.create(
            model="starter", messages=MESSAGES, max_tokens=2, extra_headers={"X-Trajectory-Id": "stock"}
        )
        assert raw.headers["x-trajectory-id"] == "stock"
        assert raw.parse().id == f"chatcmpl-{raw.headers['x-completion-id']}"


def test_the_stock_asynchronous_client_too(real: RunningProxy) -> None:
    async def main() -> None:
        async with openai.AsyncOpenAI(base_url=real.url + "/v1", api_key="none") as client:
            answers = await asyncio.gather(
                *(
                    client.chat.completions.create(model="starter", messages=MESSAGES, max_tokens=4, seed=seed)
                    for seed in range(16)
                )
            )
            assert len({answer.id for answer in answers}) == 16
            events = await client.chat.completions.create(
                model="starter", messages=MESSAGES, max_tokens=4, stream=True, stream_options={"include_usage": True}
            )
            received = [event async for event in events]
            assert received[-1].usage is not None
            feedback = await client.post(
                "/feedback", body={"completion_id": received[0].id, "reward": 1}, cast_to=object
            )
            assert feedback["state"] == "waiting"  # type: ignore[index]

    asyncio.run(main())
