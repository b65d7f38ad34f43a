"""DSPy: its agent, with the conversation as a field."""

import json
import os

import dspy

QUESTIONS = ("What is the weather in Bern?", "Is it warmer than in Rome?", "Thank you. What should I wear?")


def weather(city: str) -> str:
    """Tell the weather in a city."""
    return "18 degrees and sunny"


def clock(city: str) -> str:
    """Tell the time in a city."""
    return "12:30"


class Talk(dspy.Signature):
    """You are a helpful assistant."""

    question: str = dspy.InputField()
    history: dspy.History = dspy.InputField()
    answer: str = dspy.OutputField()


dspy.configure(
    lm=dspy.LM(
        f"openai/{os.environ['MODEL']}", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"]
    )
)
agent = dspy.ReAct(Talk, tools=[weather, clock])
history = dspy.History(messages=[])
answers = []
for question in QUESTIONS:
    result = agent(question=question, history=history)
    history.messages.append({"question": question, "answer": result.answer})
    answers.append(result.answer)
print(json.dumps({"answers": answers, "id": None}))
