"""instructor: each answer is an object."""

import json
import os
from typing import Any

import instructor
from pydantic import BaseModel

QUESTIONS = ("What is the weather in Bern?", "Is it warmer than in Rome?", "Thank you. What should I wear?")


class Advice(BaseModel):
    """What to know of a city."""

    city: str
    advice: str


client = instructor.from_provider(f"openai/{os.environ['MODEL']}", base_url=os.environ["OPENAI_BASE_URL"])
messages: list[Any] = [{"role": "system", "content": "You are a helpful assistant."}]
answers = []
for question in QUESTIONS:
    messages.append({"role": "user", "content": question})
    advice, completion = client.create_with_completion(response_model=Advice, messages=messages)
    messages.append({"role": "assistant", "content": advice.model_dump_json()})
    answers.append(advice.advice)
print(json.dumps({"answers": answers, "id": completion.id}))
