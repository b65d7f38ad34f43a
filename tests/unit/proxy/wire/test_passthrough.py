import json
from typing import Any

import pytest

from proxy.wire.interfaces import UNREADABLE, Server
from proxy.wire.passthrough import NativeRequest
from proxy.wire.request_body import read_body

MESSAGE = {
    "id": "msg_1",
    "type": "message",
    "role": "assistant",
    "model": "starter@v0",
    "content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "Hello"}],
    "stop_reason": "end_turn",
    "usage": {"input_tokens": 3, "output_tokens": 2},
}
RESPONSE = {
    "id": "resp_1",
    "model": "starter@v0",
    "status": "completed",
    "output": [
        {"type": "reasoning", "content": [{"text": "hm"}]},
        {"type": "message", "content": [{"type": "output_text", "text": "Hello"}]},
    ],
    "usage": {"input_tokens": 3},
}


def ask(endpoint: str, **values: Any) -> NativeRequest:
    return NativeRequest(endpoint, read_body(json.dumps({"model": "starter"} | values).encode()), Server())


def event(kind: str, **values: Any) -> bytes:
    data = json.dumps({"type": kind} | values, separators=(",", ":"))
    return f"event: {kind}\ndata: {data}\n\n".encode()


def test_the_request_passes_under_the_adapters_name() -> None:
    request = ask(
        "messages", system="be kind", messages=[{"role": "user", "content": "hi"}], tools=[{"name": "f"}], top_k=1
    )
    assert json.loads(request.to_upstream_body("starter@v0", "salt")) == {
        "model": "starter@v0",
        "system": "be kind",
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [{"name": "f"}],
        "top_k": 1,
        "cache_salt": "salt",
    }
    assert [json.loads(bytes(message)) for message in request.messages] == [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "hi"},
    ]
    assert json.loads(bytes(request.tools_or_null)) == [{"name": "f"}]
    assert json.loads(request.sampling()) == {"top_k": 1}
    assert (request.path, request.why_not_trained()) == ("/v1/messages", "no_token_ids")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("hi", [{"role": "user", "content": "hi"}]),
        ([{"role": "user", "content": "hi"}], [{"role": "user", "content": "hi"}]),
    ],
)
def test_the_input_of_a_response_is_a_text_or_items(given: Any, expected: Any) -> None:
    request = ask("responses", input=given, instructions="be kind")
    messages = [json.loads(bytes(message)) for message in request.messages]
    assert messages == [{"role": "system", "content": "be kind"}, *expected]


def test_another_server_gets_it_as_it_came() -> None:
    request = NativeRequest("messages", read_body(b'{"model": "teacher", "max_tokens": 1}'), Server(captured=False))
    assert request.to_upstream_body("claude", "salt") == b'{"model":"claude","max_tokens":1}'
    assert request.why_not_trained() == "demonstration"


@pytest.mark.parametrize(
    ("values", "user"),
    [({"user": "u"}, "u"), ({"metadata": {"user_id": "u"}}, "u"), ({"metadata": {"user_id": 1}}, None), ({}, None)],
)
def test_whom_the_app_serves_is_noted(values: dict[str, Any], user: str | None) -> None:
    assert ask("messages", **values).end_user == user


@pytest.mark.parametrize(("endpoint", "sent"), [("messages", MESSAGE), ("responses", RESPONSE)])
def test_an_answer_passes_but_for_the_models_name_and_its_text_is_heard(endpoint: str, sent: dict[str, Any]) -> None:
    taken = ask(endpoint).read(json.dumps(sent).encode())
    assert json.loads(taken.client_body) == sent | {"model": "starter"}
    (result,) = taken.results
    (choice,) = result.choices
    assert (choice.text, choice.token_ids, choice.logprobs) == ("Hello", None, None)
    assert (result.prompt_tokens, taken.upstream_id) == (3, sent["id"])
    assert choice.finish_reason == (sent.get("stop_reason") or sent["status"])


def test_what_another_server_tells_as_a_number_is_a_text() -> None:
    taken = ask("messages").read(json.dumps(MESSAGE | {"id": 7, "stop_reason": 200}).encode())
    assert (taken.upstream_id, taken.results[0].choices[0].finish_reason) == ("7", "200")
    stream = ask("messages", stream=True).new_stream()
    stream.feed(event("message_start", message={"id": 7, "content": []}))
    stream.feed(event("message_delta", delta={"stop_reason": 200}))
    assert (stream.upstream_id, stream.results[0].choices[0].finish_reason) == ("7", "200")


def test_a_streamed_message_passes_and_its_end_is_held_back() -> None:
    events = [
        event(
            "message_start", message={"id": "msg_1", "model": "starter@v0", "content": [], "usage": {"input_tokens": 3}}
        ),
        event("content_block_start", index=0, content_block={"type": "text", "text": ""}),
        event("content_block_delta", index=0, delta={"type": "text_delta", "text": "Hel"}),
        b": ping\n\n",
        event("content_block_delta", index=0, delta={"type": "text_delta", "text": "lo"}),
        event("message_delta", delta={"stop_reason": "end_turn"}, usage={"output_tokens": 2}),
        event("message_stop"),
    ]
    stream = ask("messages", stream=True).new_stream()
    data = b"".join(events)
    seen = b"".join(stream.feed(data[at : at + 7]) for at in range(0, len(data), 7))
    assert seen == b"".join(events[:-1]).replace(b'"model":"starter@v0"', b'"model":"starter"')
    assert (stream.done, stream.last()) == (True, events[-1])
    (result,) = stream.results
    (choice,) = result.choices
    assert (choice.text, choice.finish_reason) == ("Hello", "end_turn")
    assert (result.prompt_tokens, stream.upstream_id) == (3, "msg_1")


def test_a_streamed_response_passes_and_its_end_is_held_back() -> None:
    begun = RESPONSE | {"status": "in_progress", "output": []}
    events = [
        event("response.created", response=begun),
        event("response.output_text.delta", output_index=1, delta="Hel"),
        event("response.completed", response=RESPONSE),
    ]
    stream = ask("responses", stream=True).new_stream()
    seen = stream.feed(b"".join(events))
    assert seen == b"".join(events[:2]).replace(b'"model":"starter@v0"', b'"model":"starter"')
    assert stream.done
    assert stream.last() == events[2].replace(b'"model":"starter@v0"', b'"model":"starter"')
    assert stream.results[0].choices[0].text == "Hello"


def test_what_was_said_before_it_broke_off_is_heard() -> None:
    stream = ask("responses", stream=True).new_stream()
    stream.feed(event("response.output_text.delta", output_index=0, delta="Hel"))
    assert not stream.done
    assert stream.results[0].choices[0].text == "Hel"


def test_an_error_within_the_stream_is_noted_and_ends_it() -> None:
    stream = ask("messages", stream=True).new_stream()
    error = event("error", error={"type": "overloaded_error"})
    assert stream.feed(error) == b""
    assert (stream.done, stream.last()) == (True, error)
    assert stream.error == '{"type":"overloaded_error"}'


def test_a_model_is_renamed_where_it_names_the_model_and_nowhere_else() -> None:
    stream = ask("responses", stream=True).new_stream()
    response = {"metadata": {"model": "starter@v0"}, "model": "starter@v0"}
    seen = stream.feed(event("response.created", response=response))
    assert seen == event("response.created", response=response | {"model": "starter"})


@pytest.mark.parametrize("body", [b"", b"[]", b"1", b'{"output": 1}', b'{"content": [' + b"[" * 5000])
def test_what_is_no_answer_is_unreadable(body: bytes) -> None:
    with pytest.raises(UNREADABLE):
        ask("messages").read(body)


@pytest.mark.parametrize(
    "odd",
    [
        {"output": ["oops"]},
        {"output": [{"type": "message", "content": 5}]},
        {"usage": [1]},
        {"usage": {"input_tokens": "12"}},
        {"usage": {"input_tokens": 10**30}},
        {"usage": {"input_tokens": -1}},
        {"usage": {"input_tokens": True}},
    ],
)
def test_what_is_of_another_type_says_nothing(odd: dict[str, Any]) -> None:
    """Another server may tell anything; its call is recorded all the same."""
    request = ask("responses", input="hi")
    (result,) = request.read(json.dumps({"id": "resp_1"} | odd).encode()).results
    assert (result.prompt_tokens, result.choices[0].text) == (None, "")
    stream = request.new_stream()
    stream.feed(event("response.completed", response={"id": "resp_1"} | odd))
    (result,) = stream.results
    assert (result.prompt_tokens, result.choices[0].text) == (None, "")


def test_an_output_that_is_no_list_says_nothing_in_a_stream() -> None:
    """Where all else has been passed on."""
    stream = ask("responses", input="hi").new_stream()
    stream.feed(event("response.completed", response={"id": "resp_1", "output": 5}))
    assert stream.results[0].choices[0].text == ""


def test_blocks_without_a_place_are_the_first() -> None:
    stream = ask("messages", messages=[]).new_stream()
    for place in (None, 0, "x"):
        stream.feed(event("content_block_delta", index=place, delta={"type": "text_delta", "text": "a"}))
    assert stream.results[0].choices[0].text == "aaa"
