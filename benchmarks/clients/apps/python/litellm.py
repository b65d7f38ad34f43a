"""LiteLLM's client."""

import json
import os
from typing import Any

import litellm

QUESTIONS = ("What is the weather in Bern?", "Is it warmer than in Rome?", "Thank you. What should I wear?")
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": description, "parameters": PARAMETERS}}
    for name, description in (("weather", "Tell the weather in a city."), ("clock", "Tell the time in a city."))
]
ANSWERS = {"weather": "18 degrees and sunny", "clock": "12:30"}

messages: list[Any] = [{"role": "system", "content": "You are a helpful assistant."}]
answers = []
for question in QUESTIONS:
    messages.append({"role": "user", "content": question})
    while True:
        reply: Any = litellm.completion(
            model=f"openai/{os.environ['MODEL']}",
            api_base=os.environ["OPENAI_BASE_URL"],
            messages=messages,
            tools=TOOLS,
        )
        message = reply.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            break
        messages += [
            {"role": "tool", "tool_call_id": call.id, "content": ANSWERS[call.function.name]}
            for call in message.tool_calls
        ]
    answers.append(message.content)
print(json.dumps({"answers": answers, "id": reply.id}))
