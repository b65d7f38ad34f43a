"""Tools of a Responses request: which the model sees, and how they are repeated."""

from typing import Any

import pytest

from proxy.wire.responses.tools import flat_choice, is_tool, names_of, repeat_tool

ADD: dict[str, Any] = {"type": "function", "name": "add"}
NOTES: dict[str, Any] = {
    "type": "namespace",
    "name": "notes",
    "description": "Notes",
    "tools": [ADD, {"type": "custom", "name": "raw"}],
}


@pytest.mark.parametrize(
    ("tool", "nulls"),
    [
        ({"type": "web_search", "more": 1}, {"filters", "search_context_size", "user_location"}),
        ({"type": "local_shell"}, set()),
        ({"type": "shell"}, {"allowed_callers", "environment"}),
        (
            {"type": "custom", "name": "a", "format": {"type": "text"}},
            {"allowed_callers", "defer_loading", "description"},
        ),
    ],
    ids=lambda value: value["type"] if isinstance(value, dict) else "",
)
def test_a_tool_is_repeated_with_all_its_keys(tool: dict[str, Any], nulls: set[str]) -> None:
    assert is_tool(tool)
    assert repeat_tool(tool) == tool | dict.fromkeys(nulls)


def test_unknown_keys_come_last() -> None:
    tool = {"more": 1, "type": "web_search", "user_location": {"more": 2, "city": "Rome"}}
    assert list(repeat_tool(tool)) == ["type", "filters", "search_context_size", "user_location", "more"]
    assert list(repeat_tool(tool)["user_location"]) == ["city", "country", "region", "timezone", "type", "more"]


def test_tools_within_a_namespace_are_repeated_whole() -> None:
    add, raw = repeat_tool(NOTES)["tools"]
    assert add == ADD | dict.fromkeys(
        ("allowed_callers", "defer_loading", "description", "output_schema", "parameters", "strict")
    )
    assert raw["format"] is None


def test_a_function_is_chosen_by_its_own_name_or_the_whole_one() -> None:
    tools = [NOTES, {"type": "function", "name": "move"}]
    assert (flat_choice("move", tools), flat_choice("add", tools)) == ("move", "notes__add")
    assert flat_choice("notes__add", tools) == "notes__add"
    assert flat_choice("raw", tools) is None  # The model is not shown it.
    assert flat_choice("add", [NOTES, NOTES | {"name": "other"}]) is None
    names = names_of(tools)
    assert (names.split("notes__add"), names.split("move")) == (("notes", "add"), (None, "move"))
