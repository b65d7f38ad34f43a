"""The Responses dialect against worked examples; what vLLM itself makes of the same is in test_responses_exact."""

import json
from typing import Any

import pytest

from proxy.wire.interfaces import Server
from proxy.wire.registry import DIALECTS
from proxy.wire.request_body import read_body
from proxy.wire.responses.answer import answer_of, error_of
from proxy.wire.responses.request import chat_of
from proxy.wire.responses.stream import ResponseEvents

MAX_MODEL_LEN = 100
TOOL = {"type": "function", "name": "move", "description": "Take a cell", "parameters": {"type": "object"}}
CALL = {"type": "function_call", "call_id": "c1", "name": "move", "arguments": "{}"}
NOTES = {
    "type": "namespace",
    "name": "notes",
    "description": "Notes",
    "tools": [{"type": "function", "name": "add", "parameters": {"type": "object"}}, {"type": "custom", "name": "raw"}],
}
ALLOWED = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "move"}]}
PATCH = {"type": "custom", "name": "apply_patch", "description": "Edit files."}
CHAT_CALL = {"id": "c1", "type": "function", "function": {"name": "move", "arguments": "{}"}}


def chat(**values: Any) -> dict[str, Any] | None:
    """The chat that stands for a request, without its model."""
    body = chat_of({"model": "starter", "input": "hi"} | values, MAX_MODEL_LEN)
    if body is not None:
        assert body.pop("model") == "starter"
    return body


def messages(*items: Any, **values: Any) -> Any:
    body = chat(input=list(items), **values)
    return body and body["messages"]


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def answered(**values: Any) -> dict[str, Any]:
    """What is said to a chat answer of four tokens, to a prompt of three."""
    finish_reason = values.pop("finish_reason", "stop")
    request = {"model": "starter", "input": "hi"} | values.pop("request", {})
    message = {"role": "assistant", "content": None, "reasoning": None} | values
    usage = {
        "prompt_tokens": 3,
        "completion_tokens": 4,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 2},
        "completion_tokens_details": {"reasoning_tokens": 1},
    }
    chat = {
        "id": "chatcmpl-x",
        "created": 5,
        "model": "starter",
        "choices": [{"index": 0, "message": message, "finish_reason": finish_reason}],
        "usage": usage,
    }
    return answer_of(chat, request, MAX_MODEL_LEN)


def chunk(delta: dict[str, Any] | None = None, **values: Any) -> dict[str, Any]:
    choices = (
        [] if delta is None else [{"index": 0, "delta": delta, "finish_reason": values.pop("finish_reason", None)}]
    )
    return {"id": "chatcmpl-x", "created": 5, "model": "starter", "choices": choices} | values


def calling(index: int, call_id: str | None, arguments: str) -> dict[str, Any]:
    """A piece of a tool call; the first has an id."""
    named = {"id": call_id, "type": "function"} if call_id else {}
    function = {"name": "move", "arguments": arguments} if call_id else {"arguments": arguments}
    return {"tool_calls": [{"index": index, "function": function} | named]}


FIRST = chunk({"role": "assistant", "content": ""}, prompt_token_ids=[1, 2, 3])
USAGE = chunk(usage={"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7})


def streamed(*chunks: dict[str, Any], **request: Any) -> list[dict[str, Any]]:
    """The events of a stream, with those of its end."""
    events = ResponseEvents({"model": "starter", "input": "hi"} | request, MAX_MODEL_LEN)
    return parsed(b"".join(events.feed(chunk) for chunk in chunks) + events.end())


def parsed(body: bytes) -> list[dict[str, Any]]:
    *events, rest = body.decode().split("\n\n")
    assert rest == ""
    payloads = []
    for event in events:
        kind, data = event.split("\n")
        payloads.append(json.loads(data.removeprefix("data: ")))
        assert kind == f"event: {payloads[-1]['type']}"
    assert [event["sequence_number"] for event in payloads] == list(range(len(payloads)))
    return payloads


def test_a_text_is_one_message_and_instructions_come_before_it() -> None:
    assert chat() == {"messages": [user("hi")]}
    assert chat(instructions="Be brief.") == {"messages": [{"role": "system", "content": "Be brief."}, user("hi")]}
    assert chat(instructions="") == chat()


def test_parts_are_parts_of_a_message() -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    assert messages(user(parts)) == [user([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])]


def test_the_items_of_one_turn_are_one_message() -> None:
    response = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Mine."}]}
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "The middle."}]}
    result = {"type": "function_call_output", "call_id": "c1", "output": "X"}
    assert messages(user("Play!"), thought, response, CALL, CALL | {"call_id": "c2"}, result) == [
        user("Play!"),
        {
            "role": "assistant",
            "reasoning": "The middle.",
            "content": "Mine.",
            "tool_calls": [CHAT_CALL, CHAT_CALL | {"id": "c2"}],
        },
        {"role": "tool", "content": "X", "tool_call_id": "c1"},
    ]


def test_what_a_message_has_already_begins_another() -> None:
    one, two = {"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}
    assert messages(one, two) == [one, two]
    assert messages(one, CALL, two) == [one | {"tool_calls": [CHAT_CALL]}, two]


def test_the_request_is_not_changed() -> None:
    items = [{"role": "assistant", "content": "a"}, CALL]
    before = json.dumps(items)
    assert messages(*items) is not None
    assert json.dumps(items) == before


def test_what_clients_add_to_items_is_ignored() -> None:
    sent = {"type": "message", "id": "msg_1", "status": "completed", "role": "user"}
    answer = [{"type": "output_text", "text": "b", "annotations": []}]
    call = CALL | {"id": "fc_1", "status": "completed", "caller": {"type": "direct"}, "created_by": "me"}
    assert messages(
        sent | {"content": [{"type": "input_text", "text": "a", "prompt_cache_breakpoint": {"mode": "explicit"}}]},
        {"role": "assistant", "id": "msg_2", "phase": "commentary", "content": answer},
        call,
        {"type": "function_call_output", "id": "o", "name": "move", "call_id": "c1", "output": "X"},
        {"role": "user", "name": "ann", "content": "c"},
    ) == [
        user([{"type": "text", "text": "a"}]),
        {"role": "assistant", "content": "b", "tool_calls": [CHAT_CALL]},
        {"role": "tool", "content": "X", "tool_call_id": "c1"},
        user("c") | {"name": "ann"},
    ]


def test_an_output_may_be_a_list() -> None:
    listed = {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "X"}]}
    assert messages(CALL, listed)[1]["content"] == [{"type": "text", "text": "X"}]
    assert messages(CALL, listed | {"output": []})[1]["content"] == ""
    assert messages(CALL, listed | {"type": "custom_tool_call_output"}) == messages(CALL, listed)


def test_a_refusal_is_the_text_of_an_answer() -> None:
    refusal = {"type": "refusal", "refusal": "No."}
    assert messages({"type": "message", "role": "assistant", "content": [refusal]}) == [
        {"role": "assistant", "content": "No."}
    ]


def test_an_image_is_an_image_of_chat() -> None:
    image = {"type": "input_image", "image_url": "data:image/png;base64,AA==", "detail": "high", "file_id": None}
    assert messages(user([image])) == [
        user([{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}])
    ]


@pytest.mark.parametrize("status", ["incomplete", "in_progress"])
def test_a_half_answer_is_continued_if_it_is_last(status: str) -> None:
    half = {"type": "message", "role": "assistant", "status": status, "content": [{"type": "output_text", "text": "a"}]}
    body = chat(input=[user("hi"), half])
    assert body and (body["add_generation_prompt"], body["continue_final_message"]) == (False, True)
    assert chat(input=[user("hi"), half, user("b")]) == chat(
        input=[user("hi"), half | {"status": "completed"}, user("b")]
    )


def test_sampling_keeps_its_values_under_the_names_of_chat() -> None:
    assert chat(
        max_output_tokens=5, temperature=0.5, seed=None, reasoning={"effort": "low", "summary": "auto"}, user="u"
    ) == {
        "messages": [user("hi")],
        "max_completion_tokens": 5,
        "temperature": 0.5,
        "reasoning_effort": "low",
        "user": "u",
    }


def test_tools_are_put_into_functions() -> None:
    function = {name: value for name, value in TOOL.items() if name != "type"}
    tools = [{"type": "function", "function": function}]
    assert chat(tools=[TOOL]) == {"messages": [user("hi")], "tools": tools, "tool_choice": "auto"}
    named = chat(tools=[TOOL], tool_choice={"type": "function", "name": "move"}, parallel_tool_calls=False)
    assert named == {
        "messages": [user("hi")],
        "tools": tools,
        "tool_choice": {"type": "function", "function": {"name": "move"}},
        "parallel_tool_calls": False,
    }
    # An empty list is no tools: chat refuses it.
    assert chat(tools=[], tool_choice="auto") == chat()


def test_a_namespace_is_in_the_names_of_its_functions() -> None:
    body = chat(tools=[NOTES, TOOL], tool_choice={"type": "function", "name": "add"})
    assert body and [tool["function"]["name"] for tool in body["tools"]] == ["notes__add", "move"]
    assert body["tool_choice"]["function"]["name"] == "notes__add"
    (message,) = messages(CALL | {"name": "add", "namespace": "notes"}, tools=[NOTES])
    assert message["tool_calls"][0]["function"]["name"] == "notes__add"


def test_a_custom_tool_is_a_function_with_one_text() -> None:
    body = chat(tools=[PATCH], tool_choice={"type": "custom", "name": "apply_patch"})
    assert body is not None
    (tool,) = body["tools"]
    assert (tool["function"]["name"], tool["function"]["description"]) == ("apply_patch", "Edit files.")
    assert tool["function"]["parameters"]["required"] == ["input"]
    assert body["tool_choice"] == {"type": "function", "function": {"name": "apply_patch"}}
    (message,) = messages({"type": "custom_tool_call", "call_id": "c1", "name": "apply_patch", "input": "é\n"})
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"input": "é\n"}


def test_tools_of_the_server_are_not_shown() -> None:
    search = {"type": "web_search", "external_web_access": False}
    assert chat(tools=[search, TOOL]) == chat(tools=[TOOL])
    # Calls are looked for all the same, and the template gets the empty list that vLLM gives it.
    body = chat(tools=[search], chat_template_kwargs={"enable_thinking": False})
    assert body and (len(body["tools"]), body["tool_choice"]) == (1, "auto")
    assert body["chat_template_kwargs"] == {"enable_thinking": False, "tools": []}


def test_a_choice_that_vllm_does_not_heed_is_none() -> None:
    strict = TOOL | {"strict": True}
    whole = chat(tools=[strict], tool_choice=ALLOWED)
    assert whole and (whole["tool_choice"], whole["skip_special_tokens"]) == ("none", False)
    body = chat(tools=[strict], tool_choice=ALLOWED, stream=True)
    assert body and body["tool_choice"] == "auto"
    (sent,), (seen,) = body["tools"], body["chat_template_kwargs"]["tools"]
    assert "strict" not in sent["function"]
    assert seen == {"type": "function", "function": sent["function"] | {"strict": True}}


def test_a_prompt_that_is_too_long_may_be_cut() -> None:
    assert chat(truncation="auto") == {"messages": [user("hi")], "truncate_prompt_tokens": -1}
    assert chat(truncation="disabled") == chat()


def test_logprobs_are_those_of_chat() -> None:
    included = {"include": ["message.output_text.logprobs", "web_search_call.results"]}
    assert chat(**included, top_logprobs=2) == {"messages": [user("hi")], "logprobs": True, "top_logprobs": 2}
    assert chat(top_logprobs=2) == chat()


def test_an_unknown_field_is_passed_on_and_bars_the_call() -> None:
    assert chat(never_heard_of=1) == {"messages": [user("hi")], "never_heard_of": 1}
    body = read_body(b'{"model":"m","input":"hi","never_heard_of":1}')
    request = DIALECTS["/v1/responses"](body, Server(max_model_len=MAX_MODEL_LEN))
    assert request.why_not_trained() == "sampling_bent: never_heard_of"


def test_null_is_the_default() -> None:
    nulls: dict[str, Any] = {"background": None, "service_tier": None, "truncation": None, "tools": []}
    assert chat(**nulls) == chat()
    response = answered(request=nulls)
    assert (response["background"], response["service_tier"], response["truncation"]) == (False, "auto", "disabled")


def test_what_vllm_ignores_is_left_out() -> None:
    assert chat(conversation="c", context_management=[], moderation={}, prompt_cache_options={}) == chat()


def test_a_schema_is_a_response_format() -> None:
    form = {"type": "json_schema", "name": "cell", "schema": {"type": "object"}, "strict": True}
    body = chat(text={"format": form, "verbosity": "low"})
    assert body and body["response_format"] == {
        "type": "json_schema",
        "json_schema": {"name": "cell", "schema": {"type": "object"}, "strict": True},
    }
    assert chat(text={"format": {"type": "text"}}) == chat()


def test_a_stream_tells_how_long_its_prompt_is() -> None:
    assert chat(stream=True) == {
        "messages": [user("hi")],
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }


@pytest.mark.parametrize(
    "values",
    [
        {"previous_response_id": "resp_1"},
        {"background": True},
        {"include": ["thoughts"]},
        {"include_reasoning": None},
        {"tools": [{"type": "teleport"}]},
        {"tools": [{"type": []}]},
        {"tools": [5]},
        {"tools": [{"type": "web_search", "search_context_size": "huge"}]},
        {"tools": [{"type": "web_search"}], "tool_choice": "required"},
        {"tool_choice": {"type": "web_search_preview"}},
        {"tools": [{"type": "web_search"}], "parallel_tool_calls": False},
        {"tools": [TOOL], "tool_choice": ALLOWED, "parallel_tool_calls": False, "stream": True},
        {"tools": [TOOL], "tool_choice": ALLOWED | {"mode": "any"}},
        {"tools": [PATCH | {"format": {"type": "grammar", "syntax": "lark", "definition": 'start: "a"'}}]},
        {"tools": [NOTES, NOTES | {"name": "other"}], "tool_choice": {"type": "function", "name": "add"}},
        {"tools": None},
        {"tools": [TOOL], "tool_choice": {"type": "function", "name": "other"}},
        {"tool_choice": "required"},
        {"temperature": "0.5"},
        {"temperature": True},
        {"temperature": float("nan")},
        {"max_output_tokens": 0},
        {"max_output_tokens": 5.0},
        {"prompt": {"id": "p"}},
        {"chat_template_kwargs": {"chat_template": "x"}},
        {"stop": ""},
        {"max_tokens": 5},
        {"structured_outputs": {"regex": "a", "json": {}}},
        {"structured_outputs": {"regex": "a"}, "text": {"format": {"type": "text"}}},
        {"input": []},
        {"input": None},
        {"input": [5]},
        {"input": [{"role": "user", "content": [{"type": "input_file", "file_data": "data:,"}]}]},
        {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]},
        {"input": [{"role": "user", "content": [5]}]},
        {"input": [{"role": "user", "content": "a", "type": None}]},
        {"input": [{"role": "user", "content": "a", "type": "web_search_call"}]},
        {"input": [{"role": "tool", "content": "a"}]},
        {"input": [{"type": "item_reference", "id": "msg_1"}]},
        {"input": [{"type": "function_call_output", "call_id": "c1", "output": {"text": "a"}}]},
        {"input": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}]},
        {"input": [{"type": "reasoning", "summary": [], "status": "in_progress"}]},
        {"input": [{"type": "message", "role": "assistant", "status": "unknown", "content": "a"}]},
        {"input": [CALL | {"arguments": {}}]},
    ],
    ids=str,
)
def test_what_is_not_exact_is_not_translated(values: dict[str, Any]) -> None:
    assert chat(**values) is None


def test_a_server_whose_length_is_not_known_answers_itself() -> None:
    assert chat_of({"model": "starter", "input": "hi"}) is None


def test_an_answer_is_thoughts_then_text_then_calls() -> None:
    response = answered(reasoning="Hm.", content="Mine.", tool_calls=[CHAT_CALL], request={"tools": [TOOL]})
    thought, message, call = response["output"]
    assert (thought["type"], thought["content"], thought["summary"], thought["status"]) == (
        "reasoning",
        [{"text": "Hm.", "type": "reasoning_text"}],
        [],
        None,
    )
    assert message["content"] == [{"annotations": [], "text": "Mine.", "type": "output_text", "logprobs": None}]
    assert (message["role"], message["status"]) == ("assistant", "completed")
    assert (call["call_id"], call["name"], call["arguments"], call["status"]) == ("c1", "move", "{}", "completed")
    assert len({item["id"] for item in response["output"]}) == 3
    assert (response["id"], response["object"], response["created_at"], response["status"]) == (
        "resp_x",
        "response",
        5,
        "completed",
    )


def test_nothing_said_is_no_item() -> None:
    assert answered(content="", reasoning=None)["output"] == []


def test_the_usage_is_that_of_chat() -> None:
    usage = answered()["usage"]
    assert (usage["input_tokens"], usage["output_tokens"], usage["total_tokens"]) == (3, 4, 7)
    assert usage["input_tokens_details"]["cached_tokens"] == 2
    assert usage["output_tokens_details"]["reasoning_tokens"] == 1


def test_a_cut_answer_is_incomplete() -> None:
    response = answered(content="Mi", finish_reason="length")
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})


@pytest.mark.parametrize(("limit", "status"), [(5, "completed"), (4, "incomplete")])
def test_a_called_tool_is_cut_where_no_token_was_left(limit: int, status: str) -> None:
    request = {"tools": [TOOL], "max_output_tokens": limit}
    assert answered(tool_calls=[CHAT_CALL], finish_reason="tool_calls", request=request)["status"] == status


def test_a_tool_that_had_to_be_called_ended_where_chat_says_so() -> None:
    request = {"tools": [TOOL], "max_output_tokens": 4, "tool_choice": "required"}
    assert answered(tool_calls=[CHAT_CALL], finish_reason="tool_calls", request=request)["status"] == "completed"


@pytest.mark.parametrize(("limit", "room"), [(None, 97), (50, 50), (99, 97)])
def test_the_limit_is_what_there_was_room_for(limit: int | None, room: int) -> None:
    assert answered(request={"max_output_tokens": limit})["max_output_tokens"] == room
    assert streamed(FIRST, max_output_tokens=limit)[0]["response"]["max_output_tokens"] == room


@pytest.mark.parametrize(
    ("temperature", "top_p", "used"), [(None, None, (1.0, 1.0)), (0, 0.5, (0.0, 1.0)), (0.001, 0.5, (0.01, 0.5))]
)
def test_an_answer_says_the_sampling_that_was_used(
    temperature: float | None, top_p: float | None, used: tuple[float, float]
) -> None:
    response = answered(request={"temperature": temperature, "top_p": top_p})
    assert (response["temperature"], response["top_p"]) == used


def test_what_was_asked_is_echoed_with_all_its_keys() -> None:
    form = {"type": "json_schema", "name": "cell", "schema": {"type": "object"}}
    request = {"text": {"format": form}, "reasoning": {"effort": "low"}, "metadata": {"a": "b"}, "instructions": "i"}
    response = answered(request=request)
    assert response["text"] == {"format": form | {"description": None, "strict": None}, "verbosity": None}
    assert response["reasoning"] == {
        "context": None, "effort": "low", "generate_summary": None, "mode": None, "summary": None
    }  # fmt: skip
    assert (response["metadata"], response["instructions"], response["tool_choice"], response["tools"]) == (
        {"a": "b"},
        "i",
        "none",
        [],
    )
    (tool,) = answered(request={"tools": [TOOL]})["tools"]
    assert tool == TOOL | {
        "strict": None, "allowed_callers": None, "defer_loading": None, "output_schema": None
    }  # fmt: skip


def test_calls_are_named_as_the_request_names_its_tools() -> None:
    add = {"id": "c1", "type": "function", "function": {"name": "notes__add", "arguments": "{}"}}
    patch = {
        "id": "c2",
        "type": "function",
        "function": {"name": "apply_patch", "arguments": '{"input": "\\u00e9\\n"}'},
    }
    tools = {"tools": [NOTES, PATCH]}
    called, custom = answered(tool_calls=[add, patch], request=tools)["output"]
    assert (called["type"], called["namespace"], called["name"]) == ("function_call", "notes", "add")
    assert (custom["type"], custom["name"], custom["input"]) == ("custom_tool_call", "apply_patch", "é\n")
    assert list(custom) == ["call_id", "input", "name", "type", "id", "caller", "namespace"]
    pieces = [
        {"tool_calls": [{"index": 0, "id": "c1", "function": {"name": "notes__add", "arguments": "{}"}}]},
        {"tool_calls": [{"index": 1, "id": "c2", "function": {"name": "apply_patch", "arguments": ""}}]},
        {"tool_calls": [{"index": 1, "function": {"arguments": '{"input": "\\u00'}}]},
        {"tool_calls": [{"index": 1, "function": {"arguments": 'e9\\n"}'}}]},
    ]
    events = streamed(FIRST, *map(chunk, pieces), USAGE, **tools)
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert [{**item, "id": None} for item in done] == [{**item, "id": None} for item in (called, custom)]
    deltas = [event["delta"] for event in events if event["type"] == "response.custom_tool_call_input.delta"]
    assert deltas == ["é\n"]
    (end,) = (event for event in events if event["type"] == "response.custom_tool_call_input.done")
    assert (end["input"], end["item_id"]) == ("é\n", done[1]["id"])


def test_the_text_of_a_custom_tool_is_sent_again_if_it_was_another() -> None:
    pieces = ['{"input": "a', '", "input": "b"}']
    chunks = [
        chunk({"tool_calls": [{"index": 0, "id": "c", "function": {"name": "apply_patch", "arguments": pieces[0]}}]}),
        chunk({"tool_calls": [{"index": 0, "function": {"arguments": pieces[1]}}]}),
    ]
    events = streamed(FIRST, *chunks, USAGE, tools=[PATCH])
    deltas = [event["delta"] for event in events if event["type"] == "response.custom_tool_call_input.delta"]
    assert deltas == ["a", "b"]


def test_reasoning_is_left_out_if_it_is_not_wanted() -> None:
    (message,) = answered(reasoning="Hm.", content="Mine.", request={"include_reasoning": False})["output"]
    assert message["type"] == "message"
    events = streamed(FIRST, chunk({"reasoning": "Hm."}), chunk({"content": "a"}), USAGE, include_reasoning=False)
    assert [item["type"] for item in events[-1]["response"]["output"]] == ["message"]


def test_logprobs_stand_with_the_text() -> None:
    tokens = [{"token": "a", "logprob": -1.0, "bytes": [97], "top_logprobs": []}]
    wanted = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
    delta = chunk({"content": "a"})
    delta["choices"][0]["logprobs"] = {"content": tokens}
    events = streamed(FIRST, delta, USAGE, **wanted)
    (shown,) = (event for event in events if event["type"] == "response.output_text.delta")
    assert shown["logprobs"] == [{"token": "a", "logprob": -1.0, "top_logprobs": []}]
    (message,) = events[-1]["response"]["output"]
    assert message["content"][0]["logprobs"] == [{"token": "a", "bytes": [97], "logprob": -1.0, "top_logprobs": []}]
    assert events[-1]["response"]["top_logprobs"] == 1
    (plain,) = streamed(FIRST, delta, USAGE)[-1]["response"]["output"]
    assert plain["content"][0]["logprobs"] is None


def test_text_gives_way_to_a_grammar_of_tools() -> None:
    text = {"text": {"verbosity": "low"}}
    strict = {"tools": [TOOL | {"strict": True}]}
    assert answered(request=text | {"tools": [TOOL]})["text"] == {"format": None, "verbosity": "low"}
    assert answered(request=text | strict)["text"] is None
    assert answered(request=text | strict | {"tool_choice": "none"})["text"] is not None
    assert answered(request=text | {"tools": [TOOL], "tool_choice": "required"})["text"] is None
    assert answered(request=text | {"tools": [TOOL], "parallel_tool_calls": False})["text"] is None


def test_a_stream_opens_says_and_closes_each_item() -> None:
    events = streamed(
        FIRST,
        chunk({"reasoning": "H"}),
        chunk({"reasoning": "m.", "content": "Mi"}),
        chunk({}),
        chunk({"content": "ne."}),
        chunk(calling(0, "c1", "")),
        chunk(calling(0, None, "{}")),
        chunk(calling(1, "c2", "{"), finish_reason="length"),
        USAGE,
    )  # fmt: skip
    assert [event["type"].removeprefix("response.") for event in events] == [
        "created", "in_progress",
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.delta",
        "reasoning_text.done", "content_part.done", "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.delta",
        "output_text.done", "content_part.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    last = events[-1]["response"]
    assert last["output"] == done
    assert (done[0]["content"][0]["text"], done[1]["content"][0]["text"]) == ("Hm.", "Mine.")
    assert [(call["call_id"], call["arguments"]) for call in done[2:]] == [("c1", "{}"), ("c2", "{")]
    assert {item["status"] for item in done} == {"completed"}
    assert (last["status"], last["usage"]["total_tokens"]) == ("incomplete", 7)
    added = [event["item"] for event in events if event["type"] == "response.output_item.added"]
    assert [item["id"] for item in added] == [item["id"] for item in done]
    assert {item["status"] for item in added} == {"in_progress"}
    named = {event["item_id"]: event["output_index"] for event in events if "item_id" in event}
    assert named == {item["id"]: place for place, item in enumerate(done)}


def test_a_stream_that_says_nothing_is_empty() -> None:
    events = streamed(FIRST, chunk({"content": ""}, finish_reason="stop"), USAGE)
    assert [event["type"] for event in events] == ["response.created", "response.in_progress", "response.completed"]
    assert events[-1]["response"]["output"] == []


def test_the_last_event_waits_for_the_end() -> None:
    events = ResponseEvents({"model": "starter", "input": "hi"}, MAX_MODEL_LEN)
    response = b"".join(events.feed(chunk) for chunk in (FIRST, chunk({"content": "a"}, finish_reason="stop"), USAGE))
    assert b"response.completed" not in response
    assert b"response.completed" in events.end()


def test_a_stream_that_broke_off_has_no_end() -> None:
    assert [event["type"] for event in streamed(FIRST, chunk({"content": "a"}))][-1] == "response.output_text.delta"
    assert streamed() == []


def test_an_error_within_a_stream_is_an_event() -> None:
    events = ResponseEvents({"model": "starter", "input": "hi"}, MAX_MODEL_LEN)
    response = events.feed(FIRST) + events.error(
        {"message": "dead", "type": "InternalServerError", "param": None, "code": 500}
    )
    error = {"code": "500", "message": "dead", "param": None, "sequence_number": 2, "type": "error"}
    assert parsed(response + events.end())[-1] == error


def test_an_error_names_the_field_as_the_app_knows_it() -> None:
    error_fields = {
        "message": "max_completion_tokens=9 is too much",
        "type": "BadRequestError",
        "param": "max_completion_tokens",
    }
    response = json.loads(error_of(json.dumps({"error": error_fields | {"code": 400}}).encode(), 400, MAX_MODEL_LEN))[
        "error"
    ]
    assert response == error_fields | {
        "message": "max_output_tokens=9 is too much",
        "param": "max_output_tokens",
        "code": 400,
    }


def test_a_prompt_that_leaves_no_room_is_too_long() -> None:
    none_left = {"message": "max_tokens must be at least 1, got 0.", "type": "BadRequestError", "param": "max_tokens"}
    error = json.loads(error_of(json.dumps({"error": none_left | {"code": 400}}).encode(), 400, MAX_MODEL_LEN))["error"]
    assert (error["param"], error["code"]) == ("input", 400)
    assert "prompt length 100 exceeds the max_model_len 100" in error["message"]


@pytest.mark.parametrize(
    "body", [b'{"error":{"message":"no","param":"model"}}', b'{"error":"no"}', b"[]", b"\xff", b""]
)
def test_another_error_stays_as_it_is(body: bytes) -> None:
    assert error_of(body, 500, MAX_MODEL_LEN) == body
