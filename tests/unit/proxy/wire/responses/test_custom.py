"""The text that a custom tool is called with."""

import json

import pytest

from proxy.wire.responses.custom import InputReader, input_of


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
