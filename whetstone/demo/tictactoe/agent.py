"""Plays tic-tac-toe through any OpenAI-compatible server and posts what each game was worth.

Knows the stock client and the rules in game.py; of training a few headers and one POST a game, or the POST alone.
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

import game
from openai import AsyncOpenAI, OpenAIError
from openai.types.chat import ChatCompletionMessageParam

OUTCOMES = {"X": "wins", "O": "losses", "draw": "draws"}


class Agent:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.random, self.stopping = args, random.Random(args.seed), False
        self.client = AsyncOpenAI(base_url=args.base_url, api_key=args.api_key, max_retries=0, timeout=60)
        self.counts = dict.fromkeys(("games", "wins", "draws", "losses", "illegal", "requests", "failed_requests"), 0)
        self.won: list[int] = []
        self.recent: list[tuple[int, float]] = []

    async def work(self, numbers: Iterator[int]) -> None:
        """One of the connections: game after game, with a pause. A failed request ends its game, which is counted."""
        while not self.stopping and (number := next(numbers, None)) is not None:
            self.won.append(0)
            try:
                await self.attend(number)
            except OpenAIError:
                self.counts["failed_requests"] += 1
            await asyncio.sleep(self.args.pause_s)

    async def attend(self, number: int) -> None:
        """One game and its reward. In training `group_size` games share an opening; held out, each has its own."""
        train, trajectory = self.args.split == "train", f"{self.args.run}.{self.args.split}.{number}"
        group = number // self.args.group_size if train else number
        tags = {"X-Trajectory-Id": trajectory, "X-Task": "tictactoe", "X-Split": self.args.split}
        tags |= {"X-Group-Id": f"{self.args.run}.{group}"} if train else {}
        headers = tags if not self.args.untagged else {} if train else {"X-Split": "eval"}
        outcome, answer_id = await self.play(group, headers)
        self.won[number] = int(outcome == "wins")
        target = {"completion_id": answer_id, "final": True} if self.args.untagged else {"trajectory_id": trajectory}
        body = target | {"reward": self.reward(group, float(outcome == "wins"))}
        for count in ("games", outcome, "requests"):
            self.counts[count] += 1
        await self.client.post("/feedback", body=body, cast_to=object)

    async def play(self, number: int, headers: dict[str, str]) -> tuple[str, str]:
        """How the game ended, and the last answer's id. What is not the number of a free cell loses it."""
        opening = game.opening_name(self.args.split, self.args.seed, number)
        board = game.first_board(number, opening)
        messages: list[ChatCompletionMessageParam] = [{"role": "system", "content": game.SYSTEM}]
        while (winner := game.result(board)) is None:
            messages.append({"role": "user", "content": board})
            self.counts["requests"] += 1
            answer = await self.client.chat.completions.create(
                model=self.args.model, messages=messages, max_tokens=1, temperature=1, extra_headers=headers
            )
            if (cell := answer.choices[0].message.content) not in game.free(board):
                return "illegal", answer.id
            messages.append({"role": "assistant", "content": cell})
            board = game.after(board, cell, opening)
        return OUTCOMES[winner], answer.id

    def reward(self, group: int, own: float) -> float:
        """The game's own; for the control one of another group's recent game, at first a fair coin's."""
        self.recent = [*self.recent[-127:], (group, own)]
        others = [reward for donor, reward in self.recent if donor != group] or [0.0, 1.0]
        return self.random.choice(others) if self.args.shuffle_rewards else own


async def main() -> None:
    parser = argparse.ArgumentParser(description="Play tic-tac-toe against a random opponent through an OpenAI API.")
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1", help="the server, ending in /v1")
    parser.add_argument("--api-key", default="none", help="sent as the bearer token")
    parser.add_argument("--model", default="starter", help="the model that plays X")
    parser.add_argument("--games", type=int, default=512, help="how many to play; 0: until SIGTERM or SIGINT")
    parser.add_argument("--group-size", type=int, default=8, help="attempts at each training opening")
    parser.add_argument("--connections", type=int, default=16, help="most games in flight at once")
    parser.add_argument("--pause-s", type=float, default=0, help="how long a connection rests after each game")
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same openings and opponent")
    parser.add_argument("--split", choices=("train", "eval"), default="train", help="eval: held out, one game each")
    parser.add_argument("--run", default=secrets.token_hex(6), help="first part of every id; new by default")
    parser.add_argument("--untagged", action="store_true", help="say nothing of games and groups; X-Split: eval only")
    parser.add_argument("--shuffle-rewards", action="store_true", help="the control: post other games' rewards")
    args, started = parser.parse_args(), time.monotonic()
    agent = Agent(args)
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, setattr, agent, "stopping", True)
    numbers = iter(range(args.games or sys.maxsize))
    await asyncio.gather(*(agent.work(numbers) for _ in range(args.connections)))
    won = {"won": agent.won} if args.split == "eval" else {}
    print(json.dumps(agent.counts | {"seconds": round(time.monotonic() - started, 2)} | won))


if __name__ == "__main__":
    asyncio.run(main())
