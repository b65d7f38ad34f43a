"""Read the tools of a Responses request: which of them vLLM shows to the model, and how it repeats them. Pure.

Follows vLLM 0.32 (`vllm.tool_parsers.utils.get_function_tools`). The model sees functions. Those of a namespace are
called `<namespace>__<name>`; a custom tool is a function with one text, `input`. Tools that a server would run, as
`web_search`, are accepted, repeated in the answer, and not shown.
"""

from collections.abc import Iterator
from typing import Any

import msgspec

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
    one_of,
    text,
    whole,
)

_INT64 = 2**63
_callers = List(one_of("direct", "programmatic"))
_texts = List(text)
_whole = whole(-_INT64, _INT64 - 1)
_float = is_a(float)
_memory = one_of("1g", "4g", "16g", "64g")

_FUNCTION = Object(
    "name type",
    name=text,
    parameters=any_object,
    strict=flag,
    type=one_of("function"),
    allowed_callers=_callers,
    defer_loading=flag,
    description=text,
    output_schema=any_object,
)
_CUSTOM = Object(
    "name type",
    name=text,
    type=one_of("custom"),
    allowed_callers=_callers,
    defer_loading=flag,
    description=text,
    # vLLM refuses a grammar.
    format=Object("type", type=one_of("text")),
)
_OF_NAMESPACE = Object(
    "name type",
    name=text,
    type=one_of("function"),
    allowed_callers=_callers,
    defer_loading=flag,
    description=text,
    output_schema=any_object,
    parameters=any_object,
    strict=flag,
)
_NAMESPACE = Object(
    "description name tools type",
    description=text,
    name=text,
    tools=List(Either(_OF_NAMESPACE, _CUSTOM)),
    type=one_of("namespace"),
)
_LOCATION = {"city": text, "country": text, "region": text, "timezone": text}
_CONTEXT_SIZE = one_of("low", "medium", "high")
_NETWORK = Either(
    Object("type", type=one_of("disabled")),
    Object(
        "allowed_domains type",
        allowed_domains=_texts,
        type=one_of("allowlist"),
        domain_secrets=List(Object("domain name value", domain=text, name=text, value=text)),
    ),
)
_MCP_FILTER = Object("", read_only=flag, tool_names=_texts)
_COMPARISON = Object(
    "key type value",
    key=text,
    type=one_of("eq", "ne", "gt", "gte", "lt", "lte", "in", "nin"),
    value=Either(text, flag, _float, List(Either(text, _float))),
)

TOOLS: dict[str, Object] = {
    "function": _FUNCTION,
    "custom": _CUSTOM,
    "namespace": _NAMESPACE,
    "apply_patch": Object("type", type=text, allowed_callers=_callers),
    "code_interpreter": Object(
        "container type",
        container=Either(
            text, Object("type", type=one_of("auto"), file_ids=_texts, memory_limit=_memory, network_policy=_NETWORK)
        ),
        type=text,
        allowed_callers=_callers,
    ),
    "computer": Object("type", type=text),
    "computer_use_preview": Object(
        "display_height display_width environment type",
        display_height=_whole,
        display_width=_whole,
        environment=one_of("windows", "mac", "linux", "ubuntu", "browser"),
        type=text,
    ),
    "file_search": Object(
        "type vector_store_ids",
        type=text,
        vector_store_ids=_texts,
        filters=_COMPARISON,
        max_num_results=_whole,
        ranking_options=Object(
            "",
            hybrid_search=Object("embedding_weight text_weight", embedding_weight=_float, text_weight=_float),
            ranker=one_of("auto", "default-2024-11-15"),
            score_threshold=_float,
        ),
    ),
    "image_generation": Object(
        "type",
        type=text,
        action=one_of("generate", "edit", "auto"),
        background=one_of("transparent", "opaque", "auto"),
        input_fidelity=one_of("high", "low"),
        input_image_mask=Object("", file_id=text, image_url=text),
        model=text,
        moderation=one_of("auto", "low"),
        output_compression=_whole,
        output_format=one_of("png", "webp", "jpeg"),
        partial_images=_whole,
        quality=one_of("low", "medium", "high", "auto"),
        size=text,
    ),
    "local_shell": Object("type", type=text),
    "mcp": Object(
        "server_label type",
        server_label=text,
        type=text,
        allowed_callers=_callers,
        allowed_tools=Either(_texts, _MCP_FILTER),
        authorization=text,
        connector_id=one_of(
            "connector_dropbox",
            "connector_gmail",
            "connector_googlecalendar",
            "connector_googledrive",
            "connector_microsoftteams",
            "connector_outlookcalendar",
            "connector_outlookemail",
            "connector_sharepoint",
        ),
        defer_loading=flag,
        headers=map_of(text),
        require_approval=Either(one_of("always", "never"), Object("", always=_MCP_FILTER, never=_MCP_FILTER)),
        server_description=text,
        server_url=text,
        tunnel_id=text,
    ),
    "programmatic_tool_calling": Object("type", type=text),
    "shell": Object(
        "type",
        type=text,
        allowed_callers=_callers,
        environment=Either(
            Object(
                "type",
                type=one_of("container_auto"),
                file_ids=_texts,
                memory_limit=_memory,
                network_policy=_NETWORK,
                skills=null,
            ),
            Object("type", type=one_of("local"), skills=null),
            Object("container_id type", container_id=text, type=one_of("container_reference")),
        ),
    ),
    "tool_search": Object(
        "type", type=text, description=text, execution=one_of("server", "client"), parameters=anything
    ),
    **{
        name: Object(
            "type",
            type=text,
            filters=Object("", allowed_domains=_texts),
            search_context_size=_CONTEXT_SIZE,
            user_location=Object("", **_LOCATION, type=one_of("approximate")),
        )
        for name in ("web_search", "web_search_2025_08_26")
    },
    **{
        name: Object(
            "type",
            type=text,
            search_content_types=List(one_of("text", "image")),
            search_context_size=_CONTEXT_SIZE,
            user_location=Object("type", type=one_of("approximate"), **_LOCATION),
        )
        for name in ("web_search_preview", "web_search_preview_2025_03_11")
    },
}
"""By type: the tools that vLLM accepts."""

CHOSEN_ON_SERVER = (
    "apply_patch",
    "code_interpreter",
    "computer",
    "computer_use",
    "computer_use_preview",
    "file_search",
    "image_generation",
    "shell",
    "web_search_preview",
    "web_search_preview_2025_03_11",
)
"""Types of the server's tools that a tool choice may name."""
SEPARATOR = "__"
"""Stands between a namespace and the name of a function in it."""
_INPUT_SCHEMA = {
    "type": "object",
    "properties": {"input": {"type": "string", "description": "The freeform text payload for this tool."}},
    "required": ["input"],
    "additionalProperties": False,
}
"""What vLLM shows as the parameters of a custom tool."""


def is_tool(value: Any) -> bool:
    """Return whether vLLM accepts the tool."""
    return _shape_of(value)(value) if isinstance(value, dict) and isinstance(value.get("type"), str) else False


def repeat_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """Return the tool as vLLM repeats it."""
    shape = _shape_of(tool)
    return shape.repeat(tool) if isinstance(shape, Object) else tool


def _shape_of(tool: dict[str, Any]) -> Check:
    return TOOLS.get(tool["type"], null)


def functions_of(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the functions that the model is shown, in chat's form."""
    return [
        {name: function[name] for name in _OF_FUNCTION if function.get(name) is not None}
        for function in _functions(tools)
    ]


_OF_FUNCTION = ("name", "description", "parameters", "strict", "defer_loading")
"""Fields of a function in vLLM's chat."""


def _functions(tools: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for tool in tools:
        if tool["type"] == "function":
            yield tool
        elif tool["type"] == "custom":
            yield {"name": tool["name"], "description": tool.get("description"), "parameters": _INPUT_SCHEMA}
        elif tool["type"] == "namespace":
            for function in tool["tools"]:
                if function["type"] == "function":
                    yield function | {"name": flat_name(tool["name"], function["name"])}


def as_template_sees(function: dict[str, Any]) -> dict[str, Any]:
    """Return a function of chat as vLLM gives it to the model's template."""
    return {
        "type": "function",
        "function": {"name": function["name"], "description": None, "parameters": None} | function,
    }


def names_function(choice: Any) -> bool:
    """Return whether a tool choice is one function or custom tool."""
    return isinstance(choice, dict) and choice["type"] in ("function", "custom")


def flat_name(namespace: str, name: str) -> str:
    """Return the name by which the model knows a function of a namespace."""
    return f"{namespace}{SEPARATOR}{name}"


def flat_choice(name: str, tools: list[dict[str, Any]]) -> str | None:
    """Return the name by which the model knows the tool that a request chose. None if vLLM refuses that choice.

    A function of a namespace may be chosen without the namespace if no other has its name.
    """
    shown = {function["name"] for function in _functions(tools)}
    if name in shown:
        return name
    inner = [
        flat_name(tool["name"], function["name"])
        for tool in tools
        if tool["type"] == "namespace"
        for function in tool["tools"]
        if function["name"] == name
    ]
    return inner[0] if len(inner) == 1 and inner[0] in shown else None


class ToolNames(msgspec.Struct, frozen=True):
    """How the model's names of tools are written in an answer."""

    custom: frozenset[str]
    """Names of the custom tools."""
    namespaced: dict[str, tuple[str, str]]
    """The model's name -> the namespace, and the name in it."""

    def split(self, name: str) -> tuple[str | None, str]:
        """Return the namespace, if any, and the name of a function that the model knows by this name."""
        return self.namespaced.get(name, (None, name))


NO_NAMES = ToolNames(frozenset(), {})
"""For a request without tools."""


def names_of(tools: list[dict[str, Any]]) -> ToolNames:
    """Return the names of a request's tools."""
    return ToolNames(
        custom=frozenset(tool["name"] for tool in tools if tool["type"] == "custom"),
        namespaced={
            flat_name(tool["name"], function["name"]): (tool["name"], function["name"])
            for tool in tools
            if tool["type"] == "namespace"
            for function in tool["tools"]
            if function["type"] == "function"
        },
    )
