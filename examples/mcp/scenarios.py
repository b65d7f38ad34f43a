"""Questions made from a list of MCP tools, and what an attempt at one of them is worth.

Walks over the tools and the schemas of their arguments. A question can be made from a tool if the first line of its
description has the names of all its arguments, and it returns an object with something else in it. An argument is one
of the examples in the schema (every second one is held out), or, in deeper questions, what another tool returns under
that name. The right answer is what the tools themselves return.
"""

import json
import random
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mcp.types import Tool

Split = Literal["train", "eval"]
Call = tuple[str, dict[str, Any]]
"""A tool's name, and its arguments."""
CallTool = Callable[[str, dict[str, Any]], Awaitable[dict[str, Any]]]
"""Calls a tool, and returns the object that it returns."""
SYSTEM = "Use the tools. Then answer with the value alone."
SMALL = "Tools: {tools}. Call one by its name and the item. Then answer in one word."


@dataclass(frozen=True)
class Scenario:
    """A question, the calls that it takes, and its answer."""

    question: str
    calls: tuple[Call, ...]
    answer: str

    def shares(self, calls: Sequence[Call], answer: str) -> tuple[float, float, float]:
        """Return which share of the tools was called, and of the calls made; and whether the answer is right."""
        names = [name for name, _ in calls]
        tools = sum(name in names for name, _ in self.calls) / len(self.calls)
        made = sum(call in calls for call in self.calls) / len(self.calls)
        return tools, made, float(plain(answer) == plain(self.answer))


def plain(text: str) -> str:
    """Return a text without what makes no difference to it."""
    return text.strip().strip("`*'\".").casefold()


def result_key(tool: Tool) -> str | None:
    """Return the property that a tool is used for; None: no question can be made from it."""
    arguments = tool.input_schema.get("properties", {})
    noun = noun_of(tool)
    if not arguments or not all(re.search(rf"\b{name}\b", noun) for name in arguments):
        return None
    return next((name for name in (tool.output_schema or {}).get("properties", {}) if name not in arguments), None)


def noun_of(tool: Tool) -> str:
    return (tool.description or "").strip().partition("\n")[0].rstrip(".")


def values(schema: dict[str, Any], split: Split) -> list[Any]:
    """Return the values of an argument that a split has."""
    listed = schema.get("enum") or schema.get("examples") or []
    return list(listed[int(split == "eval") :: 2])


async def scenario(tools: Sequence[Tool], call: CallTool, split: Split, rng: random.Random, depth: int) -> Scenario:
    """Return a question that takes up to `depth` calls after one another."""
    usable = {tool.name: tool for tool in tools if result_key(tool) and _is_drawable(tool, split)}
    if not usable:
        raise ValueError("no tool has a description with its arguments, examples of them, and an object as its result")
    noun, calls, answer = await _nested(rng.choice(list(usable.values())), usable, call, split, rng, depth)
    return Scenario(f"What is the {noun}?", tuple(calls), str(answer))


def _is_drawable(tool: Tool, split: Split) -> bool:
    return all(values(schema, split) for schema in tool.input_schema["properties"].values())


async def _nested(
    tool: Tool, usable: dict[str, Tool], call: CallTool, split: Split, rng: random.Random, depth: int
) -> tuple[str, list[Call], Any]:
    """Return what to ask for, the calls in their order, and what the last one returns."""
    arguments: dict[str, Any] = {}
    nouns: dict[str, str] = {}
    calls: list[Call] = []
    for name, schema in tool.input_schema["properties"].items():
        inner = [other for other in usable.values() if result_key(other) == name] if depth > 1 else []
        if inner and rng.random() < 0.5:
            noun, before, arguments[name] = await _nested(rng.choice(inner), usable, call, split, rng, depth - 1)
            nouns[name], calls = f"the {noun}", [*calls, *before]
        else:
            arguments[name] = rng.choice(values(schema, split))
            nouns[name] = str(arguments[name])
    noun = re.sub(rf"\b({'|'.join(nouns)})\b", lambda match: nouns[match[0]], noun_of(tool))
    result = await call(tool.name, arguments)
    return noun, [*calls, (tool.name, arguments)], result[result_key(tool) or ""]


def openai_tool(tool: Tool) -> dict[str, Any]:
    """Return a tool as an OpenAI client offers it, without the examples."""
    properties = {
        name: {key: value for key, value in schema.items() if key not in ("examples", "title")}
        for name, schema in tool.input_schema.get("properties", {}).items()
    }
    parameters = {"type": "object", "properties": properties, "required": tool.input_schema.get("required", [])}
    function = {"name": tool.name, "description": tool.description or "", "parameters": parameters}
    return {"type": "function", "function": function}


def written_call(text: str, tools: Sequence[Tool]) -> Call | None:
    """Return the call that a text like `stock lamp` is: a tool, and its arguments in order."""
    name, *given = text.split() or [""]
    tool = next((tool for tool in tools if tool.name == name), None)
    names = list(tool.input_schema.get("properties", {})) if tool else []
    return (name, dict(zip(names, given, strict=True))) if tool and len(given) == len(names) else None


def arguments_of(text: str) -> dict[str, Any]:
    """Return the arguments of an OpenAI tool call; none where the text is no JSON object."""
    try:
        given = json.loads(text)
    except ValueError:
        return {}
    return given if isinstance(given, dict) else {}
