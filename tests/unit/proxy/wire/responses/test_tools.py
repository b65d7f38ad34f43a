"""Tools of a Responses request, and the text that a custom tool is called with."""

import json
from typing import Any

import pytest

from proxy.wire.responses.tools import InputReader, flat_choice, input_of, is_tool, names_of, repeat_tool

ADD = {"type": "function", "name": "add"}
NOTES = {
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
    ids=str,
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


@pytest.mark.parametrize("text", ["", "a", 'é\n"\\', "🙂 \t\x00", "*** Begin Patch\n+x = {}\n"])
@pytest.mark.parametrize("ascii_only", [True, False])
def test_a_text_is_read_while_it_arrives(text: str, ascii_only: bool) -> None:
    arguments = json.dumps({"input": text}, ensure_ascii=ascii_only)
    assert input_of(arguments) == text
    for size in (1, 2, 5, len(arguments)):
        reader = InputReader()
        pieces = [reader.feed(arguments[at : at + size]) for at in range(0, len(arguments), size)]
        assert "".join(pieces) == text
        if size == 1 and len(text) > 1:
            assert pieces.count("") < len(pieces) - 1


@pytest.mark.parametrize("arguments", ["", "text", "[1]", '{"input": 5}', '{"inp', '{"input": "a'])
def test_arguments_of_another_form_are_the_text(arguments: str) -> None:
    assert input_of(arguments) == arguments


def test_a_broken_text_is_not_read() -> None:
    assert InputReader().feed('{"input": "a\n"}') == ""
    assert InputReader().feed('{"more": 1, "input": "a"}') == ""
