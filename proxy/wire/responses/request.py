"""Translate a Responses request into the chat request that makes vLLM do exactly the same. Pure.

Follows what vLLM 0.32 makes of a Responses request: which prompt, which sampling. A request is covered only if that is
proven against the real vLLM. The way back is in `responses.answer`.

Not covered, and served by vLLM's own /v1/responses: requests that it would answer with an error before it looks at the
prompt, values it would convert ("0.5" for 0.5), fields unknown here, `background`, `previous_response_id`, `prompt`,
`truncation: auto`, `include` of logprobs, `include_reasoning: false`, tools other than functions, `text` beside tools
that may be called (vLLM drops it, or not, depending on its tool parser), images, files, refusals, encrypted reasoning,
half-finished messages. `store` is covered: vLLM ignores it unless started with VLLM_ENABLE_RESPONSES_API_STORE. Not for
gpt-oss and for Mistral's tokenizers: there vLLM builds the prompt in another way than in chat.
"""

from collections.abc import Callable
from typing import Any

from proxy.wire.responses import schema as shape


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
    except _NotCovered:
        return None
    options = {name: values.get(name) for name in shape.SAME_IN_CHAT} | {
        "max_completion_tokens": values.get("max_output_tokens"),
        "reasoning_effort": (values.get("reasoning") or {}).get("effort"),
        "response_format": _response_format(values),
    }
    chat |= {name: value for name, value in options.items() if value is not None}
    if values.get("tools"):
        chat["tools"] = [{"type": "function", "function": _function(tool)} for tool in values["tools"]]
        chat["tool_choice"] = _tool_choice(values)
        if values.get("parallel_tool_calls") is False:
            chat["parallel_tool_calls"] = False
    if values.get("stream"):
        chat |= {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
    return chat


def _function(tool: dict[str, Any]) -> dict[str, Any]:
    return {name: tool[name] for name in ("name", "description", "parameters", "strict") if tool.get(name) is not None}


def _tool_choice(values: dict[str, Any]) -> Any:
    choice = values.get("tool_choice", "auto")
    return {"type": "function", "function": {"name": choice["name"]}} if isinstance(choice, dict) else choice


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
    message = next((turned(item) for is_one, turned in _ITEMS if is_one(item)), None)
    if message is None:
        raise _NotCovered
    last = messages[-1] if messages else {}
    if message["role"] != "assistant" or last.get("role") != "assistant":
        messages.append(message)
    elif "tool_calls" in message:
        last.setdefault("tool_calls", []).extend(message["tool_calls"])
    elif any(part in last for part in message if part != "role"):
        messages.append(message)
    else:
        last |= message


def _plain_message(item: dict[str, Any]) -> dict[str, Any]:
    content = item["content"]
    if isinstance(content, list):
        content = [{"type": "text", "text": part["text"]} for part in content]
    return {"role": item["role"], "content": content}


def _answer_message(item: dict[str, Any]) -> dict[str, Any]:
    # Of several parts vLLM reads only the first.
    return {"role": "assistant", "content": item["content"][0]["text"]}


def _reasoning_message(item: dict[str, Any]) -> dict[str, Any]:
    parts = item.get("content") or item["summary"]
    return {"role": "assistant", "reasoning": parts[0]["text"] if parts else ""}


def _call_message(item: dict[str, Any]) -> dict[str, Any]:
    function = {"name": item["name"], "arguments": item["arguments"]}
    return {"role": "assistant", "tool_calls": [{"id": item["call_id"], "type": "function", "function": function}]}


def _result_message(item: dict[str, Any]) -> dict[str, Any]:
    return {"role": "tool", "content": item["output"], "tool_call_id": item["call_id"]}


_ITEMS: tuple[tuple[shape.Check, Callable[[dict[str, Any]], dict[str, Any]]], ...] = (
    (shape.is_input_message, _plain_message),
    (shape.is_answer_text, _plain_message),
    (shape.is_answer, _answer_message),
    (shape.is_reasoning, _reasoning_message),
    (shape.is_call, _call_message),
    (shape.is_result, _result_message),
)
"""Checks of an input item's form, each with the function that turns the item into a chat message."""
