"""Pydantic AI: agents on its OpenAI and its Anthropic models."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Literal

import anthropic
import openai
import pytest
from pydantic import BaseModel
from pydantic_ai import Agent, ModelSettings, ToolOutput
from pydantic_ai.models import Model
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.profiles import ModelProfile
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

from tests.clients.conftest import KEY, MODEL, Served

pytestmark = [
    pytest.mark.stack,
    pytest.mark.long(part="clients"),
    pytest.mark.parametrize("kind", ["chat.completions", "responses", "messages"]),
]


class Move(BaseModel):
    """Take a cell."""

    cell: Literal[0, 1, 2, 3, 4, 5, 6, 7, 8]


@asynccontextmanager
async def model_of(kind: str, served: Served) -> AsyncIterator[Model]:
    """Its model for an endpoint."""
    if kind == "messages":
        async with anthropic.AsyncAnthropic(base_url=served.host, api_key=KEY) as client:
            # It asks only models that it knows for strict tools.
            profile = ModelProfile(supports_json_schema_output=True)
            yield AnthropicModel(MODEL, provider=AnthropicProvider(anthropic_client=client), profile=profile)
        return
    async with openai.AsyncOpenAI(base_url=served.base_url, api_key=KEY) as client:
        kinds = {"chat.completions": OpenAIChatModel, "responses": OpenAIResponsesModel}
        yield kinds[kind](MODEL, provider=OpenAIProvider(openai_client=client))


def test_a_conversation_is_a_trajectory(served: Served, kind: str) -> None:
    async def ask() -> list[str]:
        async with model_of(kind, served) as model:
            settings = ModelSettings(max_tokens=32, extra_headers=served.headers)
            agent = Agent(model, instructions="You play tic-tac-toe.", model_settings=settings)
            first = await agent.run("hi")
            second = await agent.run("and now?", message_history=first.all_messages())
            return [first.output, second.output]

    answers = asyncio.run(ask())
    rows = served.conversation(2)
    assert [row.response_text for row in rows] == answers
    assert [row.endpoint for row in rows] == [kind, kind]
    assert [row.follows for row in rows] == [None, rows[0].id]


def test_a_stream_is_recorded_as_it_was_seen(served: Served, kind: str) -> None:
    async def ask() -> str:
        async with model_of(kind, served) as model:
            agent = Agent(model, model_settings=ModelSettings(max_tokens=32))
            async with agent.run_stream("hi") as result:
                return "".join([piece async for piece in result.stream_text(delta=True)])

    text = asyncio.run(ask())
    row = served.one()
    assert (row.response_text, row.streamed) == (text, True)


def test_an_answer_is_structured(served: Served, kind: str) -> None:
    async def ask() -> Any:
        async with model_of(kind, served) as model:
            agent: Any = Agent(model, output_type=ToolOutput(Move, strict=True))
            return (await agent.run("play", model_settings=ModelSettings(max_tokens=64, temperature=0))).output

    move = asyncio.run(ask())
    row = served.one()
    assert isinstance(move, Move)
    assert str(move.cell) in served.decoded(row)
    assert row.why_not_trained == "greedy"
