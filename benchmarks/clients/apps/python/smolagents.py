"""smolagents: the agent that calls tools, and the agent that writes code."""

import json
import os
import sys

from smolagents import CodeAgent, OpenAIModel, ToolCallingAgent, tool

QUESTIONS = ("What is the weather in Bern?", "Is it warmer than in Rome?", "Thank you. What should I wear?")


@tool
def weather(city: str) -> str:
    """Tell the weather in a city.

    Args:
        city: The city.
    """
    return "18 degrees and sunny"


@tool
def clock(city: str) -> str:
    """Tell the time in a city.

    Args:
        city: The city.
    """
    return "12:30"


model = OpenAIModel(os.environ["MODEL"], api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
kind = CodeAgent if sys.argv[1] == "code" else ToolCallingAgent
agent = kind(tools=[weather, clock], model=model)
answers = [agent.run(question, reset=not number) for number, question in enumerate(QUESTIONS)]
print(json.dumps({"answers": answers, "id": None}))
