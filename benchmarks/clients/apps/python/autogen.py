"""AutoGen's assistant."""

import asyncio
import json
import os

from autogen_agentchat.agents import AssistantAgent
from autogen_core.models import ModelInfo
from autogen_ext.models.openai import OpenAIChatCompletionClient

QUESTIONS = ("What is the weather in Bern?", "Is it warmer than in Rome?", "Thank you. What should I wear?")


async def weather(city: str) -> str:
    """Tell the weather in a city."""
    return "18 degrees and sunny"


async def clock(city: str) -> str:
    """Tell the time in a city."""
    return "12:30"


async def main() -> None:
    client = OpenAIChatCompletionClient(
        model=os.environ["MODEL"],
        base_url=os.environ["OPENAI_BASE_URL"],
        model_info=ModelInfo(
            vision=False, function_calling=True, json_output=True, family="unknown", structured_output=True
        ),
    )
    agent = AssistantAgent("helper", model_client=client, tools=[weather, clock])
    results = [await agent.run(task=question) for question in QUESTIONS]
    print(json.dumps({"answers": [result.messages[-1].to_text() for result in results], "id": None}))


asyncio.run(main())
