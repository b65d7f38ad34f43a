"""Where a correction goes in a conversation."""

import pytest

from trainer.domain.examples.corrections import TEMPLATE, with_correction
from trainer.domain.examples.sft_examples import LeftOut


def test_it_follows_the_last_question_and_the_rest_stays() -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "First?"},
        {"role": "assistant", "content": "One."},
        {"role": "user", "content": "Second?", "name": "ann"},
        {"role": "tool", "content": "42", "tool_call_id": "c"},
    ]
    got = with_correction(messages, "Say {why}.", TEMPLATE)
    assert got[3] == {"role": "user", "content": "Second?\n\n(Note: Say {why}.)", "name": "ann"}
    assert [got[place] for place in (0, 1, 2, 4)] == [messages[place] for place in (0, 1, 2, 4)]
    assert messages[3]["content"] == "Second?"


def test_a_question_in_parts_gets_one_more() -> None:
    parts = [{"type": "text", "text": "Q"}]
    (got,) = with_correction([{"role": "user", "content": parts}], "no", " [{correction}]")
    assert got["content"] == [*parts, {"type": "text", "text": " [no]"}]


def test_without_a_question_there_is_no_place_for_it() -> None:
    with pytest.raises(LeftOut, match="no_question"):
        with_correction([{"role": "system", "content": "x"}], "no", TEMPLATE)
