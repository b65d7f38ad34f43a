"""What a turn costs in the database: as much as it says, however long the conversation before it."""

import random
from functools import reduce
from operator import add
from typing import Any

import numpy as np
from sqlalchemy import Engine, LargeBinary, cast, func, select

from migrations import schema
from proxy.recording.store import Store
from tests.unit.proxy.conftest import make_call, make_choice

TURNS, QUESTION_TOKENS, ANSWER_TOKENS = 50, 100, 150
"""Turns of the conversation, and tokens in each of its questions and answers."""
VOCABULARY = 150_000
WORDS = ("cat", "sat", "on", "a", "mat", "and", "then", "went", "away", "to", "find", "some", "more", "food")
ID_BYTES, LOGPROB_BYTES = 4, 4
"""A token's id and its logprob (float32), packed."""


def test_each_turn_of_a_conversation_takes_what_it_adds(engine: Engine, seed: Any) -> None:
    raw_bytes = _converse(Store(engine))
    stored = _bytes_by_turn(engine)
    assert len(stored) == TURNS
    assert max(stored[1:]) <= 1.1 * min(stored[1:])
    assert max(size / raw for size, raw in zip(stored, raw_bytes, strict=True)) <= 2.3


def _converse(store: Store) -> list[int]:
    """Hold a conversation; for each turn the bytes of its new ids, logprobs and texts, packed."""
    dice = random.Random(0)

    def words(count: int) -> str:
        return " ".join(dice.choice(WORDS) for _ in range(count))

    def ids(count: int) -> list[int]:
        return [dice.randrange(VOCABULARY) for _ in range(count)]

    messages: list[dict[str, str]] = []
    prompt: list[int] = []
    raw_bytes = []
    for turn in range(TURNS):
        question, answer, answer_ids = words(QUESTION_TOKENS), words(ANSWER_TOKENS), ids(ANSWER_TOKENS)
        logprobs = [float(np.float32(-abs(dice.gauss(0, 1)))) for _ in answer_ids]
        message = {"role": "assistant", "content": answer}
        messages, prompt = [*messages, {"role": "user", "content": question}], prompt + ids(QUESTION_TOKENS)
        choice = make_choice(message=message, token_ids=answer_ids, logprobs=logprobs)
        call = make_call(
            f"c{turn:02}", messages=messages, prompt_token_ids=prompt, choices=(choice,), created_at_s=1.7e9 + turn
        )
        with store.engine.begin() as connection:
            store.calls.write(connection, [call])
        messages, prompt = [*messages, message], prompt + answer_ids
        raw_bytes.append(
            ID_BYTES * (QUESTION_TOKENS + ANSWER_TOKENS) + LOGPROB_BYTES * ANSWER_TOKENS + len(question) + len(answer)
        )
    return raw_bytes


def _bytes_by_turn(engine: Engine) -> list[int]:
    """Of all columns, in the order of turns; what indexes take is beside that."""
    columns = schema.completions.c
    if engine.dialect.name == "postgresql":
        sizes = [func.pg_column_size(column) for column in columns]
    else:
        sizes = [func.length(cast(column, LargeBinary)) for column in columns]
    total = reduce(add, (func.coalesce(size, 0) for size in sizes))
    with engine.connect() as connection:
        return list(connection.scalars(select(total).order_by(columns.turn)))
