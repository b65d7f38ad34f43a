"""The words of an answer are stored once, and read the same wherever that is: in the view, and from the table."""

import json
from typing import Any

import pytest
from sqlalchemy import Engine, select, text

from migrations import schema
from migrations.words import response_text
from tests.conftest import Seed

c = schema.completions.c
ODD = 'a "quoted" \\ line\n\u2028 ü 😀 \\u0000 \ufffd %s :x'
PARTS = [{"type": "text", "text": "two"}, {"type": "text", "text": " parts"}]
SAID: dict[str, tuple[Any, str | None, str | None]] = {
    "a string": ({"role": "assistant", "content": "hello"}, None, "hello"),
    "odd": ({"role": "assistant", "content": ODD}, None, ODD),
    "empty": ({"role": "assistant", "content": ""}, None, ""),
    "like json": ({"role": "assistant", "content": '["x"]'}, None, '["x"]'),
    "like null": ({"role": "assistant", "content": "null"}, None, "null"),
    "null": ({"role": "assistant", "content": None, "tool_calls": [{"id": "c"}]}, None, None),
    "absent": ({"role": "assistant"}, None, None),
    "parts": ({"role": "assistant", "content": PARTS}, "two parts", "two parts"),
    "parts alone": ({"role": "assistant", "content": PARTS}, None, None),
    "an object": ({"role": "assistant", "content": {"content": "x"}}, None, None),
    "a number": ({"role": "assistant", "content": 7}, None, None),
    "a truth": ({"role": "assistant", "content": True}, None, None),
    "no object": (["content"], None, None),
    "no message": (None, "alone", "alone"),
    "nothing": (None, None, None),
    "twice": ({"role": "assistant", "content": "before"}, "before", "before"),
}
"""A row's `response` and `response_text`, and what it says."""
WORDS = [words for *_, words in SAID.values()]


@pytest.fixture
def said(seed: Seed) -> None:
    """A turn for each."""
    seed.trajectory("t", turns=0)
    for turn, (response, stored, _) in enumerate(SAID.values()):
        seed.completion("t", turn, response=response, response_text=stored)


def shown(engine: Engine) -> list[str | None]:
    """As the view has it."""
    with engine.connect() as connection:
        return list(connection.scalars(text("SELECT response_text FROM admin_completions ORDER BY turn")))


@pytest.mark.usefixtures("said")
def test_the_view_and_who_reads_the_table_are_told_the_same_words(engine: Engine) -> None:
    with engine.connect() as connection:
        read = list(connection.scalars(select(response_text).order_by(c.turn)))
        found = connection.scalars(select(c.turn).where(response_text.icontains('QUOTED" \\ L', autoescape=True)))
        assert [list(SAID)[turn] for turn in found] == ["odd"]
    assert dict(zip(SAID, read, strict=True)) == dict(zip(SAID, WORDS, strict=True))
    assert shown(engine) == WORDS


def test_what_sqlite_cannot_take_apart_fails_nobody_who_reads_the_others(
    engine: Engine, seed: Seed, database_kind: str
) -> None:
    if database_kind == "postgresql":
        pytest.skip("PostgreSQL has taken it apart before it is stored")
    seed.trajectory("t", turns=2)
    deep = "[" * 3000 + "]" * 3000
    with engine.begin() as connection:
        told = text("UPDATE completions SET response = :told WHERE turn = 0")
        connection.execute(told, {"told": json.dumps({"content": "x", "odd": "?"}).replace('"?"', deep)})
    assert shown(engine) == [None, "answer 1"]
    with engine.connect() as connection:
        assert list(connection.scalars(select(c.turn).where(response_text.icontains("answer")))) == [1]
