"""LangChain's agent, which keeps the conversation itself, and a graph of LangGraph, which streams and has a memory."""

import json
import os
import sys
from typing import Any

from langchain.agents import create_agent
from langchain_core.messages import AIMessageChunk
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

QUESTIONS = ("What is the weather in Bern?", "Is it warmer than in Rome?", "Thank you. What should I wear?")


@tool
def weather(city: str) -> str:
    """Tell the weather in a city."""
    return "18 degrees and sunny"


@tool
def clock(city: str) -> str:
    """Tell the time in a city."""
    return "12:30"


model = ChatOpenAI(model=os.environ["MODEL"], base_url=os.environ["OPENAI_BASE_URL"])


def agent() -> tuple[list[str], str | None]:
    helper = create_agent(model, tools=[weather, clock], system_prompt="You are a helpful assistant.")
    messages: list[Any] = []
    answers = []
    for question in QUESTIONS:
        messages = helper.invoke({"messages": [*messages, {"role": "user", "content": question}]})["messages"]
        answers.append(messages[-1].content)
    return answers, messages[-1].response_metadata.get("id")


def graph() -> tuple[list[str], str | None]:
    bound = model.bind_tools([weather, clock])
    builder = StateGraph(MessagesState)
    builder.add_node("model", lambda state: {"messages": [bound.invoke(state["messages"])]})
    builder.add_node("tools", ToolNode([weather, clock]))
    builder.add_edge(START, "model")
    builder.add_conditional_edges("model", tools_condition)
    builder.add_edge("tools", "model")
    compiled = builder.compile(checkpointer=InMemorySaver())
    answers, answer_id = [], None
    for question in QUESTIONS:
        text = ""
        for chunk, _ in compiled.stream(
            {"messages": [{"role": "user", "content": question}]},
            {"configurable": {"thread_id": "bern"}},
            stream_mode="messages",
        ):
            if isinstance(chunk, AIMessageChunk):
                text += str(chunk.content)
                answer_id = chunk.response_metadata.get("id") or answer_id
        answers.append(text)
    return answers, answer_id


answers, answer_id = agent() if sys.argv[1] == "agent" else graph()
print(json.dumps({"answers": answers, "id": answer_id}))
