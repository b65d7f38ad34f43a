import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.wire.chat.request import ChatRequest
from proxy.wire.chat.stream import ChatStream
from proxy.wire.decoding import DONE_EVENT
from proxy.wire.interfaces import UNREADABLE
from proxy.wire.request_body import read_body
from tests.unit.proxy.conftest import ANSWER_IDS, LOGPROBS, PROMPT_IDS, chunk, events, logprobs_of

USAGE = {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}


def stream(**options: Any) -> ChatStream:
    body = read_body(json.dumps({"model": "starter", "stream": True} | options).encode())
    return ChatRequest(body).new_stream()


def seen(data: bytes) -> list[dict[str, Any]]:
    return [json.loads(event.removeprefix(b"data: ")) for event in data.split(b"\n\n") if event]


def deltas(data: bytes) -> list[Any]:
    return [event["choices"][0]["delta"] for event in seen(data)]


def test_a_stream_is_captured_whole() -> None:
    reader = stream()
    reader.feed(b"".join(events()))
    (choice,) = reader.results[0].choices
    assert reader.done
    assert reader.error is None
    assert reader.results[0].prompt_token_ids == PROMPT_IDS
    assert (choice.token_ids, choice.logprobs) == (ANSWER_IDS, LOGPROBS)
    assert (choice.text, choice.finish_reason) == ("Hello", "stop")
    assert choice.message == {"role": "assistant", "content": "Hello"}


def test_done_is_held_back_until_the_call_is_recorded() -> None:
    reader = stream()
    assert b"[DONE]" not in reader.feed(b"".join(events()))
    assert reader.done
    assert DONE_EVENT == b"data: [DONE]\n\n"


def test_bytes_may_be_split_anywhere() -> None:
    data = b"".join(
        [*events()[:2], chunk({"content": "ü€🙂"}, token_ids=[5], logprobs=logprobs_of(-1.0)), *events()[2:]]
    )
    whole = stream()
    expected = whole.feed(data)
    for cut in range(len(data) + 1):
        parts = stream()
        assert parts.feed(data[:cut]) + parts.feed(data[cut:]) == expected
        assert parts.results[0].choices == whole.results[0].choices
        assert parts.done


@given(st.lists(st.integers(1, 40), max_size=80))
def test_bytes_may_come_in_any_pieces(sizes: list[int]) -> None:
    data = b"".join(events())
    parts, out, start = stream(), b"", 0
    for size in [*sizes, len(data)]:
        out += parts.feed(data[start : start + size])
        start += size
    whole = stream()
    assert out == whole.feed(data)
    assert parts.results[0].choices == whole.results[0].choices


def test_the_app_gets_nothing_that_it_did_not_ask_for() -> None:
    first, *rest = seen(stream().feed(b"".join(events())))
    assert first["prompt_token_ids"] is None
    assert [event["choices"][0]["delta"]["content"] for event in rest] == ["Hel", "lo", ""]
    for event in rest:
        assert event["model"] == "starter"
        assert (event["choices"][0]["logprobs"], event["choices"][0]["token_ids"]) == (None, None)


def test_the_app_gets_all_that_it_asked_for() -> None:
    out = seen(stream(logprobs=True, return_token_ids=True).feed(b"".join(events())))
    assert out == [event | {"model": "starter"} for event in seen(b"".join(events()[:-1]))]


def test_an_event_that_exists_only_because_of_capture_is_dropped() -> None:
    reader = stream()
    silent = chunk({}, token_ids=[4], logprobs=logprobs_of(-2.0))
    assert reader.feed(silent) == b""
    assert reader.feed(chunk(None, usage=USAGE)) != b""
    assert reader.results[0].choices[0].token_ids == [4]


@pytest.mark.parametrize("options", [{"logprobs": True}, {"return_token_ids": True}])
def test_the_same_event_stays_for_an_app_that_asked(options: dict[str, Any]) -> None:
    assert stream(**options).feed(chunk({}, token_ids=[4], logprobs=logprobs_of(-2.0))) != b""


@pytest.mark.parametrize(
    ("delta", "values"), [({"content": ""}, {}), ({}, {"finish_reason": "stop"}), ({"tool_calls": []}, {})]
)
def test_an_event_that_vllm_alone_would_send_stays(delta: dict[str, Any], values: dict[str, Any]) -> None:
    assert deltas(stream().feed(chunk(delta, token_ids=[4], logprobs=logprobs_of(-2.0), **values))) == [delta]


def test_running_usage_keeps_no_event_that_capture_made() -> None:
    options = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    assert stream(**options).feed(chunk({}, token_ids=[4], logprobs=logprobs_of(-2.0), usage=USAGE)) == b""


def test_usage_is_read_and_passed_on() -> None:
    reader = stream(stream_options={"include_usage": True})
    assert seen(reader.feed(chunk(None, usage=USAGE)))[0]["usage"] == USAGE
    assert reader.results[0].prompt_tokens == 3


def test_choices_are_told_apart() -> None:
    reader = stream(n=2)
    for index, text in [(1, "b"), (0, "a"), (1, "B"), (0, "A")]:
        reader.feed(chunk({"content": text}, index=index, token_ids=[index], logprobs=logprobs_of(-1.0)))
    assert [(choice.index, choice.text, choice.token_ids) for choice in reader.results[0].choices] == [
        (0, "aA", [0, 0]),
        (1, "bB", [1, 1]),
    ]


def test_tool_calls_are_put_together() -> None:
    reader = stream(tools=[])
    for piece in (
        {"index": 0, "id": "call-1", "type": "function", "function": {"name": "look", "arguments": ""}},
        {"index": 0, "function": {"arguments": '{"a":'}},
        {"index": 1, "id": "call-2", "type": "function", "function": {"name": "go", "arguments": "{}"}},
        {"index": 0, "function": {"arguments": "1}"}},
    ):
        reader.feed(chunk({"tool_calls": [piece]}, token_ids=[1], logprobs=logprobs_of(-1.0)))
    assert reader.results[0].choices[0].message["tool_calls"] == [
        {"id": "call-1", "type": "function", "function": {"name": "look", "arguments": '{"a":1}'}},
        {"id": "call-2", "type": "function", "function": {"name": "go", "arguments": "{}"}},
    ]
    assert reader.results[0].choices[0].text is None


def test_hidden_reasoning_is_recorded_and_not_shown() -> None:
    reader = stream(include_reasoning=False, return_token_ids=True)
    thought = {"token_ids": [1], "logprobs": logprobs_of(-1.0)}
    assert reader.feed(chunk({"reasoning": "thinking"}, **thought)) == b""
    assert deltas(reader.feed(chunk({"reasoning": "!", "content": "hi"}, **thought))) == [
        {"reasoning": None, "content": "hi"}
    ]
    assert reader.results[0].choices[0].message == {"role": "assistant", "reasoning": "thinking!", "content": "hi"}


def test_an_error_event_passes_and_is_remembered() -> None:
    reader = stream()
    event = b'data: {"error": {"message": "out of memory", "code": 500}}\n\n'
    assert reader.feed(event) == event
    assert reader.error is not None
    assert "out of memory" in reader.error


def test_a_comment_passes_as_it_is() -> None:
    assert stream().feed(b": ping\n\n") == b": ping\n\n"


@pytest.mark.parametrize("body", [b"{", b'{"choices": 1}', b'{"choices": [{"delta": {}}]}', b'{"choices": [1]}'])
def test_what_is_no_chunk_is_unreadable(body: bytes) -> None:
    with pytest.raises(UNREADABLE):
        stream().feed(b"data: " + body + b"\n\n")


@pytest.mark.parametrize(
    "wrong",
    [
        {"index": "0"},
        {"delta": {"content": 7}},
        {"delta": {"role": []}},
        {"delta": {"tool_calls": [{"index": "x"}]}},
        {"delta": {"tool_calls": [{"function": {"arguments": {}}}]}},
        {"finish_reason": 5},
        {"token_ids": ["x"]},
        {"logprobs": {"content": [{"logprob": "x"}]}},
    ],
)
def test_an_event_with_a_wrong_type_is_unreadable_at_once(wrong: dict[str, Any]) -> None:
    reader = stream()
    reader.feed(b"".join(events()[:2]))
    choice = {"index": 0, "delta": {}, "finish_reason": None} | wrong
    with pytest.raises(UNREADABLE):
        reader.feed(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")
    assert reader.results[0].choices[0].text == "Hel"


def test_parts_of_another_server_pass() -> None:
    reader = stream()
    event = chunk({"content": [{"type": "thinking", "thinking": "hm"}]})
    assert deltas(reader.feed(event)) == [{"content": [{"type": "thinking", "thinking": "hm"}]}]
    assert reader.results[0].choices[0].text is None
