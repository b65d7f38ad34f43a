"""Google's Agent Development Kit, on its model for other servers."""

import asyncio
import json
import os

from google.adk.agents import LlmAgent
from google.adk.models.lite_llm import LiteLlm
from google.adk.runners import InMemoryRunner
from google.genai import types

QUESTIONS = ("What is the weather in Bern?", "Is it warmer than in Rome?", "Thank you. What should I wear?")


def weather(city: str) -> str:
    """Tell the weather in a city."""
    return "18 degrees and sunny"


def clock(city: str) -> str:
    """Tell the time in a city."""
    return "12:30"


async def main() -> None:
    agent = LlmAgent(
        name="helper",
        model=LiteLlm(
            model=f"openai/{os.environ['MODEL']}",
            api_base=os.environ["OPENAI_BASE_URL"],
            api_key=os.environ["OPENAI_API_KEY"],
        ),
        instruction="You are a helpful assistant.",
        tools=[weather, clock],
    )
    runner = InMemoryRunner(agent=agent, app_name="weather")
    session = await runner.session_service.create_session(app_name="weather", user_id="user")
    answers = []
    for question in QUESTIONS:
        message = types.Content(role="user", parts=[types.Part(text=question)])
        events = [event async for event in runner.run_async(user_id="user", session_id=session.id, new_message=message)]
        content = events[-1].content
        answers.append("".join(part.text or "" for part in (content and content.parts) or ()))
    print(json.dumps({"answers": answers, "id": None}))


asyncio.run(main())
