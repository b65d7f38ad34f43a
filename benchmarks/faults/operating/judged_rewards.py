"""Apps whose attempts form groups and get one reward each, and whether SQL has each reward, once."""

import asyncio
import itertools
import random
import time
from typing import Any

import aiohttp
from sqlalchemy import Engine, func, select

from benchmarks.faults.apps import AppLedger, Client, words_of
from migrations import schema

GROUP_SIZE = 4
f, t, g = schema.feedback.c, schema.trajectories.c, schema.groups.c


class GroupedApps:
    """Sends attempts, a reward for each, at a steady rate."""

    def __init__(self, session: aiohttp.ClientSession, url: str, received: AppLedger, seed: int, rate: float) -> None:
        self._client, self._seed, self._rate = Client(session, url, received), seed, rate
        self._numbers = itertools.count()
        self._began = time.perf_counter()
        self.rewards: dict[str, float] = {}
        """Trajectory -> its reward, of what was acknowledged."""
        self.failed: list[str] = []
        self.over = False

    async def app(self) -> None:
        """Run one app until `over`; then the last group is completed."""
        while True:
            number = next(self._numbers)
            if self.over and number % GROUP_SIZE == 0:
                return
            await asyncio.sleep(self._began + number / self._rate - time.perf_counter())
            body: dict[str, Any] = {"model": "bench", "messages": [{"role": "user", "content": words_of(number)}]}
            headers = {"x-trajectory-id": f"t{number}", "x-group-id": f"g{number // GROUP_SIZE}"}
            answer = await self._client.ask(number, body | {"temperature": 1}, headers)
            reward = random.Random(f"{self._seed}/{number}").random()
            feedback = {"trajectory_id": f"t{number}", "reward": reward, "idempotency_key": f"k{number}"}
            feedback_answer = await self._client.say(number, feedback) if answer.right else answer
            if feedback_answer.right:
                self.rewards[f"t{number}"] = reward
            else:
                self.failed.append(f"request {number}: {feedback_answer.fault}")


def unsettled(engine: Engine, rewards: dict[str, float]) -> list[str]:
    """Return what is not applied yet, or is wrong; empty: each reward is in its trajectory and its group, once."""
    with engine.connect() as connection:
        waiting = connection.execute(select(func.count()).where(f.state != "applied")).scalar_one()
        stored = {row.id: row.reward for row in connection.execute(select(t.id, t.reward))}
        groups = connection.execute(select(g.id, g.state, g.size, g.rewarded, g.reward_mean)).all()
    wrong = [name for name, reward in rewards.items() if stored.get(name) != reward]
    faults = [f"{waiting} feedback are not applied"] if waiting else []
    faults += [f"{len(wrong)} trajectories have not the reward that was given, such as {wrong[0]}"] if wrong else []
    whole: dict[str, list[float]] = {}
    for name, reward in rewards.items():
        whole.setdefault(f"g{int(name[1:]) // GROUP_SIZE}", []).append(reward)
    by_id = {row.id: row for row in groups}
    for name, given in whole.items():
        row = by_id.get(name)
        if len(given) < GROUP_SIZE:
            continue
        counts = None if row is None else (row.state, row.size, row.rewarded)
        if counts != ("scored", GROUP_SIZE, GROUP_SIZE):
            faults.append(f"group {name} is {counts}")
        elif row is not None and abs(row.reward_mean - sum(given) / GROUP_SIZE) > 1e-6:
            faults.append(f"group {name} has the mean {row.reward_mean}, not {sum(given) / GROUP_SIZE}")
    return faults
