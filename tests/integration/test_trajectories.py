"""Conversations at once through a proxy that is restarted and killed between their calls: where did each land?

24 of them, or as many as CONVERSATIONS in the environment (`make test-all`: 400). The app says nothing but its
base_url. Every conversation has a first question of its own; beside them run some whose words are all the same. Of
these only the number of trajectories is checked, and that each is one growing conversation.

Some apps rewrite each answer before they send it back, eight of them at a time with the same first question; and some
send few-shot prompts that begin with the question of another conversation. A rewritten call may begin a trajectory, but
it may not be in another conversation's.
"""

import asyncio
import json
import os
import random
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import select

from migrations import schema
from tests.unit.proxy.conftest import own_process, settings_for, wait_for
from whetstone.database.engine import connect

CONVERSATIONS = int(os.environ.get("CONVERSATIONS", "24"))
ALIKE = CONVERSATIONS // 8
"""More, with the same words in all of them."""
REWRITING = max(8, CONVERSATIONS // 3)
"""More, of apps that rewrite what was answered; half of them eight at a time with the same words."""
REWRITING_TOKENS, REWRITING_TEMPERATURE = 24, 1.5
"""Tokens of an answer that is rewritten, and how freely they are drawn: of fewer characters, or of the same ones again
and again, nobody can tell whose they are."""
AT_ONCE = 10
RESTARTS = 4
"""Every second one is a `kill -9`."""
PATH = "/v1/chat/completions"


@dataclass
class Branch:
    """One conversation, or what its user made of it by editing an earlier message."""

    messages: list[dict[str, Any]]
    turns_left: int
    alike: bool = False
    rewrites: bool = False
    answered: int = 0
    trajectories: set[str] = field(default_factory=set)
    calls: list[int] = field(default_factory=list)
    """Numbers of its calls; a retried call keeps its own."""


@dataclass
class Figures:
    calls: Counter[str] = field(default_factory=Counter)
    rules: Counter[str] = field(default_factory=Counter)
    joined: int = 0
    """Calls with a rewritten answer that went on in its trajectory."""
    chances: Counter[str] = field(default_factory=Counter)

    def every(self, nth: int, event: str) -> bool:
        """Return whether it is to happen at this chance: counted and not drawn, so it happens in any order of calls."""
        self.chances[event] += 1
        return self.chances[event] % nth == 0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_each_completion_of_every_conversation_lands_in_its_own_trajectory(
    vllm_url: str, sqlite_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = settings_for(sqlite_url, vllm_url, tmp_path)
    rng = random.Random(7)
    branches = [Branch([_user(f"question {n}")], rng.randint(2, 5)) for n in range(CONVERSATIONS)]
    branches += [Branch([_user("the same question")], 3, alike=True) for _ in range(ALIKE)]
    questions = [f"question {n} of a rewriting app" if n % 2 else f"equal {n // 16}" for n in range(REWRITING)]
    branches += [Branch([_user(question)], 3, rewrites=True) for question in questions]
    figures = Figures()
    waiting = list(branches)
    rng.shuffle(waiting)
    for life in range(RESTARTS + 1):
        with own_process(settings) as (url, process):
            calls = sum(branch.turns_left for branch in waiting)
            # The last proxy also serves what the forks added.
            most = 2 * calls if life == RESTARTS else calls // (RESTARTS + 1 - life)
            branches += asyncio.run(_converse(url, waiting, most, rng, figures))
            if life % 2 == 0:
                process.terminate()
                process.wait(timeout=30)
            # Leaving `own_process` kills what still runs.
    assert waiting == []
    with own_process(settings) as (url, _):
        wait_for(lambda: httpx.get(f"{url}/readyz", trust_env=False, verify=False).json()["unwritten"] == 0)
        rows = _completions(settings.database_url)
    wrong = _mis_threaded(branches, rows)
    with capsys.disabled():
        trajectories = len({row.trajectory_id for row in rows})
        sys.stdout.write(
            f"\n{len(branches)} conversations and forks, {len(rows)} completions in {trajectories} trajectories, "
            f"{dict(figures.calls)}, {RESTARTS} restarts, resolved by {dict(figures.rules)}, "
            f"{figures.joined} of {figures.calls['rewritten']} rewritten answers recognised: "
            f"{len(wrong)} mis-threaded\n"
        )
    assert wrong == []
    assert figures.calls["cut off"] > CONVERSATIONS / 20
    assert figures.calls["forks"] > CONVERSATIONS / 20
    assert {"new", "content", "fork", "retry", "rewritten"} <= figures.rules.keys()
    assert figures.calls["few-shot"] > 0
    assert figures.joined > figures.calls["rewritten"] / 2


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


async def _converse(url: str, waiting: list[Branch], most: int, rng: random.Random, figures: Figures) -> list[Branch]:
    """Let the conversations go on, so many calls of them; those begun by forks."""
    forks: list[Branch] = []
    left = most

    async def worker() -> None:
        nonlocal left
        while waiting and left > 0:
            branch = waiting.pop(rng.randrange(len(waiting)))
            left -= 1
            await _turn(client, branch, rng, figures)
            if figures.every(20, "few-shot"):
                forks.append(few_shot := _few_shot(branch, rng))
                figures.calls["few-shot"] += 1
                waiting.append(few_shot)
            if branch.answered > 1 and not branch.alike and not branch.rewrites and figures.every(10, "forks"):
                forks.append(fork := _fork(branch, rng))
                figures.calls["forks"] += 1
                waiting.append(fork)
            if branch.turns_left > 0:
                waiting.append(branch)

    limits = httpx.Limits(max_connections=AT_ONCE)
    async with httpx.AsyncClient(base_url=url, timeout=120, trust_env=False, verify=False, limits=limits) as client:
        await asyncio.gather(*(worker() for _ in range(AT_ONCE)))
    return forks


def _fork(branch: Branch, rng: random.Random) -> Branch:
    place = 2 * rng.randrange(1, branch.answered)
    return Branch([*branch.messages[:place], _user(f"an edit {rng.random()}")], 2, answered=place // 2)


def _few_shot(branch: Branch, rng: random.Random) -> Branch:
    """What another app asks: it begins with a prompt that this conversation had, and goes on with an example."""
    begun = branch.messages[: 2 * rng.randrange(branch.answered) + 1]
    example = {"role": "assistant", "content": f"An example answer, number {rng.random()}"}
    return Branch([*begun, example, _user("and mine?")], 1)


async def _turn(client: httpx.AsyncClient, branch: Branch, rng: random.Random, figures: Figures) -> None:
    """One turn; now and then the app hangs up in the middle and asks again, as the official clients do."""
    cut = not branch.alike and figures.every(20, "cut off")
    figures.calls["sent"] += 1
    branch.calls.append(figures.calls["sent"])
    most = REWRITING_TOKENS if branch.rewrites else 2
    body = {"model": "starter", "messages": branch.messages, "max_tokens": 160 if cut else most, "stream": cut}
    body["metadata"] = {"call": str(branch.calls[-1])}
    headers = {"content-type": "application/json"}
    body["ignore_eos"] = cut
    if branch.rewrites:
        body |= {"min_tokens": most, "temperature": REWRITING_TEMPERATURE}
    if cut:
        await _hang_up(client.base_url, json.dumps(body).encode(), rng.uniform(0.02, 0.2))
        figures.calls["cut off"] += 1
        # What the official clients wait; and the proxy, on two busy cores, is to have come to it.
        await asyncio.sleep(0.5)
        for _ in range(2):
            await client.get("/healthz")
        headers["x-stainless-retry-count"] = "1"
    response = await client.post(PATH, content=json.dumps(body).encode(), headers=headers)
    assert response.status_code == 200, response.text
    figures.calls["answered"] += 1
    figures.rules[response.headers["x-threaded-by"]] += 1
    trajectory_id = response.headers["x-trajectory-id"]
    if branch.rewrites and branch.answered:
        figures.calls["rewritten"] += 1
        figures.joined += trajectory_id in branch.trajectories
    branch.trajectories.add(trajectory_id)
    text = _text(response) if cut else response.json()["choices"][0]["message"]["content"]
    echo = _rewritten(text, rng) if branch.rewrites else _echo(text, rng)
    branch.messages = [*branch.messages, echo, _user(f"and then {branch.answered}")]
    branch.answered += 1
    branch.turns_left -= 1


async def _hang_up(url: httpx.URL, body: bytes, after_s: float) -> None:
    """Ask, and leave before the first token: 160 tokens take longer."""
    _, writer = await asyncio.open_connection(url.host, url.port)
    head = f"POST {PATH} HTTP/1.1\r\nhost: {url.host}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    writer.write(head.encode() + b"\r\n\r\n" + body)
    await writer.drain()
    await asyncio.sleep(after_s)
    writer.close()
    await writer.wait_closed()


def _text(response: httpx.Response) -> str:
    """The text of a stream."""
    events = [line[6:] for line in response.text.splitlines() if line.startswith("data: {")]
    deltas = [choice["delta"] for event in events for choice in json.loads(event)["choices"]]
    return "".join(delta.get("content") or "" for delta in deltas)


def _echo(text: str, rng: random.Random) -> dict[str, Any]:
    """The answer as one app or another sends it back."""
    return rng.choice(
        [
            {"role": "assistant", "content": text},
            {"content": text, "role": "assistant", "refusal": None, "tool_calls": None, "audio": None},
            {"role": "assistant", "content": [{"type": "text", "text": text}]},
            {"role": "assistant", "content": f" {text}\n"},
        ]
    )


def _rewritten(text: str, rng: random.Random) -> dict[str, Any]:
    """The answer as an app sends it back that makes its own text of it."""
    content = rng.choice(
        [
            f"{text}</code>\nCalling tools:\n[{{'id': 'call_1', 'type': 'function'}}]",
            f"<think>\nIt is late.\n</think>\n\n{text}",
            f"<answer>\n  {text}\n</answer>",
            json.dumps({"thought": text}),
            [{"type": "text", "text": f"Answer: {text}"}],
        ]
    )
    return {"role": "assistant", "content": content}


def _completions(database_url: str) -> list[Any]:
    engine = connect(database_url)
    c = schema.completions.c
    with engine.execution_options(isolation_level="AUTOCOMMIT").connect() as connection:
        rows = list(connection.execute(select(c.id, c.trajectory_id, c.status, c.sampling).order_by(c.id)))
    engine.dispose()
    return rows


def _mis_threaded(branches: list[Branch], rows: list[Any]) -> list[Any]:
    """What a conversation shares with another, or what it has twice (which an app that rewrites may have).

    On two busy cores a client may hang up when its answer is whole already: nothing tells such an answer from one
    that was read, so a request that is sent again then is a branch of its own, and no mistake.
    """
    by_call: dict[int, list[Any]] = defaultdict(list)
    for row in rows:
        by_call[int(row.sampling["metadata"]["call"])].append(row)
    wrong: list[Any] = []
    owners: dict[str, int] = {}
    for place, branch in enumerate(branches):
        own = [row for call in branch.calls for row in by_call[call]]
        whole_twice = sum(sum(row.status == "complete" for row in by_call[call]) - 1 for call in branch.calls)
        own_ids = {row.trajectory_id for row in own}
        if branch.alike:
            continue
        if (len(own_ids) > 1 + whole_twice and not branch.rewrites) or not branch.trajectories <= own_ids:
            wrong.append((branch.messages[0]["content"], own_ids, branch.trajectories))
        wrong += [(place, one) for one in own_ids if owners.setdefault(one, place) != place]
    alike = {row.trajectory_id for row in rows} - owners.keys()
    expected = set().union(*(branch.trajectories for branch in branches if branch.alike))
    if alike != expected or len(alike) != ALIKE:
        wrong.append(("alike", len(alike), len(expected)))
    return wrong
