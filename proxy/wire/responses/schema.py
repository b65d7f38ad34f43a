"""Define which Responses requests are covered: every field and input item, with the values they may have. Pure.

Follows what vLLM 0.32 reads, echoes and ignores. The translation is in `responses.request`. The list is closed: a
field, a value or an item's key that is not listed here is not covered.
"""

from collections.abc import Callable
from typing import Any

INT64 = 2**63
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""The reasoning efforts that both dialects of vLLM 0.32 accept."""
SUMMARIES = ("auto", "concise", "detailed")
STATUSES = ("in_progress", "completed", "incomplete")
INCLUDED_FOR_NOTHING = (
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "reasoning.encrypted_content",
)
"""Values of `include` that vLLM accepts and ignores; the one it respects requests logprobs."""

Check = Callable[[Any], bool]


def _is(kind: type) -> Check:
    return lambda value: isinstance(value, kind)


_text = _is(str)
_flag = _is(bool)
_object = _is(dict)
_null = _is(type(None))
_anything = _is(object)


def _number(low: float, high: float) -> Check:
    return lambda value: isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high


def _whole(low: int, high: int) -> Check:
    return lambda value: type(value) is int and low <= value <= high


def _one_of(*allowed: str) -> Check:
    return lambda value: isinstance(value, str) and value in allowed


def _or_null(check: Check) -> Check:
    return lambda value: value is None or check(value)


def _list_of(check: Check) -> Check:
    return lambda value: isinstance(value, list) and all(map(check, value))


def _some(check: Check) -> Check:
    return lambda value: _list_of(check)(value) and len(value) > 0


def _shape(required: dict[str, Check], optional: dict[str, Check]) -> Check:
    """Return a check for an object with all of `required`, any of `optional`, and nothing else."""
    known = required | optional
    return lambda value: (
        isinstance(value, dict)
        and required.keys() <= value.keys() <= known.keys()
        and all(known[name](item) for name, item in value.items())
    )


def _text_map(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_text, value.values()))


def _stop(value: Any) -> bool:
    return (_text(value) and value != "") or (_list_of(_text)(value) and "" not in value)


def _template_arguments(value: Any) -> bool:
    plain = isinstance(value, dict) and all(item is None or isinstance(item, str | int) for item in value.values())
    return plain and "chat_template" not in value


_TOOL = _shape(
    {"type": _one_of("function"), "name": _text},
    {
        "description": _or_null(_text),
        "parameters": _or_null(_object),
        "strict": _or_null(_flag),
        "allowed_callers": _null,
        "defer_loading": _null,
        "output_schema": _null,
    },
)
_NAMED_TOOL = _shape({"type": _one_of("function"), "name": _text}, {})
_JSON_SCHEMA = _shape(
    {"type": _one_of("json_schema"), "name": _text, "schema": _object},
    {"description": _or_null(_text), "strict": _or_null(_flag)},
)
_PLAIN_FORMAT = _shape({"type": _one_of("text", "json_object")}, {})
_FORMATTED = _shape(
    {},
    {
        "format": lambda value: value is None or _PLAIN_FORMAT(value) or _JSON_SCHEMA(value),
        "verbosity": _or_null(_one_of("low", "medium", "high")),
    },
)
_REASONING = _shape(
    {},
    {
        "context": _or_null(_one_of("auto", "current_turn", "all_turns")),
        "effort": _or_null(_one_of(*EFFORTS)),
        "generate_summary": _or_null(_one_of(*SUMMARIES)),
        "mode": _or_null(_text),
        "summary": _or_null(_one_of(*SUMMARIES)),
    },
)

SAME_IN_CHAT: dict[str, Check] = {
    "temperature": _or_null(_number(0, 2)),
    "top_p": _or_null(lambda value: _number(0, 1)(value) and value > 0),
    "top_k": _or_null(_whole(-1, 2**31 - 1)),
    "min_p": _or_null(_number(0, 1)),
    "presence_penalty": _or_null(_number(-2, 2)),
    "frequency_penalty": _or_null(_number(-2, 2)),
    "repetition_penalty": _or_null(lambda value: _number(0, 2**31)(value) and value > 0),
    "seed": _or_null(_whole(-INT64, INT64 - 1)),
    "stop": _or_null(_stop),
    "user": _or_null(_text),
    "chat_template_kwargs": _or_null(_template_arguments),
}
"""Fields that vLLM's chat has under the same name, with the same meaning."""

FIELDS: dict[str, Check] = SAME_IN_CHAT | {
    "model": _text,
    "input": lambda value: isinstance(value, str) or (isinstance(value, list) and len(value) > 0),
    "instructions": _or_null(_text),
    "max_output_tokens": _or_null(_whole(1, INT64 - 1)),
    "parallel_tool_calls": _or_null(_flag),
    "reasoning": _or_null(_REASONING),
    "stream": _or_null(_flag),
    "text": _or_null(_FORMATTED),
    "tools": _list_of(_TOOL),
    "tool_choice": lambda value: _one_of("auto", "none", "required")(value) or _NAMED_TOOL(value),
    # Fields that vLLM echoes or ignores.
    "background": lambda value: value is False,
    "client_metadata": _anything,
    "include": _or_null(_list_of(_one_of(*INCLUDED_FOR_NOTHING))),
    "include_reasoning": lambda value: value is True,
    "max_tool_calls": _or_null(_whole(-INT64, INT64 - 1)),
    "metadata": _or_null(_text_map),
    "previous_response_id": _null,
    "prompt": _null,
    "prompt_cache_key": _or_null(_text),
    "prompt_cache_retention": _anything,
    "safety_identifier": _anything,
    "service_tier": _one_of("auto", "default", "flex", "scale", "priority"),
    "store": _or_null(_flag),
    "stream_options": _anything,
    "top_logprobs": _or_null(_whole(0, 20)),
    "truncation": _one_of("disabled"),
}
"""Every field that is covered, and the values it is covered for."""

_DONE = _one_of("completed")
_MESSAGE = {"type": _one_of("message"), "status": _DONE}
_INPUT_TEXT = _shape({"type": _one_of("input_text"), "text": _text}, {})
_OUTPUT_TEXT = _shape(
    {"type": _one_of("output_text"), "text": _text},
    {"annotations": lambda value: value == [], "logprobs": lambda value: value is None or value == []},
)
_SUMMARY_TEXT = _shape({"type": _one_of("summary_text"), "text": _text}, {})
_REASONING_TEXT = _shape({"type": _one_of("reasoning_text"), "text": _text}, {})

is_input_message = _shape(
    {
        "role": _one_of("user", "system", "developer"),
        "content": lambda value: _text(value) or _some(_INPUT_TEXT)(value),
    },
    _MESSAGE,
)
is_answer_text = _shape({"role": _one_of("assistant"), "content": _text}, _MESSAGE)
is_answer = _shape(
    {"type": _one_of("message"), "role": _one_of("assistant"), "content": _some(_OUTPUT_TEXT)},
    {"status": _DONE, "id": _text, "phase": _null},
)
is_reasoning = _shape(
    {"type": _one_of("reasoning"), "summary": _list_of(_SUMMARY_TEXT)},
    {
        "id": _text,
        "content": _or_null(_list_of(_REASONING_TEXT)),
        "encrypted_content": _null,
        "status": _or_null(_DONE),
    },
)
is_call = _shape(
    {"type": _one_of("function_call"), "call_id": _text, "name": _text, "arguments": _text},
    {
        "id": _or_null(_text),
        "status": _or_null(_one_of(*STATUSES)),
        "async": _null,
        "async_": _null,  # as version 3 of the openai client writes it
        "caller": _null,
        "namespace": _null,
    },
)
is_result = _shape(
    {"type": _one_of("function_call_output"), "call_id": _text, "output": _text},
    {"id": _or_null(_text), "status": _or_null(_one_of(*STATUSES))},
)


def covered(values: dict[str, Any]) -> bool:
    """Return whether each field is covered, and the fields together. Of `input` it checks only that it is a text or a
    list of items."""
    known = {"model", "input"} <= values.keys() <= FIELDS.keys()
    if not known or not all(FIELDS[name](value) for name, value in values.items()):
        return False
    choice, tools = values.get("tool_choice", "auto"), values.get("tools")
    if not tools:
        return choice in ("auto", "none")
    named = not isinstance(choice, dict) or choice["name"] in [tool["name"] for tool in tools]
    return named and (choice == "none" or values.get("text") is None)
