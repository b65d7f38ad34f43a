"""Anthropic's client."""

import json
import os
from typing import Any

from anthropic import Anthropic

QUESTIONS = ("What is the weather in Bern?", "Is it warmer than in Rome?", "Thank you. What should I wear?")
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: Any = [
    {"name": "weather", "description": "Tell the weather in a city.", "input_schema": SCHEMA},
    {"name": "clock", "description": "Tell the time in a city.", "input_schema": SCHEMA},
]
ANSWERS = {"weather": "18 degrees and sunny", "clock": "12:30"}

client = Anthropic()
messages: list[Any] = []
answers = []
for question in QUESTIONS:
    messages.append({"role": "user", "content": question})
    while True:
        message = client.messages.create(
            model=os.environ["MODEL"],
            max_tokens=1024,
            system="You are a helpful assistant.",
            messages=messages,
            tools=TOOLS,
        )
        messages.append({"role": "assistant", "content": message.content})
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": ANSWERS[block.name]}
            for block in message.content
            if block.type == "tool_use"
        ]
        if not results:
            break
        messages.append({"role": "user", "content": results})
    answers.append("".join(block.text for block in message.content if block.type == "text"))
print(json.dumps({"answers": answers, "id": message.id}))
