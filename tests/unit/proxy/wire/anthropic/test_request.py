"""Anthropic messages to chat and back: what vLLM makes of them, to the byte."""

import json
import re
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.domain.chat_rules import ChatRules
from proxy.wire.anthropic.answer import MessageEvents, answer_of, error_of
from proxy.wire.anthropic.request import translate
from proxy.wire.interfaces import Server
from proxy.wire.registry import DIALECTS
from proxy.wire.request_body import read_body

REQUEST: dict[str, Any] = {"model": "starter", "max_tokens": 16, "messages": [{"role": "user", "content": "hi"}]}
PLAIN = {
    "model": "starter",
    "max_tokens": 16,
    "max_completion_tokens": 16,
    "tool_choice": None,
    "messages": [{"role": "user", "content": "hi"}],
}
MOVE = {"name": "move", "input_schema": {"properties": {"cell": {"type": "integer"}}}}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aa"}}
SHOWN = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aa"}}
USAGE = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}


def chat_of(values: dict[str, Any], **rules: Any) -> dict[str, Any] | None:
    """The chat made of a request for a server with these rules; None: it is left to vLLM."""
    translation = translate(values, ChatRules(**rules))
    return None if translation is None else translation.chat


def chat(**values: Any) -> dict[str, Any]:
    """The chat made of a request."""
    made = chat_of(REQUEST | values)
    assert made is not None
    return made


def messages_of(*messages: dict[str, Any], **values: Any) -> list[dict[str, Any]]:
    return list(chat(messages=list(messages), **values)["messages"])


def user(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content}


def call(tool_use_id: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": tool_use_id, "name": "move", "input": arguments}


def result(tool_use_id: str, content: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": tool_use_id, "content": content}


def test_a_plain_request_is_a_chat_of_as_many_tokens() -> None:
    assert chat_of(REQUEST) == PLAIN


def test_a_stream_tells_its_usage_in_every_chunk() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    assert chat_of(REQUEST | {"stream": True}) == PLAIN | {"stream": True, "stream_options": options}


def test_sampling_keeps_its_values_under_the_names_of_chat() -> None:
    sampling = {"temperature": 0.5, "top_p": 0.9, "top_k": 3}
    sampling |= {"watermarking": True}
    assert chat(stop_sequences=["a"], **sampling) == PLAIN | sampling | {"stop": ["a"]}


def test_what_vllm_ignores_is_left_out() -> None:
    ignored: dict[str, Any] = {
        "betas": ["context-management-2025-06-27"],
        "cache_control": {"type": "ephemeral"},
        "container": {"skills": []},
        "context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]},
        "diagnostics": None,
        "fallbacks": [],
        "inference_geo": "us",
        "mcp_servers": [{"type": "url", "name": "a", "url": "https://mcp.example"}],
        "metadata": {"user_id": "u"},
        "output_format": {"type": "json_schema", "schema": {}},
        "service_tier": "auto",
        "speed": "fast",
        "user_profile_id": "p",
    }
    assert chat(**ignored) == PLAIN


@pytest.mark.parametrize(
    ("system", "expected"),
    [
        ("Be brief.", "Be brief."),
        ([text("Be "), text("brief.")], "Be brief."),
        ([text("x-anthropic-billing-header: 1"), text("Be brief.")], "Be brief."),
        ("x-anthropic-billing-header: 1", "x-anthropic-billing-header: 1"),
    ],
)
def test_the_system_text_comes_first_without_what_differs_in_every_request(system: Any, expected: str) -> None:
    assert chat(system=system)["messages"] == [{"role": "system", "content": expected}, *REQUEST["messages"]]


@pytest.mark.parametrize("system", ["", [], [text("")], [text("x-anthropic-billing-header: 1")]])
def test_an_empty_system_text_is_no_message(system: Any) -> None:
    assert chat(system=system) == PLAIN


def test_a_system_text_within_the_conversation_goes_where_vllm_puts_it() -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "system", "content": "B"}, {"role": "user", "content": "c"}]
    request = REQUEST | {"system": "A", "messages": turns}
    stays, moves = chat_of(request, merges_system=False), chat_of(request, merges_system=True)
    assert stays is not None
    assert stays["messages"] == [{"role": "system", "content": "A"}, *turns]
    assert moves is not None
    assert moves["messages"] == [{"role": "system", "content": "AB"}, turns[0], turns[2]]
    assert chat_of(request) is None


def test_a_conversation_is_recognised_in_the_apps_order_wherever_vllm_puts_its_system_texts() -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "system", "content": "B"}, {"role": "user", "content": "c"}]
    body = read_body(json.dumps(REQUEST | {"system": "A", "messages": turns}).encode())
    kept, moved = [
        DIALECTS["/v1/messages"](body, Server(chat_rules=ChatRules(merges_system=merges))) for merges in (False, True)
    ]
    assert kept.to_upstream_body("m", "s") != moved.to_upstream_body("m", "s")
    assert list(kept.conversation) == list(moved.conversation)
    roles = [json.loads(bytes(message))["role"] for message in moved.conversation]
    assert roles == ["system", "user", "system", "user"]


def test_one_text_block_is_a_text_and_several_are_parts() -> None:
    assert messages_of(user(text("a"), text(""))) == [{"role": "user", "content": "a"}]
    assert messages_of(user(text("a"), text("b"))) == [{"role": "user", "content": [text("a"), text("b")]}]


def test_an_answer_comes_back_with_its_thoughts_and_calls() -> None:
    thought = {"type": "thinking", "thinking": "hm", "signature": "s"}
    assert messages_of(assistant(thought, text("so"), call("c1", cell=4))) == [
        {
            "role": "assistant",
            "reasoning": "hm",
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "move", "arguments": '{"cell": 4}'}}],
            "content": "so",
        }
    ]


def test_tool_results_come_before_what_the_user_says_beside_them() -> None:
    said = user(text("Go on."), result("c1", "X"), result("c2", [text("O"), text("yours")]), result("c3", None))
    assert messages_of(said) == [
        {"role": "tool", "tool_call_id": "c1", "content": "X"},
        {"role": "tool", "tool_call_id": "c2", "content": "O\nyours"},
        {"role": "tool", "tool_call_id": "c3", "content": ""},
        {"role": "user", "content": "Go on."},
    ]


def test_images_are_data_urls_and_those_of_a_tool_are_shown_by_the_user() -> None:
    assert messages_of(user(IMAGE)) == [{"role": "user", "content": [SHOWN]}]
    assert messages_of(user(result("c1", [IMAGE, text("seen")]))) == [
        {"role": "tool", "tool_call_id": "c1", "content": "seen"},
        {"role": "user", "content": [SHOWN]},
    ]
    by_url = {"type": "image", "source": {"type": "url", "url": "data:,a"}}
    assert messages_of(user(by_url, text("b"))) == [
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,a"}}, text("b")]}
    ]


def test_an_image_without_a_type_is_a_jpeg_and_a_tools_result_without_an_address_is_not_read() -> None:
    bare = {"type": "image", "source": {"data": "aa"}}
    url = {"url": "data:image/jpeg;base64,aa"}
    assert messages_of(user(bare))[0]["content"] == [{"type": "image_url", "image_url": url}]
    assert chat_of(REQUEST | {"messages": [user(result("c1", [{"type": "image", "source": {"type": "url"}}]))]}) is None


def test_tools_that_a_tool_has_found_are_a_result_of_their_own() -> None:
    found = [{"type": "tool_reference", "tool_name": "move"}, text("one"), {"type": "search_result", "title": "no"}]
    assert messages_of(user(result("c1", found))) == [
        {"role": "tool", "tool_call_id": "c1", "content": "one"},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "tool_reference", "name": "move"}]},
    ]


def test_a_result_in_an_answer_is_a_text() -> None:
    assert messages_of(assistant(text("a"), result("c1", "b"), result("c2", [text("c")]))) == [
        {
            "role": "assistant",
            "content": [
                text("a"),
                text("Tool result: b"),
                text("Tool result: [{'type': 'text', 'text': 'c'}]"),
            ],
        }
    ]


def test_an_empty_turn_is_left_out_only_where_the_user_has_it() -> None:
    assert messages_of(user(), assistant()) == [{"role": "assistant"}]


def test_tools_are_functions_and_their_schema_is_an_objects() -> None:
    made = chat(tools=[MOVE | {"description": "d", "strict": True, "cache_control": {}}])
    schema = {"properties": {"cell": {"type": "integer"}}, "type": "object"}
    function = {"name": "move", "description": "d", "parameters": schema, "strict": True}
    assert json.dumps(made["tools"]) == json.dumps([{"type": "function", "function": function}])
    assert made["tool_choice"] == "auto"
    assert "parallel_tool_calls" not in made


@pytest.mark.parametrize(
    ("choice", "made"),
    [
        ({"type": "auto"}, "auto"),
        ({"type": "any"}, "required"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "move"}, {"type": "function", "function": {"name": "move"}}),
    ],
)
def test_a_tool_choice_is_that_of_chat(choice: dict[str, Any], made: Any) -> None:
    assert chat(tools=[MOVE], tool_choice=choice)["tool_choice"] == made
    one = chat(tools=[MOVE], tool_choice=choice | {"disable_parallel_tool_use": True})
    assert (one["tool_choice"], one["parallel_tool_calls"]) == (made, False)


def test_an_empty_list_of_tools_is_none_where_the_server_takes_it_so() -> None:
    no_tools: dict[str, Any] = {"tools": []}
    auto = {"tool_choice": {"type": "auto"}}
    for empty in (no_tools, no_tools | auto, auto):
        assert chat_of(REQUEST | empty) is None
        made = chat_of(REQUEST | empty, ignores_empty_tools=True)
        assert made is not None
        assert {name: value for name, value in made.items() if name != "parallel_tool_calls"} == PLAIN
    for forced in (no_tools | {"tool_choice": {"type": "any"}}, {"tool_choice": {"type": "tool", "name": "move"}}):
        assert chat_of(REQUEST | forced, ignores_empty_tools=True) is None


def change(kind: str, **tool: Any) -> dict[str, Any]:
    return {"role": "system", "content": [{"type": f"tool_{kind}", "tool": tool}]}


def test_system_messages_add_and_remove_tools() -> None:
    look = {"name": "look", "input_schema": {"type": "object"}}
    named, defined = {"type": "tool_reference", "name": "move"}, {"type": "tool_definition", "definition": look}
    turns = [*REQUEST["messages"], change("addition", **named), change("addition", **defined)]
    made = chat(tools=[MOVE | {"defer_loading": True}], messages=turns)
    assert [(tool["function"]["name"], "defer_loading" in tool["function"]) for tool in made["tools"]] == [
        ("move", False),
        ("look", False),
    ]
    assert made["messages"] == REQUEST["messages"]
    removed = [*turns, change("removal", **named)]
    assert [tool["function"]["name"] for tool in chat(tools=[MOVE], messages=removed)["tools"]] == ["look"]
    assert chat_of(REQUEST | {"messages": turns}) is None, "it is not in the list"
    assert chat_of(REQUEST | {"messages": [change("removal", **defined)]}) is None
    assert chat_of(REQUEST | {"messages": [user(*change("addition", **defined)["content"])]}) is None
    assert chat_of(REQUEST | {"system": change("addition", **defined)["content"]}) is None


def test_thinking_and_output_settings_are_those_of_chat() -> None:
    assert chat(thinking={"type": "adaptive"}, output_config={"effort": "low"}) == PLAIN | {"reasoning_effort": "low"}
    made = chat(thinking={"type": "enabled", "budget_tokens": 1024}, max_tokens=1025)
    assert made["thinking_token_budget"] == 1024
    schema = {"type": "object"}
    made = chat(output_config={"format": {"type": "json_schema", "schema": schema}})
    assert made["response_format"] == {"type": "json_schema", "json_schema": {"name": "json_schema", "schema": schema}}


def test_no_thinking_is_the_effort_that_vllm_is_set_to_where_that_is_known() -> None:
    request = REQUEST | {"thinking": {"type": "disabled"}, "output_config": {"effort": "high"}}
    assert chat_of(request) is None
    assert chat_of(request, disabled_effort="none") == PLAIN | {"reasoning_effort": "none"}


@pytest.mark.parametrize(
    "values",
    [
        {"model": ""},
        {"max_tokens": 0},
        {"max_tokens": "16"},
        {"messages": "hi"},
        {"messages": [{"role": "tool", "content": "hi"}]},
        {"messages": [user({"type": "video"})]},
        {"messages": [user({"type": "image", "source": {"type": "url"}})]},
        {"messages": [user({"type": "image", "source": {"type": "base64", "data": 1}})]},
        {"messages": [user({"type": "document", "source": {"type": "text", "data": "a"}})]},
        {"messages": [user(result("c1", [{"type": "text", "text": 1}]))]},
        {"messages": [user(result("c1", [{"type": "image", "source": "a"}]))]},
        {"messages": [assistant({"type": "tool_use", "name": "move", "input": {}})]},
        {"temperature": "hot"},
        {"stream": 1},
        {"stop_sequences": list("abcde")},
        {"tools": []},
        {"tools": [{"name": "move"}]},
        {"tools": [{"name": "web_search", "type": "web_search_20250305", "max_uses": 8}]},
        {"tools": [MOVE], "tool_choice": {"type": "tool"}},
        {"tools": [MOVE], "tool_choice": {"type": "tool", "name": "other"}},
        {"tool_choice": {"type": "any"}},
        {"thinking": {"type": "enabled", "budget_tokens": 1024}},
        {"thinking": {"type": "enabled", "budget_tokens": 1023}, "max_tokens": 2000},
        {"never_heard_of": 1},
    ],
)
def test_what_is_not_covered_exactly_is_left_to_vllm(values: dict[str, Any]) -> None:
    assert chat_of(REQUEST | values) is None


def test_a_conversation_deeper_than_python_goes_is_left_to_vllm() -> None:
    deep: dict[str, Any] = {}
    for _ in range(100_000):
        deep = {"a": deep}
    assert chat_of(REQUEST | {"messages": [assistant(call("c1", deep=deep))]}) is None


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*REQUEST, "type"]), inner, max_size=3),
    max_leaves=8,
)


@given(values=st.dictionaries(st.sampled_from([*REQUEST, "system", "tools", "thinking"]), JSON_VALUES, max_size=4))
def test_whatever_comes_is_a_chat_or_none(values: dict[str, Any]) -> None:
    made = chat_of(REQUEST | values)
    assert made is None or made["model"]


def answered(finish_reason: str = "stop", stop_reason: Any = None, **message: Any) -> dict[str, Any]:
    choice = {"index": 0, "message": {"role": "assistant"} | message, "finish_reason": finish_reason}
    return {"id": "chatcmpl-1", "choices": [choice | {"stop_reason": stop_reason}], "model": "m", "usage": USAGE}


def written(value: Any) -> str:
    """As it goes to the app, but for the signatures."""
    return unsigned(msgspec.json.encode(value))


def unsigned(body: bytes) -> str:
    return re.sub(r'"signature":"[0-9a-f]{32}"', '"signature":"s"', body.decode())


def tool_call(arguments: str) -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": "move", "arguments": arguments}}


def test_a_whole_answer_has_vllms_fields_in_vllms_order() -> None:
    said = answered("tool_calls", reasoning="hm", content="so", tool_calls=[tool_call('{"cell": 4, "x": 1e16}')])
    assert written(answer_of(said)) == (
        '{"id":"chatcmpl-1","type":"message","role":"assistant","content":['
        '{"type":"thinking","thinking":"hm","signature":"s"},'
        '{"type":"text","text":"so"},'
        '{"type":"tool_use","id":"c1","name":"move","input":{"cell":4,"x":1e+16}}'
        '],"model":"m","stop_reason":"tool_use","usage":{"input_tokens":5,"output_tokens":2}}'
    )


def test_an_empty_answer_is_one_empty_text() -> None:
    assert answer_of(answered(content=None))["content"] == [{"type": "text", "text": ""}]


def test_a_call_without_arguments_has_no_input() -> None:
    (block,) = answer_of(answered(tool_calls=[tool_call("null")]))["content"]
    assert block == {"type": "tool_use", "id": "c1", "name": "move"}


@pytest.mark.parametrize("arguments", ['{"cell": ', "[1]", '"text"'])
def test_arguments_that_are_no_object_cannot_be_said(arguments: str) -> None:
    with pytest.raises(ValueError, match=r"JSON object|Expecting value"):
        answer_of(answered(tool_calls=[tool_call(arguments)]))


def test_what_cannot_be_said_is_refused_as_vllm_does_and_captured() -> None:
    request = DIALECTS["/v1/messages"](read_body(json.dumps(REQUEST).encode()), Server())
    chat_answer = answered(tool_calls=[tool_call("[1]")])
    chat_answer["choices"][0] |= {"token_ids": [7], "logprobs": {"content": [{"logprob": -0.5}]}}
    answer = request.read(json.dumps(chat_answer).encode())
    assert answer.status == 400
    error = {"type": "BadRequestError", "message": "the arguments of the tool call 'move' are no JSON object"}
    assert json.loads(answer.client_body) == {"type": "error", "error": error}
    assert answer.results[0].choices[0].token_ids == [7]


@pytest.mark.parametrize(
    ("finish_reason", "stop_reason", "calls", "expected"),
    [
        ("stop", None, [], {"stop_reason": "end_turn"}),
        ("stop", 2, [], {"stop_reason": "end_turn"}),
        ("stop", "o", [], {"stop_reason": "stop_sequence", "stop_sequence": "o"}),
        ("length", None, [tool_call("{}")], {"stop_reason": "max_tokens"}),
        ("stop", "o", [tool_call("{}")], {"stop_reason": "tool_use"}),
        ("tool_calls", None, [], {"stop_reason": "tool_use"}),
        ("abort", None, [], {}),
    ],
)
def test_it_tells_why_it_ended(
    finish_reason: str, stop_reason: Any, calls: list[Any], expected: dict[str, Any]
) -> None:
    answer = answer_of(answered(finish_reason, stop_reason, content="a", tool_calls=calls))
    assert {name: answer[name] for name in ("stop_reason", "stop_sequence") if name in answer} == expected


def test_cached_tokens_are_counted_apart() -> None:
    details = {"cached_tokens": 3, "created_cache_tokens": None}
    assert answer_of(answered() | {"usage": USAGE | {"prompt_tokens_details": details}})["usage"] == {
        "input_tokens": 2,
        "output_tokens": 2,
        "cache_read_input_tokens": 3,
    }


def chunk(finish_reason: str | None = None, stop_reason: Any = None, **delta: Any) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason, "stop_reason": stop_reason}
    return {"id": "chatcmpl-1", "model": "m", "choices": [choice], "usage": USAGE | {"completion_tokens": 0}}


def piece(index: int = 0, tool_use_id: str | None = None, **function: str) -> dict[str, Any]:
    return {"index": index, "function": function} | ({"id": tool_use_id} if tool_use_id else {})


FIRST = chunk(role="assistant", content="")
LAST = {"id": "chatcmpl-1", "model": "m", "choices": [], "usage": USAGE}


def streamed(*chunks: dict[str, Any]) -> list[str]:
    """The events between the first and the last three, data only."""
    events = MessageEvents()
    output = b"".join(events.feed(one) for one in (FIRST, *chunks, LAST)) + events.end()
    *data, rest = (event.partition("\ndata: ")[2] for event in unsigned(output).split("\n\n"))
    assert rest == ""
    assert data[0].startswith('{"type":"message_start"')
    assert data[-1] == '{"type":"message_stop"}'
    return data[1:-1]


def start(index: int, block: str) -> str:
    return f'{{"type":"content_block_start","content_block":{block},"index":{index}}}'


def delta(index: int, kind: str, part: str, content: str) -> str:
    value = json.dumps({"type": kind, part: content}, separators=(",", ":"))
    return f'{{"type":"content_block_delta","delta":{value},"index":{index}}}'


def stop(index: int) -> str:
    return f'{{"type":"content_block_stop","index":{index}}}'


def ended(reason: str, sequence: str = "null") -> str:
    usage = '{"input_tokens":5,"output_tokens":2}'
    return f'{{"type":"message_delta","delta":{{"stop_reason":"{reason}","stop_sequence":{sequence}}},"usage":{usage}}}'


def test_a_stream_is_framed_as_vllm_frames_it() -> None:
    events = MessageEvents()
    assert events.feed(FIRST) == (
        b'event: message_start\ndata: {"type":"message_start","message":{"id":"chatcmpl-1","type":"message",'
        b'"role":"assistant","content":[],"model":"m","stop_reason":null,"stop_sequence":null,'
        b'"usage":{"input_tokens":5,"output_tokens":0}}}\n\n'
    )
    assert events.end() == b'event: message_stop\ndata: {"type":"message_stop"}\n\n'


def test_thoughts_text_and_calls_are_blocks_of_their_own() -> None:
    assert streamed(
        chunk(reasoning="h"),
        chunk(reasoning="m"),
        chunk(content="so"),
        chunk(tool_calls=[piece(0, "c1", name="move", arguments="")]),
        chunk(tool_calls=[piece(0, arguments='{"a"')]),
        chunk(tool_calls=[piece(0, arguments=":1}")]),
        chunk(tool_calls=[piece(1, "c2", name="look", arguments="{}")]),
        chunk("tool_calls"),
    ) == [
        start(0, '{"type":"thinking","thinking":""}'),
        delta(0, "thinking_delta", "thinking", "h"),
        delta(0, "thinking_delta", "thinking", "m"),
        '{"type":"content_block_delta","delta":{"type":"signature_delta","signature":"s"},"index":0}',
        stop(0),
        start(1, '{"type":"text","text":""}'),
        delta(1, "text_delta", "text", "so"),
        stop(1),
        start(2, '{"type":"tool_use","id":"c1","name":"move","input":{}}'),
        delta(2, "input_json_delta", "partial_json", '{"a"'),
        delta(2, "input_json_delta", "partial_json", ":1}"),
        stop(2),
        start(3, '{"type":"tool_use","id":"c2","name":"look","input":{}}'),
        delta(3, "input_json_delta", "partial_json", "{}"),
        stop(3),
        ended("tool_use"),
    ]


def test_what_is_said_within_a_call_follows_it() -> None:
    assert streamed(
        chunk(tool_calls=[piece(0, "c1", name="move", arguments="{")]),
        chunk(content="a"),
        chunk(tool_calls=[piece(0, arguments="}")]),
        chunk("stop", content="b"),
    ) == [
        start(0, '{"type":"tool_use","id":"c1","name":"move","input":{}}'),
        delta(0, "input_json_delta", "partial_json", "{"),
        delta(0, "input_json_delta", "partial_json", "}"),
        stop(0),
        start(1, '{"type":"text","text":""}'),
        delta(1, "text_delta", "text", "ab"),
        stop(1),
        ended("tool_use"),
    ]


def test_arguments_of_a_call_that_is_over_or_never_began_are_dropped() -> None:
    assert streamed(
        chunk(tool_calls=[piece(0, "c1", name="move", arguments="{}")]),
        chunk(reasoning="h"),
        chunk(tool_calls=[piece(0, arguments="1"), piece(1, arguments="2")]),
        chunk("stop"),
    )[3:] == [
        start(1, '{"type":"thinking","thinking":""}'),
        delta(1, "thinking_delta", "thinking", "h"),
        '{"type":"content_block_delta","delta":{"type":"signature_delta","signature":"s"},"index":1}',
        stop(1),
        ended("tool_use"),
    ]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [('{"a":1}', ended("tool_use")), ('{"a":', ended("stop_sequence", '"o"'))],
)
def test_a_stop_string_counts_where_it_cut_a_call_short(arguments: str, expected: str) -> None:
    called = piece(0, "c1", name="move", arguments=arguments)
    assert streamed(chunk(tool_calls=[called]), chunk("tool_calls", "o"))[-1] == expected


def test_a_chunk_that_says_nothing_is_no_event() -> None:
    assert streamed(chunk(content=""), chunk(reasoning=""), chunk(), chunk("length")) == [ended("max_tokens")]


def test_an_error_within_a_stream_is_its_last_word() -> None:
    events = MessageEvents()
    events.feed(FIRST)
    assert events.error({"message": "boom", "type": "InternalServerError", "code": 500}) == b""
    assert events.end() == (
        b'event: error\ndata: {"type":"error","error":{"type":"internal_error","message":"boom"}}\n\n'
    )


def test_an_error_of_chat_is_said_as_anthropic_says_it() -> None:
    body = b'{"error":{"message":"too long","type":"BadRequestError","param":"max_tokens","code":400}}'
    assert error_of(body, 400) == (b'{"type":"error","error":{"type":"BadRequestError","message":"too long"}}')


@pytest.mark.parametrize("body", [b"gone \xff", b"[]", b'{"error": "gone"}', b'{"detail": "gone"}'])
def test_an_error_that_is_none_of_vllms_is_told_as_it_is(body: bytes) -> None:
    said = json.loads(error_of(body, 503))["error"]
    assert said == {"type": "Service Unavailable", "message": body.decode("utf-8", "replace")}
