"""The OpenAI Agents SDK, tracing off, on chat and on responses."""

import asyncio
from typing import Any

import openai
import pytest
from agents import (
    Agent,
    Model,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
)

from tests.clients.conftest import KEY, MODEL, Served

pytestmark = [pytest.mark.stack, pytest.mark.long(part="clients")]

KINDS = ["chat.completions", "responses"]


def run(kind: str, served: Served, *turns: str, **values: Any) -> list[Any]:
    """Say one turn after the other; what the agent answered."""

    async def converse() -> list[Any]:
        async with openai.AsyncOpenAI(base_url=served.base_url, api_key=KEY, default_headers=served.headers) as client:
            maker = OpenAIChatCompletionsModel if kind == "chat.completions" else OpenAIResponsesModel
            model: Model = maker(model=MODEL, openai_client=client)
            agent = Agent(name="player", instructions="You play tic-tac-toe.", model=model, **values)
            results: list[Any] = []
            for turn in turns:
                history = results[-1].to_input_list() if results else []
                results.append(await Runner.run(agent, [*history, {"role": "user", "content": turn}]))
            return results

    return asyncio.run(converse())


@pytest.mark.parametrize("kind", KINDS)
def test_a_conversation_is_a_trajectory(served: Served, kind: str) -> None:
    results = run(kind, served, "hi", "and now?", model_settings=ModelSettings(max_tokens=32))
    rows = served.conversation(2)
    assert [row.response_text for row in rows] == [result.final_output for result in results]
    assert [row.endpoint for row in rows] == [kind, kind]
    assert [row.follows for row in rows] == [None, rows[0].id]


@pytest.mark.parametrize("kind", KINDS)
def test_a_tool_is_called_and_its_result_read(served: Served, kind: str) -> None:
    looked: list[str] = []

    @function_tool
    def look() -> str:
        """Look at the board."""
        looked.append("X.. .O. ...")
        return looked[-1]

    settings = ModelSettings(max_tokens=64, temperature=0, tool_choice="required")
    (result,) = run(kind, served, "play", tools=[look], model_settings=settings)
    called, answered = served.conversation(2)
    assert looked == ["X.. .O. ..."]
    assert called.why_not_trained == "greedy"
    assert answered.response_text == result.final_output


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_is_recorded_as_it_was_seen(served: Served, kind: str) -> None:
    async def ask() -> str:
        async with openai.AsyncOpenAI(base_url=served.base_url, api_key=KEY) as client:
            maker = OpenAIChatCompletionsModel if kind == "chat.completions" else OpenAIResponsesModel
            agent = Agent(
                name="player",
                model=maker(model=MODEL, openai_client=client),
                model_settings=ModelSettings(max_tokens=32),
            )
            result = Runner.run_streamed(agent, "hi")
            return "".join(
                [
                    event.data.delta
                    async for event in result.stream_events()
                    if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
                ]
            )

    assert asyncio.run(ask()) == served.one().response_text
