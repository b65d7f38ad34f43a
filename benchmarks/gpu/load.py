"""Load for `gpu`: attempts in groups of four that get a reward, and streams whose every token's time is recorded."""

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise

import httpx

ATTEMPTS = 4
"""Of each prompt; they make a group."""
ANSWER_TOKENS = 128
WORDS = (
    "river",
    "lamp",
    "stone",
    "music",
    "winter",
    "bread",
    "clock",
    "garden",
    "letter",
    "mirror",
    "engine",
    "forest",
)
PATIENCE_S = 900.0
"""For an answer: while a step has the device, requests wait."""


@dataclass
class Answer:
    """A request as its app saw it. Times are seconds since the epoch, as those of SQL are."""

    began_at: float
    ended_at: float = 0.0
    tokens: int = 0
    events_at: list[float] = field(default_factory=list)
    """When each event of its stream came."""
    error: str = ""


def reward_of(text: str) -> float:
    """Return the share of the letter e: a reward that differs from answer to answer, and that any model can raise."""
    return text.count("e") / max(1, len(text))


class Load:
    """Apps on one policy, during `running`; their `answers` are in no order."""

    def __init__(self, url: str, model: str, connections: int, seed: int, *, rewarded: bool) -> None:
        """`rewarded`: attempts are put into groups and get rewards; else nothing is trained on."""
        self.answers: list[Answer] = []
        self._url, self._model, self._connections, self._rewarded = url, model, connections, rewarded
        self._random = random.Random(seed)
        self._numbers = iter(range(10**9))
        self._name = f"{seed}-{'rewarded' if rewarded else 'plain'}-{connections}"
        self._stopping = False

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Send requests inside the context; at the end wait for the answers in flight."""
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=self._url, timeout=PATIENCE_S, limits=limits, trust_env=False) as client:
            apps = [asyncio.create_task(self._app(client)) for _ in range(self._connections)]
            try:
                yield
            finally:
                self._stopping = True
                await asyncio.gather(*apps)

    async def _app(self, client: httpx.AsyncClient) -> None:
        while not self._stopping:
            number = next(self._numbers)
            answer = Answer(began_at=time.time())
            self.answers.append(answer)
            try:
                await self._ask(client, number, answer)
            except (httpx.HTTPError, ValueError) as error:
                answer.error = f"{type(error).__name__}: {error}"
            answer.ended_at = time.time()

    async def _ask(self, client: httpx.AsyncClient, number: int, answer: Answer) -> None:
        group, attempt = f"{self._name}-{number // ATTEMPTS}", f"{self._name}-{number}"
        chosen = random.Random(group)
        prompt = f"Write a few sentences about a {chosen.choice(WORDS)} and a {chosen.choice(WORDS)}, number {group}."
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": ANSWER_TOKENS,
            "temperature": 1,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        headers = {"X-Trajectory-Id": attempt}
        headers |= {"X-Group-Id": group, "X-Group-Size": str(ATTEMPTS)} if self._rewarded else {"X-No-Train": "true"}
        text = ""
        async with client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as response:
            if response.is_error:
                raise ValueError(f"{response.status_code} {(await response.aread()).decode(errors='replace')[:300]}")
            async for line in response.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                answer.events_at.append(time.time())
                event = json.loads(line.removeprefix("data: "))
                answer.tokens = (event.get("usage") or {}).get("completion_tokens", answer.tokens)
                text += "".join(choice["delta"].get("content") or "" for choice in event.get("choices", ()))
        if self._rewarded:
            posted = await client.post("/v1/feedback", json={"trajectory_id": attempt, "reward": reward_of(text)})
            posted.raise_for_status()


def tokens_per_s(answers: Sequence[Answer], since: float, until: float) -> float:
    """Return the tokens of the answers that came within that time, a second of it.

    An answer's tokens are spread evenly over its events.
    """
    whole = [answer for answer in answers if not answer.error and answer.events_at]
    share = sum(
        answer.tokens * sum(since <= at < until for at in answer.events_at) / len(answer.events_at) for answer in whole
    )
    return share / (until - since)


def longest_silence_s(answers: Sequence[Answer], since: float, until: float) -> float:
    """Return the longest time within which no stream got anything, though some request was waiting: the pause.

    The load never rests, so a request waits at every moment.
    """
    events = sorted(at for answer in answers for at in answer.events_at if since <= at <= until)
    return max((later - earlier for earlier, later in pairwise([since, *events, until])), default=0.0)


def first_token_s(answers: Sequence[Answer], since: float, until: float) -> list[float]:
    """Return how long the first event took of each request that began within that time, sorted."""
    return sorted(
        answer.events_at[0] - answer.began_at
        for answer in answers
        if answer.events_at and since <= answer.began_at < until
    )
