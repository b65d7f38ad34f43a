"""Translate an Anthropic request into the chat request that vLLM itself would make. Pure.

Follows `vllm/entrypoints/anthropic/serving.py` of vLLM 0.32. If a request is not covered exactly, the result is None:
the request goes to vLLM unchanged, and its call is recorded without token ids.
"""

import json
from collections.abc import Iterator
from typing import Any

import msgspec

from proxy.domain.chat_rules import ChatRules
from proxy.wire.anthropic.schema import (
    Block,
    Disabled,
    Enabled,
    Message,
    OutputConfig,
    Request,
    Tool,
    ToolDefinition,
)

BILLING_HEADER = "x-anthropic-billing-header"
"""Prefix of a system text of Claude Code that differs in every request; vLLM leaves it out of the prompt."""
TOOL_CHANGES = ("tool_addition", "tool_removal")
"""Types of the blocks of a system message that change the tools."""


class _NotCovered(Exception):
    """vLLM refuses the request, or reads it in a way that this module does not follow."""


class Translation(msgspec.Struct, frozen=True):
    """What a request becomes."""

    chat: dict[str, Any]
    """The chat request that vLLM itself would make (`model` as it came)."""
    conversation: list[dict[str, Any]] | None = None
    """Its messages in the app's order, by which a later request is recognised. They are the chat's own (None) unless
    vLLM moves system messages to the front: there, each further one would make it another conversation."""


def translate(values: dict[str, Any], rules: ChatRules) -> Translation | None:
    """Translate a request for a server with these rules.

    Returns:
        None if the translation does not cover the request exactly, or if vLLM would refuse the request before it makes
        a chat.
    """
    try:
        request = msgspec.convert(values, Request)
        _check(request, rules)
        messages = _messages(request, merges_system=False)
        conversation: list[dict[str, Any]] | None = None
        if rules.merges_system is not False and any(message.role == "system" for message in request.messages):
            conversation, messages = messages, _messages(request, merges_system=True)
            if rules.merges_system is None and messages != conversation:
                return None
        chat = _sampling(request) | _thinking(request, rules) | _tools(request, rules) | {"messages": messages}
    except (msgspec.ValidationError, RecursionError, _NotCovered):
        return None
    return Translation(chat, conversation)


def _check(request: Request, rules: ChatRules) -> None:
    """Check what the types do not express.

    Raises:
        _NotCovered: something is wrong, or not known.
    """
    if isinstance(request.thinking, Enabled) and request.thinking.budget_tokens >= request.max_tokens:
        raise _NotCovered
    if isinstance(request.thinking, Disabled) and rules.disabled_effort is None:
        raise _NotCovered
    for message in request.messages:
        for block in message.blocks:
            # Without an id of a tool call, vLLM makes one from the time.
            if block.type == "tool_use" and not block.id:
                raise _NotCovered
            if block.type in TOOL_CHANGES and (message.role != "system" or not _names_a_tool(block)):
                raise _NotCovered
    if not isinstance(request.system, str) and any(block.type in TOOL_CHANGES for block in request.system or ()):
        raise _NotCovered


def _names_a_tool(block: Block) -> bool:
    return block.tool is not None and not (block.type == "tool_removal" and isinstance(block.tool, ToolDefinition))


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
    role, blocks = message.role, message.content
    if isinstance(blocks, str):
        return [{"role": role, "content": blocks}]
    chat: dict[str, Any] = {"role": role}
    reasoning = [block.thinking for block in blocks if block.type == "thinking" and block.thinking is not None]
    tool_calls = [_tool_call(block) for block in blocks if block.type == "tool_use"]
    parts = [part for block in blocks for part in _parts(block, role)]
    if reasoning:
        chat["reasoning"] = "".join(reasoning)
    if tool_calls:
        chat["tool_calls"] = tool_calls
    if parts:
        chat["content"] = parts[0]["text"] if len(parts) == 1 and "text" in parts[0] else parts
    if role != "user":
        return [chat]
    results = [result for block in blocks if block.type == "tool_result" for result in _tool_result(block)]
    return [*results, chat] if parts else results


def _parts(block: Block, role: str) -> Iterator[dict[str, Any]]:
    if block.type == "text" and block.text:
        yield {"type": "text", "text": block.text}
    elif block.type == "image" and block.source:
        yield _image(block.source)
    elif block.type == "tool_result" and role != "user":
        yield {"type": "text", "text": f"Tool result: {block.content or ''}"}


def _image(source: Any) -> dict[str, Any]:
    """Return the part for an image.

    Raises:
        _NotCovered: vLLM would write something else than texts into its URL, or none.
    """
    if not isinstance(source, dict):
        raise _NotCovered
    if source.get("type") == "url":
        url = source.get("url", "")
    else:
        media_type, data = source.get("media_type", "image/jpeg"), source.get("data", "")
        url = f"data:{media_type};base64,{data}" if isinstance(media_type, str) and isinstance(data, str) else ""
    if not isinstance(url, str) or not url:
        raise _NotCovered
    return {"type": "image_url", "image_url": {"url": url}}


def _tool_call(block: Block) -> dict[str, Any]:
    arguments = json.dumps(block.input or {})
    return {"id": block.id, "type": "function", "function": {"name": block.name or "", "arguments": arguments}}


def _tool_result(block: Block) -> Iterator[dict[str, Any]]:
    """Yield a tool's text, then its images as if the user had sent them, then the tools that it names. Parts of other
    types are left out."""
    parts = [{"type": "text", "text": block.content}] if isinstance(block.content, str) else block.content or []
    texts = [part.get("text", "") for part in parts if part.get("type") == "text"]
    images = [_image(part.get("source", {})) for part in parts if part.get("type") == "image"]
    names = [part.get("tool_name") or part.get("name") for part in parts if part.get("type") == "tool_reference"]
    if not all(isinstance(text, str) for text in texts):
        raise _NotCovered
    answer = {"role": "tool", "tool_call_id": block.tool_use_id or ""}
    yield answer | {"content": "\n".join(texts)}
    if images:
        yield {"role": "user", "content": images}
    if references := [{"type": "tool_reference", "name": name} for name in names if name]:
        yield answer | {"content": references}


def _sampling(request: Request) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "model": request.model,
        "max_tokens": request.max_tokens,
        "max_completion_tokens": request.max_tokens,
        "stop": request.stop_sequences,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "watermarking": request.watermarking,
        "chat_template_kwargs": request.chat_template_kwargs,
        "stream": request.stream or None,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True} if request.stream else None,
    }
    return {name: value for name, value in fields.items() if value is not None}


def _thinking(request: Request, rules: ChatRules) -> dict[str, Any]:
    output = request.output_config or OutputConfig()
    fields: dict[str, Any] = {} if output.effort is None else {"reasoning_effort": output.effort}
    if output.format is not None and output.format.schema:
        schema = {"name": "json_schema", "schema": output.format.schema}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    if isinstance(request.thinking, Disabled):
        fields["reasoning_effort"] = rules.disabled_effort
    if isinstance(request.thinking, Enabled):
        fields["thinking_token_budget"] = request.thinking.budget_tokens
    return fields


def _tools(request: Request, rules: ChatRules) -> dict[str, Any]:
    """Return the tools and whether they must be used.

    Raises:
        _NotCovered: chat refuses what vLLM makes of them.
    """
    tools, choice = _resolved_tools(request), request.tool_choice
    kind = "auto" if choice is None else choice.type
    has_none = tools is None and (choice is None or kind == "none")
    if not tools and not has_none and not rules.ignores_empty_tools:
        raise _NotCovered
    # Null if there are no tools, not absent: vLLM's parsers distinguish it from chat's default, "none".
    fields: dict[str, Any] = {"tool_choice": "auto" if tools else None}
    if tools:
        fields["tools"] = [_tool(tool) for tool in tools]
    if choice is None:
        return fields
    fields["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    if kind == "none":
        fields["tool_choice"] = "none"
    elif kind == "any" and tools:
        fields["tool_choice"] = "required"
    elif kind == "tool" and choice.name and choice.name in {tool.name for tool in tools or ()}:
        fields["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    elif kind != "auto":
        raise _NotCovered
    return fields


def _resolved_tools(request: Request) -> list[Tool] | None:
    """Return the tools at the end of the conversation, whose system messages may add and remove some.

    Raises:
        _NotCovered: one is named that there is not.
    """
    changes = [block for message in request.messages for block in message.blocks if block.type in TOOL_CHANGES]
    if not changes:
        return request.tools
    tools = {tool.name: tool for tool in request.tools or ()}
    removed: set[str] = set()
    for block in changes:
        change = block.tool
        if isinstance(change, ToolDefinition):
            name = change.definition.name
            tools[name] = change.definition
        else:
            name = change.name if change is not None else ""
            if name not in tools:
                raise _NotCovered
            if block.type == "tool_addition":
                tools[name] = msgspec.structs.replace(tools[name], defer_loading=None)
        (removed.add if block.type == "tool_removal" else removed.discard)(name)
    return [tool for name, tool in tools.items() if name not in removed]


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
