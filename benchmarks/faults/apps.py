"""The apps of `chaos` and `outage`: what they send and receive, and whether SQL has all of it, once.

Each request has a number, in its last words; an app's feedback on the answer has it too.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from sqlalchemy import Engine, select

from migrations import schema

EXAMPLES = 5
"""Examples in a fault."""


@dataclass
class AppLedger:
    """What apps received: every answer whose last byte arrived, every feedback that was acknowledged."""

    completions: dict[str, int] = field(default_factory=dict)
    """Completion id -> the number of its request."""
    feedback: dict[str, int] = field(default_factory=dict)
    """Feedback id -> the number of the request it is about."""


@dataclass
class Answer:
    """An answer, or why there is none."""

    kind: str
    """Its status, or the class of the error."""
    fault: str
    """What to report if it is wrong."""
    body: bytes = b""
    completion_id: str = ""
    right: bool = False
    """It has the right status, and a stream has its end."""


@dataclass(frozen=True)
class Client:
    """Sends what apps send, and writes down what they receive."""

    session: aiohttp.ClientSession
    url: str
    received: AppLedger

    async def ask(self, number: int, fields: Mapping[str, Any], headers: Mapping[str, str]) -> Answer:
        """Send chat request `number`."""
        answer = await self._post("chat/completions", fields, headers)
        ended = not fields.get("stream") or answer.body.endswith(b"data: [DONE]\n\n")
        if answer.kind == "200" and not answer.completion_id:
            answer.fault = f"no x-completion-id; {answer.fault}"
            return answer
        if answer.kind == "200" and ended:
            answer.right = True
            self.received.completions[answer.completion_id] = number
        return answer

    async def say(self, number: int, fields: Mapping[str, Any]) -> Answer:
        """Send feedback on the answer to request `number`."""
        answer = await self._post("feedback", {**fields, "comment": words_of(number)}, {})
        if answer.kind == "202":
            answer.right = True
            self.received.feedback[json.loads(answer.body)["id"]] = number
        return answer

    async def _post(self, path: str, fields: Mapping[str, Any], headers: Mapping[str, str]) -> Answer:
        data = json.dumps(fields, separators=(",", ":")).encode()
        headers = {**headers, "content-type": "application/json"}
        try:
            async with self.session.post(f"{self.url}/v1/{path}", data=data, headers=headers) as response:
                body = await response.read()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            return Answer(type(error).__name__, repr(error))
        fault = f"{response.status} {body[-200:]!r}"
        return Answer(str(response.status), fault, body, response.headers.get("x-completion-id", ""))


def app_session(timeout_s: float) -> aiohttp.ClientSession:
    """Return a session with a connection for each request in flight."""
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout)


@dataclass(frozen=True)
class SqlLedger:
    """What SQL has."""

    completions: Sequence[tuple[str, int]]
    """Id, and the number in its last words."""
    feedback: Sequence[tuple[str, int]]
    taught: Sequence[tuple[str, str]]
    """Step and trajectory, of everything that a step took."""
    steps: Counter[str]
    """State -> number of steps."""


def words_of(number: int) -> str:
    """Return the last words of request `number`; also the comment on its answer."""
    return f"request #{number}"


def read_ledger(engine: Engine) -> SqlLedger:
    """Read the ledger from SQL."""
    c, f, m, s = schema.completions.c, schema.feedback.c, schema.step_trajectories.c, schema.steps.c
    with engine.connect() as connection:
        return SqlLedger(
            completions=[
                (row.id, _number_of(row.new_messages[-1]["content"]))
                for row in connection.execute(select(c.id, c.new_messages))
            ],
            feedback=[
                (row.id, _number_of(row.comment))
                for row in connection.execute(select(f.id, f.comment).where(f.comment.is_not(None)))
            ],
            taught=[(row.step_id, row.trajectory_id) for row in connection.execute(select(m.step_id, m.trajectory_id))],
            steps=Counter(connection.execute(select(s.state)).scalars()),
        )


def wrong_with(received: AppLedger, ledger: SqlLedger) -> list[str]:
    """Return what is lost, doubled, or trained on twice."""
    taught = Counter(trajectory for _, trajectory in ledger.taught)
    wrong = {
        **_lost_or_twice("completions", received.completions, ledger.completions),
        **_lost_or_twice("feedback", received.feedback, ledger.feedback),
        "trajectories in more than one step": [name for name, times in taught.items() if times > 1],
    }
    return [
        f"{len(items)} {what}: {', '.join(map(str, sorted(items)[:EXAMPLES]))}"
        for what, items in wrong.items()
        if items
    ]


def _lost_or_twice(what: str, received: dict[str, int], stored: Sequence[tuple[str, int]]) -> dict[str, list[Any]]:
    numbers = dict(stored)
    records = Counter(number for _, number in stored)
    return {
        f"{what} that an app holds and SQL has not": [one for one in received if one not in numbers],
        f"{what} that SQL has under another request": [
            one for one, number in received.items() if numbers.get(one, number) != number
        ],
        f"{what} of one request that SQL has twice": [number for number, times in records.items() if times > 1],
    }


def _number_of(words: str) -> int:
    return int(words.rpartition("#")[2])
