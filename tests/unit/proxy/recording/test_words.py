"""What was said is stored once, in the message or beside it, and all who read it find it."""

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import pytest
from sqlalchemy import Engine, select, text

from migrations import schema
from proxy.dashboard.queries import trajectories
from proxy.domain.call import Choice
from proxy.recording.store import Store
from proxy.trajectories.store import ThreadTables
from tests.unit.proxy.conftest import make_call, make_choice

c = schema.completions.c
PARTS = [{"type": "text", "text": "in"}, {"type": "text", "text": " parts"}]


def choice_of(content: Any, **values: Any) -> Choice:
    return make_choice(message={"role": "assistant", "content": content}, **values)


CHOICES: dict[str, tuple[Choice, str | None, str | None]] = {
    "text": (choice_of("Hello"), None, "Hello"),
    "empty": (choice_of(""), None, ""),
    "nul": (choice_of("a\x00b \\u0000"), None, "a\ufffdb \\u0000"),
    "odd": (choice_of('"\\ \n ü 😀 \u2028'), None, '"\\ \n ü 😀 \u2028'),
    "tools": (choice_of(None), None, None),
    "parts": (choice_of(PARTS, text_of_parts="in\x00 parts"), "in\ufffd parts", "in\ufffd parts"),
    "both": (choice_of("Hello", text_of_parts="Hello"), None, "Hello"),
    "no parts": (choice_of([], text_of_parts=""), "", ""),
    "nothing": (Choice(index=0, message={}), None, None),
}
"""A choice, what the table has in `response_text`, and what it said."""


def written(engine: Engine, choices: Sequence[Choice], **values: Any) -> None:
    store = Store(engine)
    with engine.begin() as connection:
        calls = [make_call(f"c{place}", f"t{place}", choices=(one,), **values) for place, one in enumerate(choices)]
        store.calls.write(connection, calls)


@pytest.mark.usefixtures("seed")
@pytest.mark.parametrize("name", CHOICES)
def test_a_text_is_stored_once_and_shown_as_it_was_said(engine: Engine, name: str) -> None:
    choice, stored, words = CHOICES[name]
    written(engine, [choice])
    with engine.connect() as connection:
        assert connection.execute(select(c.response_text)).scalar_one() == stored
        shown = connection.execute(text("SELECT response_text FROM admin_completions")).scalar_one()
    assert shown == words


@pytest.mark.usefixtures("seed")
def test_a_batch_of_all_kinds_is_as_they_are_one_by_one(engine: Engine) -> None:
    written(engine, [choice for choice, *_ in CHOICES.values()])
    with engine.connect() as connection:
        stored = list(connection.scalars(select(c.response_text).order_by(c.id)))
        shown = list(connection.scalars(text("SELECT response_text FROM admin_completions ORDER BY completion_id")))
    assert stored == [one for _, one, _ in CHOICES.values()]
    assert shown == [words for *_, words in CHOICES.values()]


def test_search_finds_words_wherever_they_are_stored(engine: Engine, seed: Any) -> None:
    written(
        engine, [choice_of("Take the Train"), choice_of(PARTS, text_of_parts="a train in parts"), choice_of("a bus")]
    )
    seed.trajectory("old", turns=0)
    seed.completion("old", 0, response={"role": "assistant", "content": "TRAINS"}, response_text="TRAINS")
    with engine.connect() as connection:
        matches = trajectories.answers(connection, "default", {"text": "train"}, None)
        nothing = trajectories.answers(connection, "default", {"text": "assistant"}, None)
    words = {row["id"]: row["response_text"] for row in matches.rows}
    assert words == {"c0": "Take the Train", "c1": "a train in parts", "old-0": "TRAINS"}
    assert nothing.rows == []


@pytest.mark.usefixtures("seed")
@pytest.mark.parametrize(
    ("choice", "has_answered"),
    [
        (choice_of("Hello", token_ids=None), True),
        (choice_of("", token_ids=None), True),
        (choice_of(PARTS, token_ids=None, text_of_parts="in parts"), True),
        (choice_of(None), True),
        (choice_of(None, token_ids=None), False),
        (Choice(index=0, message={}), False),
    ],
)
def test_who_spoke_without_token_ids_has_spoken(engine: Engine, choice: Choice, has_answered: bool) -> None:
    written(engine, [choice], created_at_s=datetime(2026, 1, 1, tzinfo=UTC).timestamp())
    trail = asyncio.run(ThreadTables(engine, "default").trail("t0", 0.0))
    assert trail is not None
    assert [pin.policy for pin in trail.pins] == (["starter"] if has_answered else [])
