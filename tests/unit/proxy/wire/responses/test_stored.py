"""What is stored of a response beside its record, and the response that both give again."""

import json
from typing import Any

import msgspec
import pytest

from proxy.domain.answer_ids import ItemId, item_id_of
from proxy.domain.stored_turn import StoredTurn
from proxy.wire.request_body import Body, read_body
from proxy.wire.responses.answer import answer_of
from proxy.wire.responses.request import chat_of
from proxy.wire.responses.stored import (
    input_items,
    item_named,
    listed_items,
    output_items,
    references_of,
    stored_of,
    stored_of_native,
    whole_response,
    why_withheld,
    with_references,
)
from proxy.wire.responses.stream import ResponseEvents

CALL = {"id": "call_1", "type": "function", "function": {"name": "move", "arguments": '{"cell": 4}'}}
MESSAGE = {"role": "assistant", "reasoning": "The middle.", "content": "I take it.", "tool_calls": [CALL]}
TOOL = {"type": "function", "name": "move", "parameters": {"type": "object"}, "strict": None}
TOOLS = [
    TOOL,
    {"type": "namespace", "name": "games", "description": "Games.", "tools": [TOOL]},
    {"type": "custom", "name": "say"},
]
CALLS_OF_ALL = MESSAGE | {
    "tool_calls": [
        {"id": f"call_{place}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for place, (name, arguments) in enumerate(
            [("move", '{"cell": 4}'), ("games__move", '{"cell": 5}'), ("say", '{"input": "Done."}')]
        )
    ]
}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def body_of(**values: Any) -> Body:
    return read_body(json.dumps({"model": "starter", "input": "hi"} | values).encode())


def chat_answer(message: dict[str, Any] = MESSAGE, call_id: str = "a1") -> dict[str, Any]:
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    usage = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}
    return {"id": f"chatcmpl-{call_id}", "created": 7, "model": "starter", "choices": [choice], "usage": usage}


def as_read(value: Any) -> Any:
    """A value as the database or an app reads it: numbers that were encoded beforehand are numbers."""
    return msgspec.json.decode(msgspec.json.encode(value))


def recorded(body: Body, response: dict[str, Any] | None, message: dict[str, Any], **values: Any) -> StoredTurn:
    """What the record of such a call says."""
    given = body.values["input"]
    instructions = body.values.get("instructions")
    messages = [] if instructions is None else [{"role": "system", "content": instructions}]
    aside = {"model", "input", "instructions", "tools"}
    row: dict[str, Any] = {
        "response_id": "resp_a1" if response is None else response["id"],
        "new_messages": messages + ([user(given)] if isinstance(given, str) else given),
        "response": message,
        "tools": body.values.get("tools"),
        "sampling": {name: value for name, value in body.values.items() if name not in aside},
        "streamed": False,
        "redactions": None,
        "stored": None if response is None else as_read(stored_of(body.values, response)),
    }
    return StoredTurn(**(row | values))


def turn_of(message: dict[str, Any] = MESSAGE, call_id: str = "a1", **values: Any) -> StoredTurn:
    body = body_of(**values)
    return recorded(body, answer_of(chat_answer(message, call_id), body.values, 4096), message)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"instructions": "Play.", "tools": [TOOL], "temperature": 0.001, "top_p": 0.5, "max_output_tokens": 8},
        {"instructions": "", "metadata": {"a": "b"}, "user": "u", "store": True, "parallel_tool_calls": False},
        {"text": {"format": {"type": "json_schema", "name": "n", "schema": {}}}, "reasoning": {"effort": "low"}},
        {"previous_response_id": "resp_0", "service_tier": "flex", "max_tool_calls": 2, "temperature": 0},
    ],
)
@pytest.mark.parametrize("message", [MESSAGE, {"role": "assistant", "content": "Hi"}, {"role": "assistant"}])
def test_a_stored_response_is_the_one_that_was_answered(values: dict[str, Any], message: dict[str, Any]) -> None:
    body = body_of(**values)
    response = answer_of(chat_answer(message), body.values, 4096)
    assert whole_response([recorded(body, response, message)]) == response


def chunks(*deltas: dict[str, Any]) -> list[dict[str, Any]]:
    head = {"id": "chatcmpl-a1", "created": 7, "model": "starter"}
    usage = {"prompt_tokens": 2, "completion_tokens": 9, "total_tokens": 11}
    written = [head | {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    return [head | {"prompt_token_ids": [1, 2], "choices": []}, *written, head | {"choices": [], "usage": usage}]


def streamed_call(index: int, call_id: str, arguments: str) -> dict[str, Any]:
    function = {"name": "move", "arguments": arguments}
    return {"tool_calls": [{"index": index, "id": call_id, "type": "function", "function": function}]}


def test_a_streamed_response_is_stored_in_the_order_in_which_it_was_written() -> None:
    deltas = [
        {"reasoning": "The "}, {"reasoning": "middle."}, {"content": "I take"}, {"content": " it."},
        streamed_call(0, "c0", "{}"), {"content": "And ß too."}, streamed_call(1, "c1", "[]"),
    ]  # fmt: skip
    body = body_of(stream=True)
    events = ResponseEvents(body.values, 4096)
    for chunk in chunks(*deltas):
        events.feed(chunk)
    assert events.response is None
    last = events.end()
    assert events.response is not None and json.loads(last.split(b"data: ")[1])["response"] == events.response
    assert [item["type"] for item in events.response["output"]] == [
        "reasoning", "message", "function_call", "message", "function_call",
    ]  # fmt: skip
    calls = [
        {"id": name, "type": "function", "function": {"name": "move", "arguments": arguments}}
        for name, arguments in (("c0", "{}"), ("c1", "[]"))
    ]
    message = {"content": "I take it.And ß too.", "reasoning": "The middle.", "tool_calls": calls}
    assert whole_response([recorded(body, events.response, message, streamed=True)]) == events.response


def test_an_answer_in_the_usual_order_is_stored_once() -> None:
    assert "output" not in (turn_of().stored or {})


def test_what_the_recorded_message_does_not_give_again_is_stored() -> None:
    body = body_of()
    response = answer_of(chat_answer(), body.values, 4096)
    called = response["output"][2] | {"namespace": "games"}
    unusual = response | {"output": [*response["output"][:2], called]}
    turn = recorded(body, unusual, MESSAGE)
    assert output_items(turn) == unusual["output"]
    assert whole_response([turn]) == unusual
    hidden = stored_of(body.values | {"include_reasoning": False}, response | {"output": response["output"][1:]})
    assert hidden is not None and hidden["output"] == response["output"][1:]


@pytest.mark.parametrize("values", [{}, {"include": ["message.output_text.logprobs"]}, {"include_reasoning": False}])
def test_an_answer_with_any_tools_logprobs_or_hidden_reasoning_is_given_again_and_may_be_continued(
    values: dict[str, Any],
) -> None:
    body = body_of(tools=TOOLS, **values)
    chat = chat_answer(CALLS_OF_ALL)
    token = {"token": "I", "bytes": [73], "logprob": -0.5, "top_logprobs": []}
    chat["choices"][0]["logprobs"] = {"content": [token]}
    response = answer_of(chat, body.values, 4096)
    turn = recorded(body, response, CALLS_OF_ALL)
    assert whole_response([turn]) == as_read(response)
    more = with_references(body_of(previous_response_id="resp_a1", tools=TOOLS), output_items(turn), {})
    chat_again = chat_of(more.values, 4096)
    assert chat_again is not None
    names = [call["function"]["name"] for call in chat_again["messages"][0]["tool_calls"]]
    assert names == ["move", "games__move", "say"]


def test_a_turn_that_is_not_stored_has_its_tools_names_and_no_hidden_reasoning_in_later_inputs() -> None:
    for message in (CALLS_OF_ALL, CALLS_OF_ALL | {"reasoning": None, "content": None}):
        for place in range(3):
            alone = message | {"tool_calls": message["tool_calls"][place:]}
            body = body_of(tools=TOOLS, include_reasoning=False)
            (first, *_) = output = answer_of(chat_answer(alone), body.values, 4096)["output"]
            unstored = recorded(body, None, alone)
            later = msgspec.structs.replace(turn_of(call_id="a2"), new_messages=[*output[1:], user("b")], tools=None)
            assert input_items([unstored, later]) == [user("hi"), first, *output[1:], user("b")]
            assert output_items(unstored, TOOLS) == output


def test_a_response_of_vllm_itself_is_given_again_with_nothing_of_the_app_stored_twice() -> None:
    output = [{"type": "message", "id": "msg_9", "content": [{"type": "output_text", "text": "Secret"}]}]
    body = body_of(instructions="Secret", metadata={"a": "Secret"}, tools=[TOOL], background=False)
    response = {
        "id": "resp_a1", "created_at": 7, "model": "starter", "status": "completed", "output": output, "usage": {},
        "instructions": "Secret", "metadata": {"a": "Secret"}, "tools": [TOOL], "background": False, "user": None,
        "input_messages": None,
    }  # fmt: skip
    stored = stored_of_native(body.values, response)
    assert "Secret" not in json.dumps(stored)
    turn = recorded(body, None, {"role": "assistant", "content": output}, stored=stored)
    again = whole_response([turn])
    assert again == {name: value for name, value in response.items() if name != "input_messages"}
    assert output_items(turn) == output


def test_what_the_app_does_not_want_to_be_stored_is_not() -> None:
    body = body_of(store=False)
    response = answer_of(chat_answer(), body.values, 4096)
    assert stored_of(body.values, response) is None
    assert stored_of_native(body.values, response) is None
    assert "store: false" in (why_withheld([recorded(body, response, MESSAGE)]) or "")
    assert why_withheld([turn_of()]) is None


def test_a_conversation_of_which_anything_was_redacted_is_withheld() -> None:
    whole = turn_of()
    hidden = msgspec.structs.replace(whole, stored={"redacted": True}, redactions=1)
    unstored = msgspec.structs.replace(whole, stored=None, redactions=1)
    only_metadata = msgspec.structs.replace(whole, redactions=1)
    for conversation in ([hidden], [hidden, whole], [unstored, whole]):
        assert "private text" in (why_withheld(conversation) or "")
    assert why_withheld([only_metadata]) is None
    assert why_withheld([msgspec.structs.replace(unstored, redactions=0), whole]) is None


def test_the_input_is_what_the_turns_added_with_the_answers_between_and_without_instructions() -> None:
    first = turn_of(instructions="Play.", input=[user("a")])
    rest = output_items(first)[1:]
    second = msgspec.structs.replace(turn_of(call_id="a2"), new_messages=[*rest, user("b")], tools=None)
    # The instructions of a conversation's requests are the same: they begin the prompt.
    second = msgspec.structs.replace(second, stored=(second.stored or {}) | {"instructions": True})
    assert input_items([first]) == [user("a")]
    assert input_items([first, second]) == [user("a"), *output_items(first), user("b")]


def test_a_request_refers_to_a_response_or_to_items() -> None:
    def read(**values: Any) -> tuple[str | None, list[str]] | None:
        references = references_of(body_of(**values).values)
        return None if references is None else (references.previous, list(references.items))

    assert read() is None
    assert read(previous_response_id=None, input=[user("a")]) is None
    assert read(previous_response_id=5) is None
    assert read(previous_response_id="resp_a", input=5) is None
    assert read(previous_response_id="resp_a") == ("resp_a", [])
    items = [{"type": "item_reference", "id": "rs_a_0"}, user("a"), {"id": "msg_a_1"}, {"id": "x", "type": None}]
    assert read(input=items) == (None, ["rs_a_0", "msg_a_1", "x"])
    assert read(input=[{"type": "item_reference"}, {"id": "m", "role": "user", "content": "a"}]) is None


def test_what_a_request_refers_to_comes_in_its_place_and_is_covered_as_if_the_app_had_sent_it() -> None:
    turn = turn_of(input=[user("a")])
    thought, text, call = output_items(turn)
    result = {"type": "function_call_output", "call_id": "call_1", "output": "X"}
    body = body_of(previous_response_id="resp_a1", input=[result], temperature=0)
    expanded = with_references(body, [user("a"), thought, text, call], {})
    whole = body_of(input=[user("a"), thought, text, call, result], temperature=0)
    assert (expanded.values, expanded.fields.keys()) == (whole.values, whole.fields.keys())
    assert msgspec.json.decode(expanded.fields["input"]) == whole.values["input"]
    assert chat_of(expanded.values, 4096) == chat_of(whole.values, 4096) is not None

    body = body_of(input=[user("a"), {"type": "item_reference", "id": "fc_a1_2"}, result])
    expanded = with_references(body, [], {"fc_a1_2": call})
    assert expanded.values["input"] == [user("a"), call, result]

    expanded = with_references(body_of(previous_response_id="resp_a1"), [user("a")], {})
    assert expanded.values["input"] == [user("a"), user("hi")]


def test_items_have_the_ids_that_the_app_was_given() -> None:
    turn = turn_of(input=[user("a"), {"type": "function_call_output", "call_id": "c", "output": "X"}])
    for item in output_items(turn):
        assert item_id_of(item["id"]) == ItemId("resp_a1", output_items(turn).index(item), of_input=False)
        assert item_named(item["id"], [turn]) == item
    assert item_named("rs_a1_1", [turn]) is None
    listed = listed_items([turn])
    for place, (item, given) in enumerate(zip(listed, input_items([turn]), strict=True)):
        assert item_id_of(item["id"]) == ItemId("resp_a1", place, of_input=True)
        assert item_named(item["id"], [turn]) == given
    assert item_named("msg_a1_in_7", [turn]) is None
    for name in ("msg_6f", "", "rs_", "rs__0", "RS_a_0", f"rs_a_{'9' * 30}"):
        assert item_id_of(name) is None


def test_listed_items_have_what_the_api_documents() -> None:
    assert listed_items([turn_of(input="hi")]) == [
        {
            "status": "completed",
            "id": "msg_a1_in_0",
            "type": "message",
            "role": "user",
            "content": [{"type": "input_text", "text": "hi"}],
        }
    ]
