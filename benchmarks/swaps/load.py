"""Constant load for `swaps`: apps that send one request after the other, half of them streams, and record the times."""

import asyncio
import json
import random
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.swaps.figures import RequestOutcome

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples" / "starter"))

from formats import small_talk, tool_use

ANSWER_TOKENS = 32
MULTI_TURN_SHARE = 0.3
"""Share of the conversations with several turns; the others are one question each."""
MOST_TURNS = 4
PATIENCE_S = 300.0


def first_messages(rng: random.Random) -> list[dict[str, Any]]:
    """Return the start of a conversation of the starter, up to its first answer."""
    messages = rng.choice((small_talk, tool_use))(rng).messages
    answer_at = next(place for place, message in enumerate(messages) if message["role"] == "assistant")
    return messages[:answer_at]


class Load:
    """`connections` apps, during `running`; their `outcomes` are in no order."""

    def __init__(self, url: str, policy: str, connections: int, seed: int) -> None:
        self.outcomes: list[RequestOutcome] = []
        self._url, self._policy, self._connections = url, policy, connections
        self._rngs = [random.Random(f"{seed} {number}") for number in range(connections)]
        self.in_flight = 0
        """Number of requests without a complete answer yet."""
        self._stopping = False

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Send requests inside the context; at the end wait for the answers in flight."""
        connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=PATIENCE_S)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            apps = [asyncio.create_task(self._app(session, number)) for number in range(self._connections)]
            try:
                yield
            finally:
                self._stopping = True
                await asyncio.gather(*apps)

    async def _app(self, session: aiohttp.ClientSession, number: int) -> None:
        rng, streamed = self._rngs[number], number % 2 == 0
        while not self._stopping:
            turns = rng.randrange(2, MOST_TURNS + 1) if rng.random() < MULTI_TURN_SHARE else 1
            # Half of the conversations name their trajectory, the others are recognized by their content.
            headers = {"X-Trajectory-Id": f"swaps-{rng.getrandbits(64):x}"} if rng.random() < 0.5 else {}
            messages = first_messages(rng)
            for turn in range(turns):
                outcome = RequestOutcome(began_at=time.monotonic(), streamed=streamed, new=turn == 0)
                self.in_flight += 1
                text = await self._ask(session, outcome, messages, headers, rng.getrandbits(31))
                self.in_flight -= 1
                outcome.ended_at = time.monotonic()
                self.outcomes.append(outcome)
                if text is None:
                    break
                messages = [*messages, {"role": "assistant", "content": text}, *first_messages(rng)[-1:]]

    async def _ask(
        self,
        session: aiohttp.ClientSession,
        outcome: RequestOutcome,
        messages: list[dict[str, Any]],
        headers: dict[str, str],
        seed: int,
    ) -> str | None:
        """Send one request; return the answer's text, or None if it is not complete."""
        body = {
            "model": self._policy,
            "messages": messages,
            "max_tokens": ANSWER_TOKENS,
            "temperature": 1.0,
            "seed": seed,
            # Answers of one length: the load is the same for every version.
            "ignore_eos": True,
            "stream": outcome.streamed,
        }
        try:
            async with session.post(f"{self._url}/v1/chat/completions", json=body, headers=headers) as response:
                outcome.status = response.status
                if response.status != 200:
                    content = await response.read()
                    outcome.error = f"{response.status} {content[:300].decode(errors='replace')}"
                    outcome.honest = _is_honest(response, content)
                    return None
                outcome.version = int(response.headers["X-Policy-Version"])
                outcome.completion_id = response.headers["X-Completion-Id"]
                text = await (_streamed if outcome.streamed else _plain)(outcome, response)
        except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
            # A stream that breaks off without its end is a correct report. No answer at all is not.
            outcome.honest = outcome.status == 200 and outcome.streamed
            outcome.error = f"{type(error).__name__}: {error}"
            return None
        outcome.whole = text is not None
        return text


def _is_honest(response: aiohttp.ClientResponse, content: bytes) -> bool:
    """Return whether a refusal is a server's error in OpenAI's shape, and a 503 says when to come again."""
    try:
        error = json.loads(content)["error"]
        shaped: bool = {"message", "type", "code", "param"} <= error.keys() and response.status >= 500
    except (ValueError, KeyError, TypeError, AttributeError):
        return False
    return shaped and (response.status != 503 or "Retry-After" in response.headers)


async def _plain(outcome: RequestOutcome, response: aiohttp.ClientResponse) -> str | None:
    answer = json.loads(await response.read())
    return str(answer["choices"][0]["message"]["content"] or "")


async def _streamed(outcome: RequestOutcome, response: aiohttp.ClientResponse) -> str | None:
    text, buffered, ended = "", b"", False
    async for chunk in response.content.iter_any():
        *events, buffered = (buffered + chunk).split(b"\n\n")
        now = time.monotonic()
        for event in events:
            data = event.removeprefix(b"data: ")
            if data == b"[DONE]":
                ended = True
                continue
            fields = json.loads(data)
            if "error" in fields:
                outcome.error, outcome.honest = f"an error event: {fields['error']}", True
                return None
            outcome.events_at.append(now)
            text += "".join(choice["delta"].get("content") or "" for choice in fields["choices"])
    if not ended:
        outcome.error, outcome.honest = "the stream has no end", True
    return text if ended else None
