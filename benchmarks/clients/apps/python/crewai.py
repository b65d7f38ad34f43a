"""CrewAI: a crew of one agent, with a task for each question."""

import json
import os

from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool

QUESTIONS = ("What is the weather in Bern?", "Is it warmer than in Rome?", "Thank you. What should I wear?")


@tool("weather")
def weather(city: str) -> str:
    """Tell the weather in a city."""
    return "18 degrees and sunny"


@tool("clock")
def clock(city: str) -> str:
    """Tell the time in a city."""
    return "12:30"


llm = LLM(model=f"openai/{os.environ['MODEL']}", base_url=os.environ["OPENAI_BASE_URL"])
agent = Agent(
    role="Helper", goal="Answer questions", backstory="You are a helpful assistant.", llm=llm, tools=[weather, clock]
)
tasks = [Task(description=question, expected_output="A sentence.", agent=agent) for question in QUESTIONS]
output = Crew(agents=[agent], tasks=tasks).kickoff()
print(json.dumps({"answers": [task.raw for task in output.tasks_output], "id": None}))
