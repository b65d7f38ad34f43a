"""Haystack's agent."""

import json
import os
from typing import Annotated

from haystack.components.agents import Agent
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import tool

QUESTIONS = ("What is the weather in Bern?", "Is it warmer than in Rome?", "Thank you. What should I wear?")


@tool
def weather(city: Annotated[str, "The city"]) -> str:
    """Tell the weather in a city."""
    return "18 degrees and sunny"


@tool
def clock(city: Annotated[str, "The city"]) -> str:
    """Tell the time in a city."""
    return "12:30"


generator = OpenAIChatGenerator(model=os.environ["MODEL"], api_base_url=os.environ["OPENAI_BASE_URL"])
agent = Agent(chat_generator=generator, tools=[weather, clock])
messages = [ChatMessage.from_system("You are a helpful assistant.")]
answers = []
for question in QUESTIONS:
    messages = agent.run(messages=[*messages, ChatMessage.from_user(question)])["messages"]
    answers.append(messages[-1].text)
print(json.dumps({"answers": answers, "id": messages[-1].meta.get("id")}))
