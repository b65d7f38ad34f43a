"""Define the Anthropic requests whose translation to chat is exact. Types only.

Follows `vllm/entrypoints/anthropic/protocol.py` of vLLM 0.32. vLLM refuses what these types refuse, or reads it in a
way that `request` does not follow.
"""

from typing import Annotated, Any, Literal

import msgspec

MAX_STOP_SEQUENCES = 4
"""vLLM refuses more; its VLLM_MAX_STOP_STRINGS."""


class Tool(msgspec.Struct):
    """A tool of the app's own. Anthropic's own tools have no schema, and vLLM refuses them."""

    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None
    defer_loading: bool | None = None


class ToolReference(msgspec.Struct, tag_field="type", tag="tool_reference"):
    """A tool of the request's list, by name."""

    name: str


class ToolDefinition(msgspec.Struct, tag_field="type", tag="tool_definition"):
    """A tool that is not in the request's list."""

    definition: Tool


class Block(msgspec.Struct):
    """A piece of a message; its type decides which fields count. Citations are ignored, like all fields that are not
    here; documents, search results and the blocks of Anthropic's own tools vLLM refuses."""

    type: Literal[
        "text",
        "image",
        "tool_use",
        "tool_result",
        "tool_reference",
        "thinking",
        "redacted_thinking",
        "tool_addition",
        "tool_removal",
    ]
    text: str | None = None
    source: dict[str, Any] | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[dict[str, Any]] | None = None
    is_error: bool | None = None
    thinking: str | None = None
    signature: str | None = None
    data: str | None = None
    tool: ToolReference | ToolDefinition | None = None
    tool_name: str | None = None


class Message(msgspec.Struct):
    """One turn."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]

    @property
    def blocks(self) -> list[Block]:
        """Return its content as blocks."""
        return [Block("text", self.content)] if isinstance(self.content, str) else self.content


class ToolChoice(msgspec.Struct):
    """Whether a tool must be used, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Format(msgspec.Struct):
    """The JSON format of the answer."""

    type: Literal["json_schema"] = "json_schema"
    schema: dict[str, Any] | None = None


class OutputConfig(msgspec.Struct):
    """The reasoning effort, and the answer's format."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: Format | None = None


_Display = Literal["summarized", "omitted", "updates"]


class Enabled(msgspec.Struct, tag_field="type", tag="enabled"):
    """Thinking, with at most this many tokens."""

    budget_tokens: Annotated[int, msgspec.Meta(ge=1024)]
    display: _Display | None = None


class Disabled(msgspec.Struct, tag_field="type", tag="disabled"):
    """No thinking."""


class Adaptive(msgspec.Struct, tag_field="type", tag="adaptive"):
    """Thinking as the model chooses."""

    display: _Display | None = None


class Request(msgspec.Struct, forbid_unknown_fields=True):
    """The closed list of fields. Unknown keys inside them (`cache_control`) are ignored, as vLLM does."""

    model: Annotated[str, msgspec.Meta(min_length=1)]
    messages: list[Message]
    max_tokens: Annotated[int, msgspec.Meta(gt=0)]
    system: str | list[Block] | None = None
    stop_sequences: Annotated[list[str], msgspec.Meta(max_length=MAX_STOP_SEQUENCES)] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Enabled | Disabled | Adaptive | None = None
    output_config: OutputConfig | None = None
    metadata: dict[str, Any] | None = None
    # vLLM's own.
    chat_template_kwargs: dict[str, Any] | None = None
    watermarking: bool | None = None
    # The rest of Anthropic's fields, as of its package 0.125, beta ones included: vLLM ignores them.
    betas: Any = None
    cache_control: Any = None
    container: Any = None
    context_management: Any = None
    diagnostics: Any = None
    fallback_credit_token: Any = None
    fallbacks: Any = None
    inference_geo: Any = None
    mcp_servers: Any = None
    output_format: Any = None
    service_tier: Any = None
    speed: Any = None
    user_profile_id: Any = None
