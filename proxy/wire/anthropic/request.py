"""Translate an Anthropic request into the chat request that vLLM itself would make. Pure.

Follows `vllm/entrypoints/anthropic/serving.py` of vLLM 0.32. If a request is not covered exactly, the result is None:
the request goes to vLLM unchanged, and its call is recorded without token ids.
"""

import json
from typing import Any

import msgspec

from proxy.wire.anthropic.schema import (
    Base64Source,
    Block,
    Disabled,
    Enabled,
    Message,
    OutputConfig,
    Request,
    ResultImage,
    ResultText,
    Source,
    Tool,
)

BILLING_HEADER = "x-anthropic-billing-header"
"""Prefix of a system text of Claude Code that differs in every request; vLLM leaves it out of the prompt."""


def chat_of(
    values: dict[str, Any], *, merges_system: bool | None = None, disabled_effort: str | None = None
) -> dict[str, Any] | None:
    """Return the chat request that vLLM itself would make of an Anthropic request (`model` as it came).

    Args:
        merges_system: whether vLLM moves system messages within the conversation to its front, as it does if the chat
            template accepts them only there. None means unknown: the request is covered if both give the same result.
        disabled_effort: the `reasoning_effort` that vLLM makes of thinking `disabled`
            (`--anthropic-disabled-thinking-effort`; it probes the chat template for its default). None means unknown:
            not covered.

    Returns:
        None if the translation does not cover the request exactly, or if vLLM would refuse the request before it makes
        a chat.
    """
    try:
        request = msgspec.convert(values, Request)
        if not _covered(request, disabled_effort):
            return None
        messages = _messages(request, merges_system is True)
        if merges_system is None and messages != _messages(request, True):
            return None
    except (msgspec.ValidationError, RecursionError):
        return None
    return _sampling(request) | _thinking(request, disabled_effort) | _tools(request) | {"messages": messages}


def _covered(request: Request, disabled_effort: str | None) -> bool:
    """Check what the types do not express."""
    if isinstance(request.thinking, Enabled) and request.thinking.budget_tokens >= request.max_tokens:
        return False
    if isinstance(request.thinking, Disabled) and disabled_effort is None:
        return False
    names, choice = {tool.name for tool in request.tools or ()}, request.tool_choice
    if choice is not None and choice.type in ("auto", "any") and not names:
        return False
    if choice is not None and choice.type == "tool" and choice.name not in names - {""}:
        return False
    # Without an id of a tool call, vLLM makes one from the time.
    return all(
        bool(block.id) if block.type == "tool_use" else block.type != "tool_result" or message.role != "assistant"
        for message in request.messages
        if not isinstance(message.content, str)
        for block in message.content
    )


def _messages(request: Request, merges_system: bool) -> list[dict[str, Any]]:
    inline = {
        place: "".join(_system_texts(message.content))
        for place, message in enumerate(request.messages)
        if message.role == "system"
    }
    system = request.system if isinstance(request.system, str) else "".join(_system_texts(request.system or []))
    if merges_system:
        system += "".join(inline.values())
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    for place, message in enumerate(request.messages):
        if message.role != "system":
            messages += _chat_messages(message)
        elif inline[place] and not merges_system:
            messages.append({"role": "system", "content": inline[place]})
    return messages


def _system_texts(content: str | list[Block]) -> list[str]:
    texts = [content] if isinstance(content, str) else [block.text or "" for block in content if block.type == "text"]
    return [text for text in texts if not text.startswith(BILLING_HEADER)]


def _chat_messages(message: Message) -> list[dict[str, Any]]:
    """Return a user's or an assistant's message, after the tool results it contains."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    blocks = message.content
    chat: dict[str, Any] = {"role": message.role}
    reasoning = [block.thinking for block in blocks if block.type == "thinking" and block.thinking is not None]
    tool_calls = [_tool_call(block) for block in blocks if block.type == "tool_use"]
    parts = [part for block in blocks for part in _parts(block)]
    if reasoning:
        chat["reasoning"] = "".join(reasoning)
    if tool_calls:
        chat["tool_calls"] = tool_calls
    if parts:
        chat["content"] = parts[0]["text"] if len(parts) == 1 and "text" in parts[0] else parts
    results = [result for block in blocks if block.type == "tool_result" for result in _tool_result(block)]
    return results if message.role == "user" and not parts else [*results, chat]


def _parts(block: Block) -> list[dict[str, Any]]:
    if block.type == "text" and block.text:
        return [{"type": "text", "text": block.text}]
    return [_image(block.source)] if block.type == "image" and block.source else []


def _image(source: Source) -> dict[str, Any]:
    url = f"data:{source.media_type};base64,{source.data}" if isinstance(source, Base64Source) else source.url
    return {"type": "image_url", "image_url": {"url": url}}


def _tool_call(block: Block) -> dict[str, Any]:
    arguments = json.dumps(block.input or {})
    return {"id": block.id, "type": "function", "function": {"name": block.name or "", "arguments": arguments}}


def _tool_result(block: Block) -> list[dict[str, Any]]:
    """Return a tool's text, followed by its images as if the user had sent them."""
    content = block.content or ""
    parts = [ResultText(content)] if isinstance(content, str) else content
    text = "\n".join(part.text for part in parts if isinstance(part, ResultText))
    images = [_image(part.source) for part in parts if isinstance(part, ResultImage)]
    messages: list[dict[str, Any]] = [{"role": "tool", "tool_call_id": block.tool_use_id or "", "content": text}]
    return [*messages, {"role": "user", "content": images}] if images else messages


def _sampling(request: Request) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "model": request.model,
        "max_tokens": request.max_tokens,
        "max_completion_tokens": request.max_tokens,
        "stop": request.stop_sequences,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "chat_template_kwargs": request.chat_template_kwargs,
        "stream": request.stream or None,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True} if request.stream else None,
    }
    return {name: value for name, value in fields.items() if value is not None}


def _thinking(request: Request, disabled_effort: str | None) -> dict[str, Any]:
    output = request.output_config or OutputConfig()
    fields: dict[str, Any] = {} if output.effort is None else {"reasoning_effort": output.effort}
    if output.format is not None and output.format.schema:
        schema = {"name": "json_schema", "schema": output.format.schema}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    if isinstance(request.thinking, Disabled):
        fields["reasoning_effort"] = disabled_effort
    if isinstance(request.thinking, Enabled):
        fields["thinking_token_budget"] = request.thinking.budget_tokens
    return fields


def _tools(request: Request) -> dict[str, Any]:
    # Null if there are no tools, not absent: vLLM's parsers distinguish it from chat's default, "none".
    fields: dict[str, Any] = {"tool_choice": None}
    if request.tools is not None:
        fields = {"tool_choice": "auto", "tools": [_tool(tool) for tool in request.tools]}
    choice = request.tool_choice
    if choice is not None:
        named = {"type": "function", "function": {"name": choice.name}}
        fields["tool_choice"] = {"auto": "auto", "any": "required", "none": "none", "tool": named}[choice.type]
        fields["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    return fields


def _tool(tool: Tool) -> dict[str, Any]:
    function = {
        "name": tool.name,
        "description": tool.description,
        # vLLM puts a missing type last.
        "parameters": tool.input_schema if "type" in tool.input_schema else tool.input_schema | {"type": "object"},
        "strict": tool.strict,
        "defer_loading": tool.defer_loading,
    }
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}
