"""OpenAI's Agents SDK: on chat, on responses, and on responses with the tools of an MCP server."""

import asyncio
import contextlib
import json
import os
import sys
from pathlib import Path

from agents import Agent, Runner, SQLiteSession, function_tool, set_default_openai_api
from agents.mcp import MCPServerStdio

QUESTIONS = ("What is the weather in Bern?", "Is it warmer than in Rome?", "Thank you. What should I wear?")


@function_tool
def weather(city: str) -> str:
    """Tell the weather in a city."""
    return "18 degrees and sunny"


@function_tool
def clock(city: str) -> str:
    """Tell the time in a city."""
    return "12:30"


async def main(kind: str) -> None:
    if kind == "chat":
        set_default_openai_api("chat_completions")
    async with contextlib.AsyncExitStack() as stack:
        agent = Agent(name="Helper", instructions="You are a helpful assistant.", model=os.environ["MODEL"])
        if kind == "mcp":
            program = str(Path(__file__).with_name("mcp_tools.py"))
            server = MCPServerStdio(params={"command": sys.executable, "args": ["-P", program]})
            agent.mcp_servers = [await stack.enter_async_context(server)]
        else:
            agent.tools = [weather, clock]
        session = SQLiteSession("bern")
        results = [await Runner.run(agent, question, session=session) for question in QUESTIONS]
    answers = [result.final_output for result in results]
    print(json.dumps({"answers": answers, "id": results[-1].last_response_id}))


asyncio.run(main(sys.argv[1]))
