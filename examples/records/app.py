"""Asks any OpenAI-compatible server to write order messages as JSON, and posts for each answer how right it is.

Knows the stock client and the messages in records.py; of training only one POST for each message. Prints JSON.
"""

import argparse
import asyncio
import json
import random
import signal
import sys
import time
from collections.abc import Iterator

import records
from openai import AsyncOpenAI, OpenAIError


class App:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.random, self.stopping = args, random.Random(args.seed), False
        self.client = AsyncOpenAI(base_url=args.base_url, api_key=args.api_key, max_retries=0, timeout=120)
        self.counts = dict.fromkeys(("questions", "answers", "right", "failed_requests"), 0)
        self.each: list[int] = []
        self.fields: list[float] = []
        self.recent: list[tuple[int, float]] = []

    async def work(self, numbers: Iterator[int]) -> None:
        """One of the connections: asks message after message. A failed request is counted, and not repeated."""
        while not self.stopping and (number := next(numbers, None)) is not None:
            self.each.append(0)
            self.fields.append(0.0)
            try:
                await self.ask(number)
            except OpenAIError:
                self.counts["failed_requests"] += 1
            await asyncio.sleep(self.args.pause_s)

    async def ask(self, number: int) -> None:
        """One message, in training with several attempts in one request and the reward of each."""
        train = self.args.split == "train"
        text, facts = records.record(self.args.split, self.args.seed, number)
        answer = await self.client.chat.completions.create(
            model=self.args.model,
            messages=records.messages(text),
            max_tokens=48,
            temperature=1,
            n=self.args.attempts if train else 1,
            extra_headers={} if train else {"X-Split": "eval"},
        )
        scores = [records.score(choice.message.content or "", facts) for choice in answer.choices]
        self.each[number], self.fields[number] = scores[0]
        self.counts["questions"] += 1
        self.counts["answers"] += len(scores)
        self.counts["right"] += sum(right for right, _ in scores)
        if train:
            rewards = [self.reward(number, (right + fields) / 2) for right, fields in scores]
            about = ({"completion_id": answer.id, "choice": choice, "final": True} for choice in range(len(rewards)))
            body = [target | {"reward": reward} for target, reward in zip(about, rewards, strict=True)]
            await self.client.post("/feedback", body=body, cast_to=object)

    def reward(self, number: int, own: float) -> float:
        """The answer's own; for the control one of a recent answer to another message, at first a fair coin's."""
        self.recent = [*self.recent[-127:], (number, own)]
        others = [reward for donor, reward in self.recent if donor != number] or [0.0, 1.0]
        return self.random.choice(others) if self.args.shuffle_rewards else own


async def main() -> None:
    parser = argparse.ArgumentParser(description="Have an OpenAI API write orders as JSON; post how right it was.")
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1", help="the server, ending in /v1")
    parser.add_argument("--api-key", default="none", help="sent as the bearer token")
    parser.add_argument("--model", default="starter", help="the model that reads")
    parser.add_argument("--questions", type=int, default=300, help="how many messages; 0: until SIGTERM or SIGINT")
    parser.add_argument("--attempts", type=int, default=1, help="answers to each training message, in one request")
    parser.add_argument("--connections", type=int, default=4, help="most messages in flight at once")
    parser.add_argument("--pause-s", type=float, default=0, help="how long a connection rests after each message")
    parser.add_argument("--seed", type=int, default=0, help="the same seed asks the same messages in the same order")
    parser.add_argument("--split", choices=("train", "eval"), default="train", help="eval: held out, without rewards")
    parser.add_argument("--shuffle-rewards", action="store_true", help="the control: post other answers' rewards")
    args, started = parser.parse_args(), time.monotonic()
    app = App(args)
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, setattr, app, "stopping", True)
    numbers = iter(range(args.questions or sys.maxsize))
    await asyncio.gather(*(app.work(numbers) for _ in range(args.connections)))
    each = {"each": app.each, "fields": app.fields} if args.split == "eval" else {}
    print(json.dumps(app.counts | {"seconds": round(time.monotonic() - started, 2)} | each))


if __name__ == "__main__":
    asyncio.run(main())
