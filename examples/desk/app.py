"""Handles refund requests with tools, through any OpenAI-compatible server, and posts whether each was solved.

Knows the stock client and the shop in desk.py; of training two headers and one POST a request. Prints JSON.
"""

import argparse
import asyncio
import json
import random
import secrets
import signal
import sys
import time
from collections.abc import Iterator

import desk
from openai import AsyncOpenAI, OpenAIError


class Agent:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.random, self.stopping = args, random.Random(args.seed), False
        self.client = AsyncOpenAI(base_url=args.base_url, api_key=args.api_key, max_retries=0, timeout=120)
        self.counts = dict.fromkeys(("questions", "solved", "turns", "failed_requests"), 0)
        self.run = secrets.token_hex(6)
        self.each: list[int] = []
        self.fields: list[float] = []
        self.recent: list[tuple[int, float]] = []

    async def work(self, numbers: Iterator[int]) -> None:
        """One of the connections: request after request. A failed call ends its request, and is counted."""
        while not self.stopping and (number := next(numbers, None)) is not None:
            self.each.append(0)
            self.fields.append(0.0)
            try:
                await self.attend(number)
            except OpenAIError:
                self.counts["failed_requests"] += 1
            await asyncio.sleep(self.args.pause_s)

    async def attend(self, number: int) -> None:
        """One attempt at a request, and its reward. In training, attempts at the same request are a group."""
        train, trajectory = self.args.split == "train", f"{self.run}.{number}"
        which = number // self.args.attempts if train else number
        headers = {"X-Trajectory-Id": trajectory, "X-Split": self.args.split}
        request = desk.request(self.args.split, self.args.seed, which)
        reply = await self.handle(request, headers | ({"X-Group-Id": f"{self.run}.{which}"} if train else {}))
        solved = request.solved(reply)
        self.each[number], self.fields[number] = int(solved), float(request.action == request.right_action)
        self.counts["questions"] += 1
        self.counts["solved"] += solved
        if train:
            body = {"trajectory_id": trajectory, "reward": self.reward(which, request.reward(reply))}
            await self.client.post("/feedback", body=body, cast_to=object)

    async def handle(self, request: desk.Request, headers: dict[str, str]) -> str:
        """Let the model use the tools; return what the customer is told, empty where that does not come in time."""
        messages = request.messages()
        for _ in range(desk.TURNS):
            self.counts["turns"] += 1
            answer = await self.client.chat.completions.create(
                model=self.args.model,
                messages=messages,
                tools=desk.TOOLS,
                max_tokens=56,
                temperature=1,
                extra_headers=headers,
            )
            message = answer.choices[0].message
            if not message.tool_calls:
                return message.content or ""
            messages.append(message.model_dump(exclude_none=True))
            for call in message.tool_calls:
                result = request.use(call.function.name, call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        return ""

    def reward(self, which: int, own: float) -> float:
        """The attempt's own; for the control one of a recent attempt at another request, at first a fair coin's."""
        self.recent = [*self.recent[-127:], (which, own)]
        others = [reward for donor, reward in self.recent if donor != which] or [0.0, 1.0]
        return self.random.choice(others) if self.args.shuffle_rewards else own


async def main() -> None:
    parser = argparse.ArgumentParser(description="Handle refund requests with tools through an OpenAI API.")
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1", help="the server, ending in /v1")
    parser.add_argument("--api-key", default="none", help="sent as the bearer token")
    parser.add_argument("--model", default="starter", help="the model that handles them")
    parser.add_argument("--questions", type=int, default=200, help="how many attempts; 0: until SIGTERM or SIGINT")
    parser.add_argument("--attempts", type=int, default=1, help="attempts at each training request")
    parser.add_argument("--connections", type=int, default=32, help="most attempts in flight at once")
    parser.add_argument("--pause-s", type=float, default=0, help="how long a connection rests after each request")
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same requests in the same order")
    parser.add_argument("--split", choices=("train", "eval"), default="train", help="eval: held out, without rewards")
    parser.add_argument("--shuffle-rewards", action="store_true", help="the control: post other attempts' rewards")
    args, started = parser.parse_args(), time.monotonic()
    agent = Agent(args)
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, setattr, agent, "stopping", True)
    numbers = iter(range(args.questions or sys.maxsize))
    await asyncio.gather(*(agent.work(numbers) for _ in range(args.connections)))
    each = {"each": agent.each, "fields": agent.fields} if args.split == "eval" else {}
    print(json.dumps(agent.counts | {"seconds": round(time.monotonic() - started, 2)} | each))


if __name__ == "__main__":
    asyncio.run(main())
