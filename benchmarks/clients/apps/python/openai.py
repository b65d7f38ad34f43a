"""OpenAI's client, on chat, on responses, and on responses that the server is to remember."""

import json
import os
import sys
from typing import Any

from openai import OpenAI, pydantic_function_tool
from pydantic import BaseModel

MODEL = os.environ["MODEL"]
QUESTIONS = ("What is the weather in Bern?", "Is it warmer than in Rome?", "Thank you. What should I wear?")


class Weather(BaseModel):
    """Tell the weather in a city."""

    city: str


class Clock(BaseModel):
    """Tell the time in a city."""

    city: str


ANSWERS = {"weather": "18 degrees and sunny", "clock": "12:30"}
TOOLS: list[Any] = [pydantic_function_tool(Weather, name="weather"), pydantic_function_tool(Clock, name="clock")]
client = OpenAI()


def chat() -> tuple[list[str | None], str]:
    messages: list[Any] = [{"role": "system", "content": "You are a helpful assistant."}]
    answers = []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        while True:
            completion = client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS)
            message = completion.choices[0].message
            messages.append(message)
            if not message.tool_calls:
                break
            for call in message.tool_calls:
                assert call.type == "function"
                messages.append({"role": "tool", "tool_call_id": call.id, "content": ANSWERS[call.function.name]})
        answers.append(message.content)
    return answers, completion.id


def responses(remembered: bool) -> tuple[list[str | None], str]:
    tools: list[Any] = [{"type": "function"} | tool["function"] for tool in TOOLS]
    items: list[Any] = []
    answers: list[str | None] = []
    previous: dict[str, Any] = {}
    for question in QUESTIONS:
        items.append({"role": "user", "content": question})
        while True:
            response = client.responses.create(
                model=MODEL, instructions="You are a helpful assistant.", input=items, tools=tools, **previous
            )
            if remembered:
                items, previous = [], {"previous_response_id": response.id}
            else:
                items += response.output
            calls = [item for item in response.output if item.type == "function_call"]
            if not calls:
                break
            for call in calls:
                output = {"type": "function_call_output", "call_id": call.call_id, "output": ANSWERS[call.name]}
                items.append(output)
        answers.append(response.output_text)
    return answers, response.id


answers, answer_id = chat() if sys.argv[1] == "chat" else responses(remembered=sys.argv[1] == "remembered")
print(json.dumps({"answers": answers, "id": answer_id}))
