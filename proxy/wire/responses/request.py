"""Translate a Responses request into the chat request that makes vLLM do exactly the same. Pure.

Follows what vLLM 0.32 makes of a Responses request: which prompt, which sampling. A request is covered only if that is
proven against the real vLLM. The way back is in `responses.answer`.

Not covered, and served by vLLM's own /v1/responses: requests that it would answer with an error before it looks at the
prompt, values it would convert ("0.5" for 0.5), fields of vLLM that only one of the dialects respects, `background`,
`previous_response_id`, `prompt`, files, encrypted reasoning, half-finished reasoning, input items other than messages,
reasoning and the calls of functions and custom tools. `store` is covered: vLLM ignores it unless started with
VLLM_ENABLE_RESPONSES_API_STORE. Not for gpt-oss and for Mistral's tokenizers: there vLLM builds the prompt in another
way than in chat.

A few requests that vLLM refuses are covered too: a refusal or nothing as an answer's first part, an assistant's message
without type and id, nulls for ids and for fields that have a default, values of OpenAI's that vLLM does not know
(`service_tier`, `include`) and that change nothing.
"""

from collections.abc import Callable
from typing import Any

from proxy.wire.responses import schema as shape
from proxy.wire.responses import tools
from proxy.wire.responses.custom import arguments_of
from proxy.wire.responses.shapes import Check

_NO_FUNCTION = {"type": "function", "function": {"name": "none"}}
"""Stands for tools that the model is not shown. Chat needs a tool to look for calls in the answer, as vLLM does for
any Responses request with tools."""
_HALF_DONE = ("in_progress", "incomplete")


class _NotCovered(Exception):
    """Raised if the translation is not exact for the request."""


def chat_of(values: dict[str, Any], max_model_len: int | None = None) -> dict[str, Any] | None:
    """Return the chat request with the same prompt ids and sampling that vLLM would use for this Responses request.

    A streamed request also asks for usage and the prompt's ids: its first event reports how many tokens there is room
    for.

    Args:
        values: the decoded request; `model` is passed on as it came.
        max_model_len: most tokens of prompt and answer together, from GET /v1/models of vLLM. None means unknown:
            nothing is covered, as every answer reports how many tokens there was room for.

    Returns:
        None if the translation is not exact.
    """
    if max_model_len is None or not shape.covered(values):
        return None
    try:
        chat: dict[str, Any] = {"model": values["model"], "messages": _messages(values)}
        if _is_half_done(values):
            chat |= {"add_generation_prompt": False, "continue_final_message": True}
    except _NotCovered:
        return None
    options = {name: values.get(name) for name in shape.SAME_IN_CHAT} | {
        "max_completion_tokens": values.get("max_output_tokens"),
        "reasoning_effort": (values.get("reasoning") or {}).get("effort"),
        "response_format": _response_format(values),
        "truncate_prompt_tokens": -1 if values.get("truncation") == "auto" else None,
    }
    chat |= {name: value for name, value in options.items() if value is not None}
    chat |= {name: value for name, value in values.items() if name not in shape.FIELDS}
    if values.get("tools"):
        chat |= _tools(values)
    if shape.wants_logprobs(values):
        chat |= {"logprobs": True, "top_logprobs": values.get("top_logprobs") or 0}
    if values.get("stream"):
        chat |= {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
    return chat


def _tools(values: dict[str, Any]) -> dict[str, Any]:
    functions, choice = tools.functions_of(values["tools"]), values.get("tool_choice", "auto")
    chat: dict[str, Any] = {"tool_choice": choice}
    # The template gets the tools that vLLM's own /v1/responses would give it, even if chat has others.
    template: list[Any] | None = None if functions else []
    if tools.names_function(choice):
        name = tools.flat_choice(choice["name"], values["tools"])
        chat["tool_choice"] = {"type": "function", "function": {"name": name}}
    elif isinstance(choice, dict) and values.get("stream"):
        # vLLM does not heed such a choice. It sets no grammar, also for strict tools.
        template = [tools.as_template_sees(function) for function in functions]
        functions = [{name: item for name, item in function.items() if name != "strict"} for function in functions]
        chat["tool_choice"] = "auto"
    elif isinstance(choice, dict):
        # In a whole answer it does not look for calls either.
        chat |= {"tool_choice": "none", "skip_special_tokens": False}
    chat["tools"] = [{"type": "function", "function": function} for function in functions] or [_NO_FUNCTION]
    if template is not None:
        chat["chat_template_kwargs"] = (values.get("chat_template_kwargs") or {}) | {"tools": template}
    if functions and values.get("parallel_tool_calls") is False:
        chat["parallel_tool_calls"] = False
    return chat


def _response_format(values: dict[str, Any]) -> dict[str, Any] | None:
    form = (values.get("text") or {}).get("format")
    if form is None or form["type"] == "text":
        return None
    if form["type"] == "json_object":
        return {"type": "json_object"}
    return {"type": "json_schema", "json_schema": {name: item for name, item in form.items() if name != "type"}}


def _messages(values: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the conversation. Items of one assistant turn come one by one, and are joined into one message if
    possible."""
    messages: list[dict[str, Any]] = []
    if isinstance(values["input"], str):
        messages.append({"role": "user", "content": values["input"]})
    else:
        for item in values["input"]:
            _add(messages, item)
    if values.get("instructions"):
        messages.insert(0, {"role": "system", "content": values["instructions"]})
    return messages


def _add(messages: list[dict[str, Any]], item: Any) -> None:
    message = _message_of(item)
    last = messages[-1] if messages else {}
    if message["role"] != "assistant" or last.get("role") != "assistant":
        messages.append(message)
    elif "tool_calls" in message:
        last.setdefault("tool_calls", []).extend(message["tool_calls"])
    elif any(part in last for part in message if part != "role"):
        messages.append(message)
    else:
        last |= message


def _message_of(item: Any) -> dict[str, Any]:
    kind = item.get("type", "message") if isinstance(item, dict) else None
    for check, message_of in _ITEMS.get(kind, ()) if isinstance(kind, str) else ():
        if check(item):
            return message_of(item)
    raise _NotCovered


def _is_half_done(values: dict[str, Any]) -> bool:
    """Return whether the model is to continue the last message, instead of beginning another."""
    last = values["input"][-1] if isinstance(values["input"], list) else {}
    if last.get("status") not in _HALF_DONE or last.get("type", "message") not in ("message", "reasoning"):
        return False
    if last.get("type") == "reasoning":
        raise _NotCovered
    return True


def _input_message(item: dict[str, Any]) -> dict[str, Any]:
    content = item["content"]
    if isinstance(content, list):
        content = [_part(part) for part in content]
    named = {"name": item["name"]} if item.get("name") is not None else {}
    return {"role": item["role"], "content": content} | named


def _part(part: dict[str, Any]) -> dict[str, Any]:
    if part["type"] == "input_image":
        return {"type": "image_url", "image_url": {"url": part["image_url"]}}
    return {"type": "text", "text": part["text"]}


def _answer_message(item: dict[str, Any]) -> dict[str, Any]:
    # Of several parts vLLM reads only the first.
    part = item["content"][0] if item["content"] else {"text": ""}
    return {"role": "assistant", "content": part["text"] if "text" in part else part["refusal"]}


def _answer_text_message(item: dict[str, Any]) -> dict[str, Any]:
    content = item["content"]
    return {"role": "assistant", "content": content if isinstance(content, str) else content[0]["text"]}


def _reasoning_message(item: dict[str, Any]) -> dict[str, Any]:
    parts = item.get("content") or item["summary"]
    return {"role": "assistant", "reasoning": parts[0]["text"] if parts else ""}


def _call_message(item: dict[str, Any]) -> dict[str, Any]:
    name = tools.flat_name(item["namespace"], item["name"]) if item.get("namespace") else item["name"]
    return _calling(item, name, item["arguments"])


def _custom_call_message(item: dict[str, Any]) -> dict[str, Any]:
    return _calling(item, item["name"], arguments_of(item["input"]))


def _calling(item: dict[str, Any], name: str, arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"id": item["call_id"], "type": "function", "function": function}]}


def _result_message(item: dict[str, Any]) -> dict[str, Any]:
    output = item["output"]
    if isinstance(output, list):
        output = [_part(part) for part in output] or ""
    return {"role": "tool", "content": output, "tool_call_id": item["call_id"]}


_ITEMS: dict[str, tuple[tuple[Check, Callable[[dict[str, Any]], dict[str, Any]]], ...]] = {
    "message": (
        (shape.is_input_message, _input_message),
        (shape.is_answer_text, _answer_text_message),
        (shape.is_answer, _answer_message),
    ),
    "reasoning": ((shape.is_reasoning, _reasoning_message),),
    "function_call": ((shape.is_call, _call_message),),
    "custom_tool_call": ((shape.is_custom_call, _custom_call_message),),
    "function_call_output": ((shape.is_result, _result_message),),
    "custom_tool_call_output": ((shape.is_result, _result_message),),
}
"""By an input item's type: checks of its form, each with the function that turns the item into a chat message."""
