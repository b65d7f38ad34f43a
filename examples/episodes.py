"""Run attempts at an example's tasks through any OpenAI-compatible server, and post a reward for each.

The loop that the examples share: an example brings one function, which makes one attempt. Knows the stock client; of
training, a few headers and one POST for each attempt. Prints JSON.
"""

import argparse
import asyncio
import json
import random
import secrets
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from openai import AsyncOpenAI, OpenAIError
from openai.types.chat import ChatCompletionMessage

RECENT = 128
"""Attempts whose rewards the control gives to others."""


@dataclass(frozen=True)
class Result:
    """How an attempt ended."""

    reward: float | dict[str, float]
    """For the attempt, or for each of its roles."""
    solved: bool
    """Whether the attempt reached its goal: what held-out tables count."""
    share: float | None = None
    """The share of the task that was done, where an example has such a figure."""


@dataclass(frozen=True)
class Attempt:
    """One attempt at a task. Attempts at the same task meet the same world, and form a group."""

    args: argparse.Namespace
    client: AsyncOpenAI
    run: str
    number: int
    roles: set[str] = field(default_factory=set)
    """The roles that have been asked, each a trajectory of its own; "" where there is only one."""

    @property
    def trains(self) -> bool:
        return bool(self.args.split == "train")

    @property
    def task(self) -> int:
        return self.number // self.args.attempts if self.trains else self.number

    def rng(self, purpose: str = "") -> random.Random:
        """Return the generator that makes this task: equal for its attempts. Held-out tasks are equal for any seed."""
        return random.Random(f"{self.args.split} {self.args.seed if self.trains else 0} {self.task} {purpose}")

    def trajectory(self, role: str = "") -> str:
        return f"{self.run}.{self.number}{role and f'.{role}'}"

    def group(self, role: str = "") -> str:
        return f"{self.run}.task{self.task}{role and f'.{role}'}"

    def headers(self, role: str = "") -> dict[str, str]:
        """Return what to send with each call of this role. In training, attempts at the same task are a group."""
        self.roles.add(role)
        headers = {"X-Trajectory-Id": self.trajectory(role), "X-Split": self.args.split}
        if self.trains and self.args.attempts > 1:
            headers |= {"X-Group-Id": self.group(role), "X-Group-Size": str(self.args.attempts)}
        return headers

    async def ask(self, messages: list[Any], role: str = "", **options: Any) -> ChatCompletionMessage:
        """Return the model's answer to these messages, and append it to them."""
        completion = await self.client.chat.completions.create(
            model=self.args.model,
            messages=messages,
            temperature=self.args.temperature,
            extra_headers=self.headers(role),
            **options,
        )
        message = completion.choices[0].message
        messages.append(message.model_dump(exclude_none=True, include={"role", "content", "tool_calls"}))
        return message


Player = Callable[[Attempt], Awaitable[Result]]


class Loop:
    """Attempt after attempt on some connections, until there are enough or the process is stopped."""

    def __init__(self, args: argparse.Namespace, play: Player) -> None:
        self.args, self.play, self.random = args, play, random.Random(args.seed)
        self.client = AsyncOpenAI(base_url=args.base_url, api_key=args.api_key, max_retries=0, timeout=args.timeout_s)
        self.counts = {"questions": 0, "solved": 0, "failed_requests": 0}
        self.run, self.begun, self.stopping = secrets.token_hex(6), 0, False
        self.each: list[int] = []
        self.rewards: list[float] = []
        self.shares: list[float] = []
        self.recent: dict[str, list[tuple[int, float]]] = {}
        self.ended: dict[int, int] = {}

    def next_number(self) -> int | None:
        """Return the next attempt's number, None when there are enough. A group that has begun is completed."""
        whole = self.args.split == "eval" or self.begun % self.args.attempts == 0
        if whole and (self.stopping or 0 < self.args.questions <= self.begun):
            return None
        self.begun += 1
        for figures in (self.each, self.rewards, self.shares):
            figures.append(0)
        return self.begun - 1

    async def work(self) -> None:
        """One of the connections. A failed call ends its attempt, and is counted."""
        while (number := self.next_number()) is not None:
            attempt = Attempt(self.args, self.client, self.run, number)
            try:
                await self.record(attempt, await self.play(attempt))
            except OpenAIError as error:
                self.counts["failed_requests"] += 1
                print(f"attempt {number}: {type(error).__name__}: {error}", file=sys.stderr)
            await asyncio.sleep(self.args.pause_s)

    async def record(self, attempt: Attempt, result: Result) -> None:
        """Count an attempt, and in training post its rewards, or let a judge rank its group."""
        rewards = result.reward if isinstance(result.reward, dict) else {"": result.reward}
        mean = sum(rewards.values()) / len(rewards)
        self.each[attempt.number], self.rewards[attempt.number] = int(result.solved), mean
        self.shares[attempt.number] = mean if result.share is None else result.share
        self.counts["questions"] += 1
        self.counts["solved"] += result.solved
        if not attempt.trains:
            return
        if self.args.judge:
            await self.ask_judge(attempt)
            return
        for role in sorted(attempt.roles):
            reward = self.reward(attempt.task, role, rewards[role])
            await self.post({"trajectory_id": attempt.trajectory(role), "reward": reward})

    async def ask_judge(self, attempt: Attempt) -> None:
        """End the attempt's trajectories; after the last of a group, ask for the group to be ranked."""
        for role in sorted(attempt.roles):
            await self.client.post(f"/trajectories/{attempt.trajectory(role)}/end", cast_to=object)
        self.ended[attempt.task] = self.ended.get(attempt.task, 0) + 1
        if self.ended[attempt.task] == self.args.attempts:
            for role in sorted(attempt.roles):
                await self.post({"group_id": attempt.group(role), "judge": {"kind": "ruler"}})

    async def post(self, feedback: dict[str, Any]) -> None:
        await self.client.post("/feedback", body=feedback, cast_to=object)

    def reward(self, task: int, role: str, own: float) -> float:
        """Return the attempt's own; for the control one of a recent attempt at another task, at first a coin's."""
        self.recent[role] = [*self.recent.get(role, [])[1 - RECENT :], (task, own)]
        others = [reward for donor, reward in self.recent[role] if donor != task] or [0.0, 1.0]
        return self.random.choice(others) if self.args.shuffle_rewards else own


def parser_of(description: str) -> argparse.ArgumentParser:
    """Return a parser with the options that every example has."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1", help="the server, ending in /v1")
    parser.add_argument("--api-key", default="none", help="sent as the bearer token")
    parser.add_argument("--model", default="starter", help="the model that is asked")
    parser.add_argument("--questions", type=int, default=200, help="how many attempts; 0: until SIGTERM or SIGINT")
    parser.add_argument("--attempts", type=int, default=8, help="attempts at each training task: a group")
    parser.add_argument("--connections", type=int, default=32, help="most attempts in flight at once")
    parser.add_argument("--pause-s", type=float, default=0, help="how long a connection rests after each attempt")
    parser.add_argument("--timeout-s", type=float, default=300, help="longest wait for one answer")
    parser.add_argument("--temperature", type=float, default=1, help="of the sampling")
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same tasks in the same order")
    parser.add_argument("--split", choices=("train", "eval"), default="train", help="eval: held out, without rewards")
    parser.add_argument("--judge", action="store_true", help="post no reward: ask for each group to be ranked by RULER")
    parser.add_argument("--shuffle-rewards", action="store_true", help="the control: post other attempts' rewards")
    return parser


def main(parser: argparse.ArgumentParser, play: Player) -> None:
    """Make the attempts that the command line says, and print the report, a line of JSON."""
    args = parser.parse_args()
    if min(args.attempts, args.connections) < 1:
        parser.error("--attempts and --connections are at least 1")
    if args.judge and args.attempts < 2:
        parser.error("a judge compares attempts: give --attempts 2 or more")
    print(json.dumps(asyncio.run(run(args, play))))


async def run(args: argparse.Namespace, play: Player) -> dict[str, Any]:
    """Return the report: counts, mean reward and seconds; of held-out attempts `each` and `fields`, in order."""
    loop, started = Loop(args, play), time.monotonic()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, setattr, loop, "stopping", True)
    await asyncio.gather(*(loop.work() for _ in range(args.connections)))
    each = {"each": loop.each, "fields": loop.shares} if args.split == "eval" else {}
    mean = sum(loop.rewards) / max(1, loop.counts["questions"])
    return loop.counts | {"reward": round(mean, 4), "seconds": round(time.monotonic() - started, 2)} | each
