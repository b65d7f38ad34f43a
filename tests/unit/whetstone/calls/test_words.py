"""The first words of a prompt: whatever apps send, and however much is read."""

import json
from typing import Any

import pytest
from sqlalchemy import Engine, select

from migrations import schema
from tests.conftest import Seed
from whetstone.calls.words import LINE, beginning, first_line, first_words


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        (None, ""),
        ([], ""),
        ([{"prompt": "once upon"}], "once upon"),
        (["a plain prompt"], "a plain prompt"),
        ([{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "image_url"}]}], "one"),
        ([{"role": "user", "content": "first"}, {"role": "tool", "content": "42"}], "first"),
        ([{"role": "tool", "content": "42"}], "42"),
        ([{"role": "user", "content": "a\n\n b\x1b[2J"}], "a b·[2J"),
        ([{"role": "user", "content": None}], ""),
        ([[1, 2, 3]], ""),
    ],
)
def test_the_first_words_are_those_of_the_last_user_message(messages: Any, words: str) -> None:
    assert first_words(messages) == words
    assert first_line(json.dumps(messages)) == words


def test_json_that_is_cut_off_anywhere_has_the_words_before_the_cut() -> None:
    whole = json.dumps([{"role": "user", "content": "Grüße 🙂 an alle " * 40}], ensure_ascii=False)
    words = [first_line(whole[:length]) for length in range(len(whole) + 1)]
    assert words[-1] == ("Grüße 🙂 an alle " * 40)[:LINE].strip()
    assert all(words[-1].startswith(some) for some in words)


def test_json_nested_too_deeply_has_no_words() -> None:
    assert first_line("[" * 5000) == ""


def test_the_beginning_of_large_messages_is_read_alone(engine: Engine, seed: Seed) -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 100_000}}
    messages = [{"role": "user", "content": [{"type": "text", "text": "What is this?"}, picture]}]
    seed.trajectory("t", turns=0)
    seed.completion("t", 0, new_messages=messages)
    with engine.connect() as connection:
        read = connection.execute(select(beginning(schema.completions.c.new_messages, 1000))).scalar()
    assert read is not None and len(read) == 1000
    # PostgreSQL orders the keys of an object by length: "role" comes first there too.
    assert first_line(read) == "What is this?"
