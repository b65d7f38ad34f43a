"""The `instructor` package by JSON schema. Its tools are not strict: vLLM lets their arguments be anything."""

from collections.abc import Iterator
from typing import Any, Literal

import instructor
import openai
import pytest
from instructor.core import InstructorRetryException
from pydantic import BaseModel, field_validator

from tests.clients.conftest import KEY, MODEL, TERSE, Served

pytestmark = [pytest.mark.stack, pytest.mark.long(part="clients")]


class Move(BaseModel):
    """Take a cell."""

    cell: Literal[0, 1, 2, 3, 4, 5, 6, 7, 8]


class Impossible(Move):
    """Every cell is taken."""

    @field_validator("cell")
    @classmethod
    def never(cls, cell: int) -> int:
        raise ValueError(f"{cell} is taken")


@pytest.fixture
def client(served: Served) -> Iterator[instructor.Instructor]:
    with openai.OpenAI(base_url=served.base_url, api_key=KEY) as plain:
        yield instructor.from_openai(plain, mode=instructor.Mode.JSON_SCHEMA)


def question_of(served: Served) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": "play"}], "extra_headers": served.headers}
    return {"model": MODEL, "max_tokens": 64, **body, **TERSE}


def test_an_answer_is_structured(client: instructor.Instructor, served: Served) -> None:
    move, completion = client.chat.completions.create_with_completion(response_model=Move, **question_of(served))
    row = served.one()
    assert move.cell == Move.model_validate_json(row.response_text).cell
    assert (completion.id, row.why_not_trained) == (row.upstream_id, "greedy")


def test_a_structured_answer_grows_while_it_streams(client: instructor.Instructor, served: Served) -> None:
    moves = list(client.chat.completions.create_partial(response_model=Move, **question_of(served)))
    row = served.one()
    assert moves[-1].cell == Move.model_validate_json(row.response_text).cell
    assert row.streamed


def test_a_retried_answer_is_another_turn(client: instructor.Instructor, served: Served) -> None:
    with pytest.raises(InstructorRetryException):
        client.chat.completions.create(response_model=Impossible, max_retries=1, **question_of(served))
    first, second = served.conversation(2)
    assert [message["content"] for message in second.new_messages[:2]] == ["play", first.response_text]
    assert "is taken" in second.new_messages[2]["content"]
