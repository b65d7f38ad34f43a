"""LlamaIndex' agent."""

import asyncio
import json
import os

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.memory import Memory
from llama_index.llms.openai_like import OpenAILike

QUESTIONS = ("What is the weather in Bern?", "Is it warmer than in Rome?", "Thank you. What should I wear?")


def weather(city: str) -> str:
    """Tell the weather in a city."""
    return "18 degrees and sunny"


def clock(city: str) -> str:
    """Tell the time in a city."""
    return "12:30"


async def main() -> None:
    llm = OpenAILike(
        model=os.environ["MODEL"],
        api_base=os.environ["OPENAI_BASE_URL"],
        api_key=os.environ["OPENAI_API_KEY"],
        is_chat_model=True,
        is_function_calling_model=True,
    )
    agent = FunctionAgent(tools=[weather, clock], llm=llm, system_prompt="You are a helpful assistant.")
    memory = Memory.from_defaults(session_id="bern")
    results = [await agent.run(question, memory=memory) for question in QUESTIONS]
    raw = results[-1].raw
    answer_id = raw.get("id") if isinstance(raw, dict) else getattr(raw, "id", None)
    print(json.dumps({"answers": [str(result) for result in results], "id": answer_id}))


asyncio.run(main())
