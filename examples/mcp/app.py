"""Answers questions with the tools of a local MCP server, through any OpenAI-compatible server, and posts a reward.

One server process for all attempts; they share its session. The questions are made from its list of tools.
"""

import asyncio
import sys
from pathlib import Path
from typing import Any

import scenarios
from mcp import Client, StdioServerParameters, stdio_client
from mcp.types import TextContent, Tool

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import episodes

SERVER = StdioServerParameters(command=sys.executable, args=[str(Path(__file__).with_name("server.py"))])
SMALL_TOOLS = ["stock", "price", "shelf", "due"]
SMALL_TURNS, SMALL_TOKENS = 2, 8


class Warehouse:
    """The server's process and session, from the first attempt on until the event loop ends."""

    def __init__(self, client: Client, tools: list[Tool]) -> None:
        self.client, self.tools = client, tools

    async def call(self, name: str, arguments: dict[str, Any]) -> tuple[dict[str, Any], str]:
        """Return a tool's result as an object, empty if there was an error, and as text."""
        result = await self.client.call_tool(name, arguments)
        text = "\n".join(part.text for part in result.content if isinstance(part, TextContent))
        return ({} if result.is_error else dict(result.structured_content or {})), text

    async def values(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        return (await self.call(name, arguments))[0]


async def serve(ready: "asyncio.Future[Warehouse]", names: list[str]) -> None:
    """Start the server, and stop it when this task is cancelled, which asyncio does as it ends."""
    try:
        async with Client(stdio_client(SERVER)) as client:
            tools = [tool for tool in (await client.list_tools()).tools if not names or tool.name in names]
            ready.set_result(Warehouse(client, tools))
            await asyncio.Event().wait()
    except Exception as error:
        if ready.done():
            raise
        ready.set_exception(error)


class Agent:
    def __init__(self) -> None:
        self.ready: asyncio.Future[Warehouse] | None = None
        self.task: asyncio.Task[None] | None = None

    async def play(self, attempt: episodes.Attempt) -> episodes.Result:
        """Let the model use the tools for one question. A third each for the tools, their arguments, the answer."""
        args = attempt.args
        small = args.size == "small"
        if self.ready is None:
            self.ready = asyncio.get_running_loop().create_future()
            self.task = asyncio.create_task(serve(self.ready, args.tools or (SMALL_TOOLS if small else [])))
        warehouse = await asyncio.shield(self.ready)
        depth = args.depth or (1 if small else 3)
        task = await scenarios.scenario(warehouse.tools, warehouse.values, args.split, attempt.rng(), depth)
        calls, answer = await (self.small if small else self.full)(attempt, warehouse, task.question)
        shares = task.shares(calls, answer)
        return episodes.Result(reward=sum(shares) / 3, solved=min(shares) == 1)

    async def small(
        self, attempt: episodes.Attempt, warehouse: Warehouse, question: str
    ) -> tuple[list[scenarios.Call], str]:
        """Offer the tools as a list of names; a call is a name and an item, and a result its values."""
        names = " ".join(tool.name for tool in warehouse.tools)
        messages = [{"role": "system", "content": scenarios.SMALL.format(tools=names)}]
        messages.append({"role": "user", "content": question})
        calls: list[scenarios.Call] = []
        for _ in range(SMALL_TURNS):
            content = (await attempt.ask(messages, max_tokens=SMALL_TOKENS)).content or ""
            if not (call := scenarios.written_call(content, warehouse.tools)):
                return calls, content
            calls.append(call)
            values, _ = await warehouse.call(*call)
            messages.append({"role": "user", "content": " ".join(map(str, values.values())) or "error"})
        return calls, ""

    async def full(
        self, attempt: episodes.Attempt, warehouse: Warehouse, question: str
    ) -> tuple[list[scenarios.Call], str]:
        """Offer the tools as an OpenAI client does."""
        messages: list[dict[str, Any]] = [{"role": "system", "content": scenarios.SYSTEM}]
        messages.append({"role": "user", "content": question})
        offered = [scenarios.openai_tool(tool) for tool in warehouse.tools]
        calls: list[scenarios.Call] = []
        for _ in range(attempt.args.turns):
            message = await attempt.ask(messages, tools=offered, max_tokens=attempt.args.max_tokens)
            functions = [call for call in message.tool_calls or [] if call.type == "function"]
            if not functions:
                return calls, message.content or ""
            for function in functions:
                call = function.function.name, scenarios.arguments_of(function.function.arguments)
                calls.append(call)
                _, text = await warehouse.call(*call)
                messages.append({"role": "tool", "tool_call_id": function.id, "content": text})
        return calls, ""


if __name__ == "__main__":
    parser = episodes.parser_of("Answer questions with the tools of an MCP server, through an OpenAI API.")
    parser.add_argument("--size", choices=("small", "full"), default="small", help="full: real tools, all of them")
    parser.add_argument("--tools", nargs="*", help="the tools to offer; default: four, with --size full all")
    parser.add_argument("--depth", type=int, help="most calls that a question takes; default: 1, with --size full 3")
    parser.add_argument("--turns", type=int, default=8, help="most answers of the model in an attempt, --size full")
    parser.add_argument("--max-tokens", type=int, default=512, help="longest answer, --size full")
    episodes.main(parser, Agent().play)
