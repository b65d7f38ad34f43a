"""What was said, as pages show it: every dialect, within bounds, and nothing left out without a word."""

import json
from typing import Any

import pytest

from proxy.dashboard.views.message_view import (
    MOST_CHARACTERS,
    MOST_NAME,
    Message,
    indented,
    marked,
    messages_of,
    shortened,
)
from tests.unit.proxy.ui_scene import HOSTILE


def kinds(message: Message) -> list[tuple[str, str]]:
    return [(part.kind, part.text) for part in message.parts]


@pytest.mark.parametrize(
    ("value", "role", "parts"),
    [
        ({"role": "user", "content": "hi"}, "user", [("text", "hi")]),
        ({"role": "developer", "content": "be brief"}, "system", [("text", "be brief")]),
        ({"role": "user", "content": [{"type": "text", "text": "a"}, "b"]}, "user", [("text", "a"), ("text", "b")]),
        ({"role": "user", "content": [{"type": "input_text", "text": "a"}]}, "user", [("text", "a")]),
        ({"role": "assistant", "content": None, "refusal": "no"}, "assistant", [("text", "no")]),
        (
            {"role": "assistant", "content": "x", "reasoning_content": "hm"},
            "assistant",
            [("thinking", "hm"), ("text", "x")],
        ),
        (
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}, {"type": "redacted_thinking"}]},
            "assistant",
            [("thinking", "hm"), ("thinking", "(only its provider can read it)")],
        ),
        ({"role": "tool", "content": "42", "tool_call_id": "c"}, "tool", [("result", "42")]),
        (
            {"role": "user", "content": [{"type": "tool_result", "content": [{"type": "text", "text": "42"}]}]},
            "user",
            [("result", "42")],
        ),
        ({"type": "function_call_output", "call_id": "c", "output": "7"}, "tool", [("result", "7")]),
        ({"type": "reasoning", "summary": [{"text": "a"}, {"text": "b"}]}, "assistant", [("thinking", "a\nb")]),
        ({"type": "message", "role": "user", "content": "hi"}, "user", [("text", "hi")]),
        ({"prompt": "Once"}, "prompt", [("text", "Once")]),
        ({"prompt": [1, 2]}, "prompt", [("json", "[\n  1,\n  2\n]")]),
        ("plain", "message", [("text", "plain")]),
        (7, "message", [("json", "7")]),
        ({"role": "user", "content": {"odd": 1}}, "user", [("json", '{\n  "odd": 1\n}')]),
        (
            {"role": "user", "content": [{"type": "new_kind", "x": 1}]},
            "user",
            [("json", '{\n  "type": "new_kind",\n  "x": 1\n}')],
        ),
    ],
)
def test_each_dialect_says_who_and_what(value: Any, role: str, parts: list[tuple[str, str]]) -> None:
    (message,) = messages_of([value])
    assert (message.role, kinds(message)) == (role, parts)


@pytest.mark.parametrize(
    "call",
    [
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"x":1}'}}]},
        {"role": "assistant", "function_call": {"name": "f", "arguments": '{"x":1}'}},
        {"role": "assistant", "content": [{"type": "tool_use", "name": "f", "input": {"x": 1}}]},
        {"type": "function_call", "name": "f", "arguments": '{"x":1}'},
    ],
)
def test_a_tool_call_is_one_whoever_writes_it(call: Any) -> None:
    (message,) = messages_of(call)
    (part,) = message.parts
    assert (message.role, part.kind, part.name, part.text) == ("assistant", "call", "f", '{\n  "x": 1\n}')


def test_arguments_that_are_no_json_stand_as_they_are() -> None:
    (message,) = messages_of({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"x":'}}]})
    assert message.parts[0].text == '{"x":'


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        (
            {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 4000}},
            ("image", "image/png, 2 KiB"),
        ),
        ({"type": "image_url", "image_url": {"url": "https://x.example/a.png"}}, ("image", "https://x.example/a.png")),
        ({"type": "input_image", "image_url": "https://x.example/a.png"}, ("image", "https://x.example/a.png")),
        ({"type": "input_audio", "input_audio": {"data": "A" * 8192, "format": "wav"}}, ("sound", "wav, 6 KiB")),
        (
            {"type": "image", "source": {"media_type": "image/jpeg", "data": "A" * 4_000_000}},
            ("image", "image/jpeg, 2.9 MiB"),
        ),
        ({"type": "file", "file": {"file_id": "file-1"}}, ("file", "file-1")),
        ({"type": "image_url"}, ("image", "image_url")),
    ],
)
def test_media_are_named_and_never_fetched(part: Any, expected: tuple[str, str]) -> None:
    (message,) = messages_of({"role": "user", "content": [part]})
    assert [(one.kind, one.name, one.text) for one in message.parts] == [("media", *expected)]


def test_a_long_text_is_cut_and_says_by_how_much() -> None:
    (message,) = messages_of({"role": "user", "content": "x" * (MOST_CHARACTERS + 17)})
    assert len(message.parts[0].text) == MOST_CHARACTERS
    assert message.parts[0].cut == 17


def test_names_of_any_length_fit() -> None:
    (message,) = messages_of({"role": "r" * 1000, "name": "n" * 1000, "content": "x"})
    assert len(message.role) == len(message.name) == MOST_NAME


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("write to [email] now", [("write to ", False), ("[email]", True), (" now", False)]),
        ("[redaction failed]", [("[redaction failed]", True)]),
        ("nothing", [("nothing", False)]),
        ("", [("", False)]),
        ("[badge][card]", [("[badge]", True), ("[card]", True)]),
        ("[Not One]", [("[Not One]", False)]),
    ],
)
def test_what_was_taken_out_is_marked(text: str, pieces: list[tuple[str, bool]]) -> None:
    assert marked(text) == pieces
    assert "".join(piece for piece, _ in marked(text)) == text


def test_a_line_in_a_list_is_short() -> None:
    assert shortened("a  b\nc", 10) == "a b c"
    assert shortened("word " * 50, 20).endswith("…")
    assert len(shortened(HOSTILE * 20, 30)) <= 30


def test_no_message_is_none() -> None:
    assert messages_of(None) == []
    assert messages_of([]) == []


def test_what_is_nested_deeply_is_not_written_out_to_be_cut_off() -> None:
    """Indented, twelve kilobytes of brackets are ten megabytes."""
    deep = "[" * 300 + "]" * 300
    assert len(indented(json.loads(deep), 6_000)) == 6_000
    assert indented({"a": [1, "é"]}, 6_000) == '{\n  "a": [\n    1,\n    "é"\n  ]\n}'
