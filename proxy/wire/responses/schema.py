"""Define which Responses requests are covered: every field and input item, with the values they may have. Pure.

Follows what vLLM 0.32 reads, repeats and ignores (`vllm.entrypoints.openai.responses.protocol`). The translation is in
`responses.request`. Fields that are not listed are passed on: vLLM ignores what it does not know, and a later one may
respect it. Nothing that such a request samples is trained on. Of items and their parts only the fields listed here
matter: vLLM reads them by the types of the openai package, which ignore what they do not know.
"""

from collections.abc import Mapping
from typing import Any

from proxy.wire.responses import tools
from proxy.wire.responses.shapes import (
    Check,
    Either,
    List,
    Object,
    any_object,
    anything,
    flag,
    is_a,
    map_of,
    null,
    number,
    one_of,
    or_null,
    text,
    whole,
)

INT64 = 2**63
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""The reasoning efforts that both dialects of vLLM 0.32 accept."""
LOGPROBS = "message.output_text.logprobs"
"""The value of `include` that requests logprobs."""
INCLUDED = (
    LOGPROBS,
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "reasoning.encrypted_content",
    # vLLM refuses these two, which request more about calls that it never makes.
    "web_search_call.action.sources",
    "web_search_call.results",
)
"""What OpenAI's API can include in an answer. All but LOGPROBS requests parts that vLLM never has."""

_summary = one_of("auto", "concise", "detailed")
_stop = Either(lambda value: text(value) and value != "", List(lambda value: text(value) and value != ""))


def _template_arguments(value: Any) -> bool:
    plain = isinstance(value, dict) and all(item is None or isinstance(item, str | int) for item in value.values())
    return plain and "chat_template" not in value


def _structured_outputs(value: Any) -> bool:
    """Return whether it is one constraint that both dialects read alike."""
    return (
        isinstance(value, dict) and len(value) == 1 and all(_CONSTRAINTS.get(name, null)(value[name]) for name in value)
    )


_CONSTRAINTS: dict[str, Check] = {
    "json": Either(text, any_object),
    "regex": text,
    "choice": List(text, least=1),
    "grammar": text,
    "json_object": lambda value: value is True,
}

REASONING = Object(
    context=one_of("auto", "current_turn", "all_turns"),
    effort=one_of(*EFFORTS),
    generate_summary=_summary,
    mode=text,
    summary=_summary,
)
_JSON_SCHEMA = Object(
    "name schema type", name=text, schema=any_object, type=one_of("json_schema"), description=text, strict=flag
)
TEXT = Object(
    format=Either(Object("type", type=one_of("text", "json_object")), _JSON_SCHEMA),
    verbosity=one_of("low", "medium", "high"),
)
TOOL_CHOICE = Either(
    one_of("auto", "none", "required"),
    Object("name type", name=text, type=one_of("function", "custom")),
    Object("mode tools type", mode=one_of("auto", "required"), tools=List(any_object), type=one_of("allowed_tools")),
    Object("server_label type", server_label=text, type=one_of("mcp"), name=text),
    Object("type", type=one_of("programmatic_tool_calling", *tools.CHOSEN_ON_SERVER)),
)

SAME_IN_CHAT: dict[str, Check] = {
    "temperature": or_null(number(0, 2)),
    "top_p": or_null(lambda value: number(0, 1)(value) and value > 0),
    "top_k": or_null(whole(-1, 2**31 - 1)),
    "min_p": or_null(number(0, 1)),
    "presence_penalty": or_null(number(-2, 2)),
    "frequency_penalty": or_null(number(-2, 2)),
    "repetition_penalty": or_null(lambda value: number(0, 2**31)(value) and value > 0),
    "logit_bias": or_null(map_of(number(-100, 100))),
    "seed": or_null(whole(-INT64, INT64 - 1)),
    "stop": or_null(_stop),
    "stop_token_ids": or_null(List(whole(0, 2**31 - 1))),
    "ignore_eos": flag,
    "include_stop_str_in_output": flag,
    "skip_special_tokens": flag,
    "session_id": or_null(text),
    "structured_outputs": or_null(_structured_outputs),
    "user": or_null(text),
    "chat_template_kwargs": or_null(_template_arguments),
}
"""Fields that vLLM's chat has under the same name, with the same meaning."""

FIELDS: dict[str, Check] = SAME_IN_CHAT | {
    "model": text,
    "input": Either(text, List(anything, least=1)),
    "include": or_null(List(one_of(*INCLUDED))),
    "include_reasoning": flag,
    "instructions": or_null(text),
    "max_output_tokens": or_null(whole(1, INT64 - 1)),
    "parallel_tool_calls": or_null(flag),
    "reasoning": or_null(REASONING),
    "stream": or_null(flag),
    "text": or_null(TEXT),
    "tools": List(tools.is_tool),
    "tool_choice": TOOL_CHOICE,
    "top_logprobs": or_null(whole(0, 20)),
    "truncation": or_null(one_of("auto", "disabled")),
    # Fields that vLLM repeats or ignores.
    "access_programs": anything,
    "background": lambda value: value is False or value is None,
    "background_options": anything,
    "client_metadata": anything,
    "context_management": anything,
    "conversation": anything,
    "image": anything,
    "max_tool_calls": or_null(whole(-INT64, INT64 - 1)),
    "metadata": or_null(map_of(text)),
    "moderation": anything,
    "previous_response_id": null,
    "prompt": null,
    "prompt_cache_key": or_null(text),
    "prompt_cache_options": anything,
    "prompt_cache_retention": anything,
    "safety_identifier": anything,
    "service_tier": or_null(one_of("auto", "default", "flex", "scale", "priority", "fast", "ultrafast")),
    "store": or_null(flag),
    "stream_options": anything,
}
"""The fields that are known, and the values they are covered for."""

APART = frozenset(
    {
        "add_generation_prompt", "add_special_tokens", "allowed_token_ids", "bad_words", "continue_final_message",
        "documents", "echo", "enable_response_messages", "length_penalty", "logprob_token_ids", "logprobs",
        "max_completion_tokens", "max_tokens", "media_io_kwargs", "messages", "min_tokens", "mm_payload", "n",
        "previous_input_messages", "prompt_logprobs", "reasoning_effort", "repetition_detection", "response_format",
        "return_mm_kwargs", "return_prompt_text", "return_token_ids", "return_token_offsets",
        "return_tokens_as_token_ids", "routed_experts_prompt_start", "spaces_between_special_tokens",
        "stream_interval", "thinking_token_budget", "truncate_prompt_tokens", "truncation_side", "use_beam_search",
    }
)  # fmt: skip
"""Fields of vLLM that only one of the two dialects respects, or each in its own way. They are not covered."""

_status = one_of("in_progress", "completed", "incomplete")
_phase = one_of("commentary", "final_answer")
_INPUT_TEXT = Object("type text", type=one_of("input_text"), text=text)
_INPUT_IMAGE = Object(
    "type image_url",
    type=one_of("input_image"),
    image_url=text,
    detail=one_of("low", "high", "auto", "original"),
    file_id=text,
)
_LOGPROB: dict[str, Check] = {"token": text, "bytes": List(whole(0, 255)), "logprob": is_a(float)}
_OUTPUT_TEXT = Object(
    "type text",
    type=one_of("output_text"),
    text=text,
    annotations=List(any_object),
    logprobs=List(Object("token bytes logprob top_logprobs", **_LOGPROB,
                         top_logprobs=List(Object("token bytes logprob", **_LOGPROB)))),
)  # fmt: skip
_REFUSAL = Object("type refusal", type=one_of("refusal"), refusal=text)
_CALLER = Either(
    Object("type", type=one_of("direct")), Object("caller_id type", caller_id=text, type=one_of("program"))
)

is_input_message = Object(
    "role content",
    role=one_of("user", "system", "developer"),
    content=Either(text, List(Either(_INPUT_TEXT, _INPUT_IMAGE))),
    phase=_phase,
    status=_status,
    name=text,
    task=null,
    tools=null,
)
is_answer_text = Object(
    "role content",
    role=one_of("assistant"),
    content=Either(text, List(_INPUT_TEXT, least=1)),
    phase=_phase,
    status=_status,
)
is_answer = Object(
    "role content",
    role=one_of("assistant"),
    content=List(Either(_OUTPUT_TEXT, _REFUSAL)),
    status=_status,
    id=text,
    phase=_phase,
)
is_reasoning = Object(
    "summary",
    summary=List(Object("type text", type=one_of("summary_text"), text=text)),
    id=text,
    content=List(Object("type text", type=one_of("reasoning_text"), text=text)),
    encrypted_content=lambda value: value == "",
    status=_status,
)
is_call = Object(
    "call_id name arguments", call_id=text, name=text, arguments=text, id=text, status=_status, caller=_CALLER,
    namespace=text,
)  # fmt: skip
is_custom_call = Object(
    "call_id name input", call_id=text, name=text, input=text, id=text, caller=_CALLER, namespace=text
)
is_result = Object(
    "call_id output",
    call_id=text,
    output=Either(text, List(Either(_INPUT_TEXT, _INPUT_IMAGE))),
    id=text,
    status=_status,
    caller=_CALLER,
    name=text,
    namespace=text,
)


def wants_logprobs(values: Mapping[str, Any]) -> bool:
    """Return whether a request asks for logprobs."""
    return LOGPROBS in (values.get("include") or ())


def shows_reasoning(values: Mapping[str, Any]) -> bool:
    """Return whether reasoning is part of the answer to a request."""
    return values.get("include_reasoning") is not False


def covered(values: dict[str, Any]) -> bool:
    """Return whether each field is covered, and the fields together. Of `input` it checks only that it is a text or a
    list of items."""
    if not {"model", "input"} <= values.keys() or not APART.isdisjoint(values):
        return False
    if not all(FIELDS.get(name, anything)(value) for name, value in values.items()):
        return False
    choice, given = values.get("tool_choice", "auto"), values.get("tools") or []
    if values.get("structured_outputs") is not None and (
        isinstance(choice, dict) or (values.get("text") or {}).get("format") is not None
    ):
        # vLLM refuses the second, and its chat the first.
        return False
    if tools.names_function(choice):
        return tools.flat_choice(choice["name"], given) is not None
    if isinstance(choice, dict):
        # The model may call any tool, several at once.
        return bool(given) and not (values.get("stream") and values.get("parallel_tool_calls") is False)
    # With tools but without a function vLLM refuses that one must be called, and does not limit it to one call.
    limited = bool(given) and choice == "auto" and values.get("parallel_tool_calls") is False
    return bool(tools.functions_of(given)) if choice == "required" or limited else True
