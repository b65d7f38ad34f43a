"""The ids within an answer that lead to it."""

from typing import Any

import pytest

from proxy.domain.answer_ids import answer_of
from proxy.domain.call import Choice
from proxy.wire.responses.answer import id_of, item_id
from whetstone.domain.ids import new_id

CALL = "chatcmpl-tool-9b1f0c62d4e84f7a9b1f0c62d4e84f7a"


@pytest.mark.parametrize("kind", ["message", "reasoning", "function_call", "custom_tool_call"])
@pytest.mark.parametrize("place", [0, 12])
def test_an_item_of_a_translated_response_has_the_id_of_its_answer(kind: str, place: int) -> None:
    response_id = id_of(f"chatcmpl-{new_id()}")
    assert answer_of(item_id(kind, response_id, place)) == response_id


@pytest.mark.parametrize(
    "name",
    [
        "01a217b6031d787f1bc30cfce962feff",
        "chatcmpl-01a217b6031d787f1bc30cfce962feff",
        CALL,
        "resp_1",
        "msg_68a1",
        "msg_01XFDUDYJgAACzvnptvVoYEL",
        "toolu_01A",
        "msg_a1_in_0",
    ],
)
def test_any_other_id_stays_as_it_is(name: str) -> None:
    assert answer_of(name) == name


def test_tool_calls_blocks_and_items_have_ids_each_once() -> None:
    calls = [{"id": CALL, "type": "function", "function": {"name": "move", "arguments": "{}"}}] * 2
    assert list(Choice(0, {"role": "assistant", "content": None, "tool_calls": calls}).inner_ids) == [CALL]
    blocks = [{"type": "text", "text": "so"}, {"type": "tool_use", "id": "toolu_01A09q90qw90lq917835", "input": {}}]
    assert list(Choice(0, {"role": "assistant", "content": blocks}).inner_ids) == ["toolu_01A09q90qw90lq917835"]
    items = [
        {"type": "reasoning", "id": "rs_68af4030baa48193"},
        {"type": "function_call", "id": "fc_68af4030592c8193", "call_id": "call_5v3Mkqw8CvGPZfPj"},
    ]
    found = list(Choice(0, {"role": "assistant", "content": items}).inner_ids)
    assert found == ["rs_68af4030baa48193", "fc_68af4030592c8193", "call_5v3Mkqw8CvGPZfPj"]


@pytest.mark.parametrize(
    "message",
    [
        {},
        {"role": "assistant", "content": "Hello", "tool_calls": []},
        {"role": "assistant", "content": ["text", None, {"text": "so"}]},
        {"tool_calls": "none"},
        *({"tool_calls": [{"id": call_id}]} for call_id in (None, 7, "", "functions.search:0", "call_0", "a b" * 9)),
    ],
)
def test_what_is_no_id_or_occurs_in_every_conversation_is_left_out(message: dict[str, Any]) -> None:
    assert list(Choice(0, message).inner_ids) == []
