"""Pydantic AI, on chat, on responses and on messages."""

import json
import os
import sys
from typing import Any

from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel

QUESTIONS = ("What is the weather in Bern?", "Is it warmer than in Rome?", "Thank you. What should I wear?")
MODELS: dict[str, Any] = {"chat": OpenAIChatModel, "responses": OpenAIResponsesModel, "messages": AnthropicModel}

agent = Agent(MODELS[sys.argv[1]](os.environ["MODEL"]), instructions="You are a helpful assistant.")


@agent.tool_plain
def weather(city: str) -> str:
    """Tell the weather in a city."""
    return "18 degrees and sunny"


@agent.tool_plain
def clock(city: str) -> str:
    """Tell the time in a city."""
    return "12:30"


messages: Any = None
answers = []
for question in QUESTIONS:
    result = agent.run_sync(question, message_history=messages)
    messages = result.all_messages()
    answers.append(result.output)
print(json.dumps({"answers": answers, "id": messages[-1].provider_response_id}))
