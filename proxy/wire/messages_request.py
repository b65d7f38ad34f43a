"""The shape of an Anthropic request, as far as its translation to chat is exact. Only the shapes.

Follows `vllm/entrypoints/anthropic/protocol.py` of vLLM 0.32. What these types refuse, vLLM refuses too or reads in a
way that `messages` does not follow.
"""

from typing import Annotated, Any, Literal

import msgspec

MAX_STOP_SEQUENCES = 4
"""vLLM refuses more; its VLLM_MAX_STOP_STRINGS."""


class Base64Source(msgspec.Struct, tag_field="type", tag="base64"):
    """An image that the request brings along."""

    media_type: str
    data: str


class UrlSource(msgspec.Struct, tag_field="type", tag="url"):
    """An image that vLLM fetches."""

    url: Annotated[str, msgspec.Meta(min_length=1)]


Source = Base64Source | UrlSource


class ResultText(msgspec.Struct, tag_field="type", tag="text"):
    """A part of what a tool said."""

    text: str = ""


class ResultImage(msgspec.Struct, tag_field="type", tag="image"):
    """A part of what a tool showed."""

    source: Source


class Block(msgspec.Struct):
    """A piece of a message; which fields count depends on its type."""

    type: Literal["text", "image", "tool_use", "tool_result", "thinking", "redacted_thinking"]
    text: str | None = None
    source: Source | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[ResultText | ResultImage] | None = None
    is_error: bool | None = None
    thinking: str | None = None
    signature: str | None = None
    data: str | None = None
    # Of other blocks; here vLLM would check them and then ignore them.
    tool: None = None
    tool_name: None = None


class Message(msgspec.Struct):
    """One turn."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class Tool(msgspec.Struct):
    """A tool of the app's own."""

    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None
    defer_loading: bool | None = None


class ToolChoice(msgspec.Struct):
    """Whether a tool is to be used, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Format(msgspec.Struct):
    """The JSON that the answer is to be."""

    type: Literal["json_schema"] = "json_schema"
    schema: dict[str, Any] | None = None


class OutputConfig(msgspec.Struct):
    """How hard to think, and what to write."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: Format | None = None


_Display = Literal["summarized", "omitted", "updates"]


class Enabled(msgspec.Struct, tag_field="type", tag="enabled"):
    """Thinking, of at most so many tokens."""

    budget_tokens: Annotated[int, msgspec.Meta(ge=1024)]
    display: _Display | None = None


class Disabled(msgspec.Struct, tag_field="type", tag="disabled"):
    """No thinking."""


class Adaptive(msgspec.Struct, tag_field="type", tag="adaptive"):
    """Thinking as the model sees fit."""

    display: _Display | None = None


class Request(msgspec.Struct, forbid_unknown_fields=True):
    """The closed list of fields; inside them vLLM, and this, ignore what they do not know (`cache_control`)."""

    model: Annotated[str, msgspec.Meta(min_length=1)]
    messages: list[Message]
    max_tokens: Annotated[int, msgspec.Meta(gt=0)]
    system: str | list[Block] | None = None
    stop_sequences: Annotated[list[str], msgspec.Meta(max_length=MAX_STOP_SEQUENCES)] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    # Of none vLLM makes an empty list, which chat refuses.
    tools: Annotated[list[Tool], msgspec.Meta(min_length=1)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Enabled | Disabled | Adaptive | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # Not for vLLM, which ignores them.
    metadata: dict[str, Any] | None = None
    service_tier: Any = None
    context_management: Any = None
    cache_control: Any = None
