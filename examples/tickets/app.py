"""Asks any OpenAI-compatible server which team a ticket belongs to, and posts a thumb or a comment on some answers.

Knows the stock client and the tickets in tickets.py; of training only one POST for each of these. Prints JSON.
"""

import argparse
import asyncio
import json
import random
import signal
import sys
import time
from collections.abc import Iterator

import tickets
from openai import AsyncOpenAI, OpenAIError


class App:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.random, self.stopping = args, random.Random(args.seed), False
        self.client = AsyncOpenAI(base_url=args.base_url, api_key=args.api_key, max_retries=0, timeout=120)
        self.counts = dict.fromkeys(("questions", "liked", "thumbs", "comments", "failed_requests"), 0)
        self.liked: list[int] = []
        self.recent: list[bool] = []
        self.recent_comments: list[str] = []

    async def work(self, numbers: Iterator[int]) -> None:
        """One of the connections: asks ticket after ticket. A failed request is counted, and not repeated."""
        while not self.stopping and (number := next(numbers, None)) is not None:
            self.liked.append(0)
            try:
                await self.ask(number)
            except OpenAIError:
                self.counts["failed_requests"] += 1
            await asyncio.sleep(self.args.pause_s)

    async def ask(self, number: int) -> None:
        """One ticket, and in training for a share of them what its reader thinks of the answer."""
        train = self.args.split == "train"
        text, team = tickets.ticket(self.args.split, self.args.seed, number // self.args.attempts)
        answer = await self.client.chat.completions.create(
            model=self.args.model,
            messages=tickets.messages(text),
            max_tokens=4,
            temperature=1,
            extra_headers={} if train else {"X-Split": "eval"},
        )
        liked = tickets.is_right(answer.choices[0].message.content or "", team)
        self.liked[number] = int(liked)
        self.counts["questions"] += 1
        self.counts["liked"] += liked
        if train and self.random.random() < self.args.thumbs:
            thumb = {"completion_id": answer.id, "thumbs": "up" if self.thinks(liked) else "down", "final": True}
            await self.client.post("/feedback", body=thumb, cast_to=object)
            self.counts["thumbs"] += 1
        if train and self.random.random() < self.args.comments:
            words = tickets.comment(team, is_right=liked)
            comment = {"completion_id": answer.id, "comment": self.says(words)}
            await self.client.post("/feedback", body=comment, cast_to=object)
            self.counts["comments"] += 1

    def says(self, comment: str) -> str:
        """What the reader writes; for the control what one wrote about another recent answer."""
        donated = self.random.choice(self.recent_comments or [comment])
        self.recent_comments = [*self.recent_comments[-127:], comment]
        return donated if self.args.shuffle_rewards else comment

    def thinks(self, liked: bool) -> bool:
        """What the reader thinks; for the control what one thought of another recent answer, at first a coin's word."""
        donated = self.random.choice(self.recent or [False, True])
        self.recent = [*self.recent[-127:], liked]
        return donated if self.args.shuffle_rewards else liked


async def main() -> None:
    parser = argparse.ArgumentParser(description="Ask an OpenAI API where support tickets go; post thumbs on some.")
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1", help="the server, ending in /v1")
    parser.add_argument("--api-key", default="none", help="sent as the bearer token")
    parser.add_argument("--model", default="starter", help="the model that routes")
    parser.add_argument("--questions", type=int, default=300, help="how many to ask; 0: until SIGTERM or SIGINT")
    parser.add_argument("--attempts", type=int, default=1, help="how often each ticket is asked, one after the other")
    parser.add_argument("--thumbs", type=float, default=0.3, help="share of training answers that get a thumb")
    parser.add_argument("--comments", type=float, default=0, help="share of training answers that get a comment")
    parser.add_argument("--connections", type=int, default=16, help="most questions in flight at once")
    parser.add_argument("--pause-s", type=float, default=0, help="how long a connection rests after each ticket")
    parser.add_argument("--seed", type=int, default=0, help="the same seed asks the same tickets in the same order")
    parser.add_argument("--split", choices=("train", "eval"), default="train", help="eval: held out, without thumbs")
    parser.add_argument(
        "--shuffle-rewards", action="store_true", help="the control: post other answers' thumbs and comments"
    )
    args, started = parser.parse_args(), time.monotonic()
    app = App(args)
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, setattr, app, "stopping", True)
    numbers = iter(range(args.questions or sys.maxsize))
    await asyncio.gather(*(app.work(numbers) for _ in range(args.connections)))
    each = {"each": app.liked} if args.split == "eval" else {}
    print(json.dumps(app.counts | {"seconds": round(time.monotonic() - started, 2)} | each))


if __name__ == "__main__":
    asyncio.run(main())
