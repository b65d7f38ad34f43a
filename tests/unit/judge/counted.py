"""What roll-ups show, and the same counted row by row; a random history of rows."""

import random
from collections import defaultdict
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, Table, func, select, text

from judge.maintenance.rollups import PAIRS
from migrations import schema
from tests.conftest import Seed

Sums = dict[tuple[Any, ...], dict[str, float]]

STATES = ("open", "ended", "rewarded", "claimed", "trained", "excluded")
REASONS = (None, "no_reward", "waiting_step", "sampling_bent: top_p", "sampling_bent: top_k")
REWARDS = (None, 0.0, 1.0, -0.1, 0.3, 1e6, -1e9, 1e300)


def shown(engine: Engine, view: str, keys: str, measures: str) -> Sums:
    """What a dashboard reads: sums by key of a view, without what counts nothing."""
    sums = ", ".join(f"sum({name}) AS {name}" for name in measures.split())
    query = f"SELECT project, {keys.replace(' ', ', ')}, {sums} FROM {view} GROUP BY project, {keys.replace(' ', ', ')}"
    with engine.connect() as connection:
        rows = connection.execute(text(query)).mappings().all()
    found = {}
    for row in rows:
        amounts = {name: float(row[name]) for name in measures.split()}
        if amounts[measures.split()[0]]:
            found[tuple(row[key] for key in ("project", *keys.split()))] = amounts
    return found


def counted(
    engine: Engine,
    table: Table,
    key: Callable[[Any], tuple[Any, ...]],
    amounts: Callable[[Any], dict[str, float]],
) -> Sums:
    """The same, counted row by row."""
    found: dict[tuple[Any, ...], dict[str, float]] = defaultdict(lambda: defaultdict(float))
    with engine.connect() as connection:
        for row in connection.execute(select(table)):
            for name, amount in amounts(row).items():
                found[(row.project, *key(row))][name] += amount
    return found


def hour_of(row: Any) -> str:
    return str(row.created_at.astimezone(UTC).strftime("%Y-%m-%d %H:00"))


def in_sums(reward: float | None) -> float | None:
    return reward if reward is not None and abs(reward) <= 1e6 else None


def trajectories(engine: Engine) -> tuple[Sums, Sums]:
    keys = "policy version hour split state why_not_trained"
    measures = "trajectories ended grouped rewarded off_scale reward_sum reward_squares"

    def key(row: Any) -> tuple[Any, ...]:
        why = row.why_not_trained and row.why_not_trained.partition(":")[0]
        return row.policy, row.first_version, hour_of(row), row.split, row.state, why

    def amounts(row: Any) -> dict[str, float]:
        reward = in_sums(row.reward)
        return {
            "trajectories": 1,
            "ended": row.ended_at is not None,
            "grouped": row.group_id is not None,
            "rewarded": reward is not None,
            "off_scale": row.reward is not None and reward is None,
            "reward_sum": reward or 0.0,
            "reward_squares": (reward or 0.0) ** 2,
        }

    shown_now = shown(engine, "admin_trajectory_hours", keys, measures)
    return shown_now, counted(engine, schema.trajectories, key, amounts)


def completions(engine: Engine) -> tuple[Sums, Sums]:
    keys = "hour policy version key_id status"
    measures = "completions prompt_tokens sampled_tokens ttft_count ttft_ms total_count total_ms"

    def amounts(row: Any) -> dict[str, float]:
        return {
            "completions": 1,
            "prompt_tokens": row.prompt_tokens or 0,
            "sampled_tokens": row.completion_tokens or 0,
            "ttft_count": row.ttft_ms is not None,
            "ttft_ms": row.ttft_ms or 0.0,
            "total_count": row.total_ms is not None,
            "total_ms": row.total_ms or 0.0,
        }

    def key(row: Any) -> tuple[Any, ...]:
        return hour_of(row), row.policy, row.policy_version, row.key_id, row.status

    shown_now = shown(engine, "admin_completion_hours", keys, measures)
    return shown_now, counted(engine, schema.completions, key, amounts)


def feedback(engine: Engine) -> tuple[Sums, Sums]:
    def amounts(row: Any) -> dict[str, float]:
        reward = in_sums(row.reward)
        return {"feedback": 1, "rewarded": reward is not None, "reward_sum": reward or 0.0}

    def key(row: Any) -> tuple[Any, ...]:
        return hour_of(row), row.source, row.state

    shown_now = shown(engine, "admin_feedback_hours", "hour source state", "feedback rewarded reward_sum")
    return shown_now, counted(engine, schema.feedback, key, amounts)


def holds(engine: Engine) -> None:
    """All three say what counting says."""
    for of in (trajectories, completions, feedback):
        told, true = of(engine)
        assert told.keys() == true.keys()
        for key, amounts in true.items():
            assert told[key] == pytest.approx(dict(amounts), rel=1e-9, abs=1e-3), key


def left(engine: Engine) -> dict[str, tuple[int, int]]:
    """Rows of hours and notes, by what is counted."""
    with engine.connect() as connection:
        return {
            what: (
                connection.execute(select(func.count()).select_from(hours)).scalar_one(),
                connection.execute(select(func.count()).select_from(changes)).scalar_one(),
            )
            for what, (hours, changes) in PAIRS.items()
        }


class History:
    """Things that happen to rows, at random."""

    def __init__(self, engine: Engine, seed: Seed, dice: random.Random) -> None:
        self._engine, self._seed, self._dice = engine, seed, dice
        self._begun = 0
        self._names: list[str] = []
        self._feedback: list[str] = []

    def happen(self) -> None:
        dice = self._dice
        what = dice.choice((self._begin, self._begin, self._speak, self._change, self._change, self._say, self._forget))
        what()

    def _begin(self) -> None:
        self._begun += 1
        name = f"t{self._begun}"
        version = self._dice.choice((None, 0, 1, 2))
        began = self._at()
        self._seed.trajectory(
            name, turns=self._dice.randrange(3), first_version=version, created_at=began, last_seen_at=began,
            split=self._dice.choice(("train", "eval")), **self._state(),
        )  # fmt: skip
        self._names.append(name)

    def _speak(self) -> None:
        if self._names:
            name = self._dice.choice(self._names)
            key_id, status = self._dice.choice((None, "k1")), self._dice.choice(("complete", "error"))
            turn = self._dice.randrange(10, 1_000_000)
            tokens = self._dice.choice((None, 7))
            values: dict[str, Any] = {
                "key_id": key_id,
                "status": status,
                "created_at": self._at(),
                "completion_tokens": tokens,
            }
            self._seed.completion(name, turn, ttft_ms=self._dice.choice((None, 12.5)), **values)

    def _change(self) -> None:
        if self._names:
            t = schema.trajectories.c
            which = t.id.in_(self._dice.sample(self._names, min(3, len(self._names))))
            with self._engine.begin() as connection:
                connection.execute(schema.trajectories.update().where(which).values(self._state()))
                connection.execute(schema.trajectories.update().where(which).values(completions=t.completions + 1))

    def _say(self) -> None:
        f = schema.feedback.c
        if self._feedback and self._dice.random() < 0.5:
            state = self._dice.choice(("applied", "used", "waiting"))
            values = {"state": state, "reward": self._dice.choice(REWARDS)}
            with self._engine.begin() as connection:
                is_it = f.id == self._dice.choice(self._feedback)
                connection.execute(schema.feedback.update().where(is_it).values(values))
        elif self._names:
            source = self._dice.choice(("reward", "thumbs"))
            told = self._seed.feedback(self._dice.choice(self._names), 1.0, source=source, created_at=self._at())
            self._feedback.append(told)

    def _forget(self) -> None:
        if self._names and self._dice.random() < 0.3:
            name = self._dice.choice(self._names)
            with self._engine.begin() as connection:
                for table, column in ((schema.completions, "trajectory_id"), (schema.trajectories, "id")):
                    connection.execute(table.delete().where(table.c[column] == name))
            self._names.remove(name)

    def _state(self) -> dict[str, Any]:
        ended = self._dice.random() < 0.5
        return {
            "state": self._dice.choice(STATES),
            "why_not_trained": self._dice.choice(REASONS),
            "reward": self._dice.choice(REWARDS),
            "group_id": self._dice.choice((None, "g")),
            "ended_at": self._seed.now if ended else None,
        }

    def _at(self) -> datetime:
        return self._seed.now + timedelta(minutes=self._dice.randrange(180))
