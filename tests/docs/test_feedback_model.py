"""Everything an app may say of its attempts, in any order and at any time, against a program of a few dicts.

The real reader of bodies, the proxy's real store and the judge's real sweeps on one side; on the other a model that
knows no table, no lock and no batch. What it may know is the order in which feedback came.
"""

import json
import os
import random
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import Engine, func, insert, select, update

from judge.settlement.sweep import sweep
from migrations import schema
from proxy.domain.feedback import read_feedback
from proxy.domain.feedback_rows import request_row, row_of
from proxy.recording.store import Store
from tests.conftest import Seed
from whetstone.config.rewards import RewardSettings
from whetstone.config.settings import GroupSettings

WEIGHTS = {"accuracy": 2.0, "tone": 0.5}
LEARNING = {"starter": RewardSettings(weights=WEIGHTS)}
SETTINGS = GroupSettings(target_size=4, prompt_window_s=0, idle_s=10**7, deadline_s=10**7)
WAITS = timedelta(seconds=SETTINGS.feedback_waits_s)
MOST = int(os.environ.get("FEEDBACKS", "8000"))
COUNTS = {"sqlite": MOST, "postgresql": MOST // 2}
"""How many feedbacks; `make test-all`: 20,000. FEEDBACKS=100000 is what was measured once."""
TRAJECTORIES = 3_000
GROUPED = 1_600
MEMBERS = 4
LATE_S = 400.0
"""How long after the first feedback the last trajectories are recorded."""
NUMBERS = [number / 8 for number in range(-8, 9)]
"""Their sums are exact in any order."""


@dataclass
class World:
    """Which trajectories there are, or will be, and by which names their completions go."""

    rng: random.Random
    completions: dict[tuple[str, int], tuple[str, str]] = field(default_factory=dict)
    """(an id the app may use, choice): (completion, trajectory)."""
    groups: dict[str, set[str]] = field(default_factory=dict)
    turns: dict[str, int] = field(default_factory=dict)
    late: set[str] = field(default_factory=set)
    foreign: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        for number in range(TRAJECTORIES):
            name = f"t{number}"
            self.turns[name] = self.rng.randint(1, 3)
            if number < GROUPED:
                self.groups.setdefault(f"g{number // MEMBERS}", set()).add(name)
            elif self.rng.random() < 0.1:
                self.turns[f"{name}.1"] = 1  # the second choice of its first call
        for name in self.turns:
            for turn in range(self.turns[name]):
                owned = (f"c-{name}-{turn}", name)
                call, choice = (name.removesuffix(".1"), int(name.endswith(".1")))
                self.completions[f"c-{name}-{turn}", 0] = owned
                self.completions[f"chatcmpl-{call}-{turn}", choice] = owned
        self.late = {name for name in self.turns if "." not in name and self.rng.random() < 0.1}
        self.late |= {f"{name}.1" for name in self.late if f"{name}.1" in self.turns}
        self.foreign = [f"foreign{number}" for number in range(200)]

    def group_of(self, name: str) -> str | None:
        number = int(name.removesuffix(".1").removeprefix("t"))
        return f"g{number // MEMBERS}" if number < GROUPED else None

    def record(self, engine: Engine, names: list[str], now: datetime, project: str = "default") -> None:
        """Write them as the proxy does."""
        groups = sorted({group for name in names if project == "default" and (group := self.group_of(name))})
        with engine.begin() as connection:
            there = set(connection.execute(select(schema.groups.c.id)).scalars())
            for table, rows in (
                (schema.groups, [_group(group, now) for group in groups if group not in there]),
                (schema.trajectories, [self._trajectory(name, project, now) for name in names]),
                (schema.completions, [row for name in names for row in self._completions(name, project, now)]),
            ):
                if rows:
                    connection.execute(insert(table), rows)

    def _trajectory(self, name: str, project: str, now: datetime) -> dict[str, Any]:
        turns = self.turns.get(name, 1)
        return {
            "project": project, "id": name, "group_id": self.group_of(name) if name in self.turns else None,
            "policy": "starter", "split": "train", "no_train": False, "state": "open", "first_version": 0,
            "last_version": 0, "completions": turns, "sampled_tokens": 2 * turns, "created_at": now,
            "last_seen_at": now,
        }  # fmt: skip

    def _completions(self, name: str, project: str, now: datetime) -> list[dict[str, Any]]:
        call, choice = (name.removesuffix(".1"), int(name.endswith(".1")))
        return [
            {
                "project": project, "id": f"c-{name}-{turn}", "upstream_id": f"chatcmpl-{call}-{turn}",
                "call_id": f"call-{call}-{turn}", "choice": choice, "trajectory_id": name, "turn": turn,
                "policy": "starter", "policy_version": 0, "endpoint": "chat.completions", "streamed": False,
                "status": "complete", "token_ids": [1, 2], "inference_logprobs": [-0.5, -0.25],
                "threaded_by": "header", "created_at": now,
            }
            for turn in range(self.turns.get(name, 1))
        ]  # fmt: skip


def _group(group: str, now: datetime) -> dict[str, Any]:
    return {
        "project": "default", "id": group, "policy": "starter", "formed_by": "header", "state": "open", "size": 0,
        "rewarded": 0, "created_at": now,
    }  # fmt: skip


@dataclass
class ModelFeedback:
    """One feedback, as the model remembers it."""

    order: tuple[datetime, str]
    things: dict[tuple[str, ...], float | None]
    """What it speaks of, and the number it gives to it."""
    moves: set[str]
    """Trajectories."""
    final: bool
    fate: str = "pending"

    def certain(self, late: set[str]) -> bool:
        """Whether the first look settles it, or every look finds nothing."""
        strangers = {thing[-1] for thing in self.things if thing[0] == "group"} - self.moves
        return not strangers and not self.moves & late


class Model:
    """One thing after the other."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.feedback: dict[str, ModelFeedback] = {}
        self.keys: dict[str, str] = {}
        self.pending: list[str] = []
        self.ended: set[str] = set()
        self.trained: set[str] = set()

    def post(self, body: dict[str, Any], feedback_id: str, at: datetime) -> str:
        """Take a feedback; return the id that the app gets."""
        key = body.get("idempotency_key")
        if key in self.keys:
            return self.keys[key]
        if key:
            self.keys[key] = feedback_id
        things, moves = self._things(body)
        final = body.get("final", "completion_id" not in body and (_number(body) is not None or "rewards" in body))
        self.feedback[feedback_id] = ModelFeedback((at, feedback_id), things, moves, final)
        self.pending.append(feedback_id)
        return feedback_id

    def settle(self, recorded: set[str]) -> None:
        """All feedback was looked at."""
        still = []
        for feedback_id in self.pending:
            given = self.feedback[feedback_id]
            if given.fate == "withdrawn":
                continue
            if not given.moves or not given.moves <= recorded:
                still.append(feedback_id)
                continue
            given.fate = "unused" if given.moves <= self.trained else "counts"
            if given.final and given.fate == "counts":
                self.ended |= given.moves
        self.pending = still

    def withdraw(self, feedback_id: str) -> None:
        given = self.feedback[feedback_id]
        if given.fate == "pending" or (given.fate == "counts" and not given.moves & self.trained):
            given.fate = "withdrawn"

    def outcome(self) -> tuple[dict[str, tuple[float | None, str | None]], dict[str, str]]:
        """Reward and its source by trajectory; state by feedback."""
        owners: dict[tuple[str, ...], str] = {}
        whole: dict[str, tuple[float, str]] = {}
        turns: dict[str, dict[str, float]] = {}
        counting = sorted((given.order, one) for one, given in self.feedback.items() if given.fate == "counts")
        for _, feedback_id in counting:
            for thing, number in self.feedback[feedback_id].things.items():
                owners[thing] = feedback_id
                kind, name = thing[0], thing[-1]
                if number is None or (kind != "completion" and name not in self.world.turns):
                    continue
                if kind == "completion":
                    turns.setdefault(self.world.completions[name, 0][1], {})[name] = number
                elif kind == "trajectory" or name in self.world.groups.get(thing[1], ()):
                    whole[name] = (number, kind)
        rewards: dict[str, tuple[float | None, str | None]] = dict.fromkeys(self.world.turns, (None, None))
        rewards |= {name: (sum(each.values()) / len(each), "completions") for name, each in turns.items()}
        rewards |= whole
        states = {one: {"pending": "failed"}.get(given.fate, given.fate) for one, given in self.feedback.items()}
        for one, given in self.feedback.items():
            if given.fate == "counts":
                owns = not given.things or one in {owners[thing] for thing in given.things}
                states[one] = ("used" if given.moves & self.trained else "applied") if owns else "superseded"
        return rewards, states

    def _things(self, body: dict[str, Any]) -> tuple[dict[tuple[str, ...], float | None], set[str]]:
        if "group_id" in body:
            things: dict[tuple[str, ...], float | None] = {
                ("group", body["group_id"], name): number for name, number in body["rewards"].items()
            }
            return things, set(body["rewards"]) & self.world.groups.get(body["group_id"], set())
        if "trajectory_id" in body:
            target, moves = ("trajectory", body["trajectory_id"]), {body["trajectory_id"]} & self.world.turns.keys()
        else:
            name = (body["completion_id"], body.get("choice", 0))
            if name not in self.world.completions and name[0].startswith("c-"):
                name = (name[0], 0)  # an id of ours is one choice's already
            if name not in self.world.completions:
                return {}, set()
            completion, trajectory = self.world.completions[name]
            target, moves = ("completion", completion), {trajectory}
        number = _number(body)
        things = {} if number is None else {target: number}
        if "demonstration" in body:
            things["demonstration", *target] = None
        return things, moves


def _number(body: dict[str, Any]) -> float | None:
    if "parts" in body:
        return sum(WEIGHTS.get(name, 1.0) * number for name, number in body["parts"].items())
    return {"up": 1.0, "down": 0.0}[body["thumbs"]] if "thumbs" in body else body.get("reward")


class App:
    """Makes up what apps say."""

    def __init__(self, world: World, rng: random.Random) -> None:
        self.world = world
        self.rng = rng
        self.names = sorted(world.turns)
        self.calls = sorted(world.completions)
        self.groups = sorted(world.groups)
        self.keyed: list[dict[str, Any]] = []

    def body(self) -> dict[str, Any]:
        rng = self.rng
        if self.keyed and rng.random() < 0.04:
            return rng.choice(self.keyed)
        if rng.random() < 0.15:
            group = rng.choice(self.groups)
            members = rng.sample(sorted(self.world.groups[group]), rng.randint(1, MEMBERS))
            names = [*members, *(rng.sample(self.names, 1) if rng.random() < 0.03 else [])]
            body: dict[str, Any] = {"group_id": group, "rewards": {name: rng.choice(NUMBERS) for name in names}}
        else:
            body = self._target() | self._value()
        if rng.random() < 0.05:
            body["idempotency_key"] = f"key-{rng.random()}"
            self.keyed.append(body)
        if rng.random() < 0.1:
            body["final"] = rng.random() < 0.5
        return body

    def _target(self) -> dict[str, Any]:
        rng, drawn = self.rng, self.rng.random()
        if drawn < 0.012:
            unknown = rng.choice([f"unknown{rng.randrange(10**6)}", rng.choice(self.world.foreign)])
            ids = [{"trajectory_id": unknown}, {"completion_id": f"c-{unknown}-0"}]
            return rng.choice([*ids, {"completion_id": f"chatcmpl-{unknown}-0"}])
        if drawn < 0.5:
            return {"trajectory_id": rng.choice(self.names)}
        name, choice = rng.choice(self.calls)
        return {"completion_id": name} | ({"choice": choice} if choice or rng.random() < 0.1 else {})

    def _value(self) -> dict[str, Any]:
        rng = self.rng
        value: dict[str, Any] = rng.choice(
            [
                {"reward": rng.choice(NUMBERS)},
                {"thumbs": rng.choice(["up", "down"])},
                {"parts": {name: rng.choice(NUMBERS) for name in rng.sample(["accuracy", "tone", "other"], 2)}},
            ]
        )
        if rng.random() < 0.05:
            correction = {"demonstration": rng.choice(["better", {"role": "assistant", "content": "best"}])}
            return correction | (value if rng.random() < 0.5 else {})
        return value


class Run:
    """Both sides, given the same feedback."""

    def __init__(self, engine: Engine, seed: Seed, rng: random.Random) -> None:
        self.engine, self.seed, self.rng = engine, seed, rng
        self.world = World(rng)
        self.model = Model(self.world)
        self.app = App(self.world, rng)
        self.store = Store(engine)
        self.now = seed.now
        self.recorded: set[str] = set()
        self.acknowledged: list[str] = []
        self.wrong_ids = 0
        self.recent: list[str] = []
        seed.project("other")
        self.world.record(engine, self.world.foreign, self.now, "other")
        self.world.record(engine, sorted(self.world.turns)[:50], self.now, "other")
        self._record(sorted(self.world.turns.keys() - self.world.late))

    def batch(self, size: int) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """What an app posts at once, and the rows that the proxy makes of it."""
        bodies = [self.app.body() for _ in range(size)]
        items, _ = read_feedback(json.dumps(bodies).encode())
        rows = [row_of(item, "default", self.now + timedelta(microseconds=n)) for n, item in enumerate(items)]
        if self.rng.random() < 0.3:
            name = self.rng.choice(sorted(self.world.turns))
            bodies.append({"trajectory_id": name, "final": True})
            rows.append(request_row("end", name, None, "default", self.now + timedelta(microseconds=size)))
        self.now += timedelta(seconds=1)
        return list(zip(bodies, rows, strict=True))

    def post(self, batch: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
        with self.engine.begin() as connection:
            ids = [one.id for one in self.store.insert_feedback(connection, [row for _, row in batch])]
        for (body, row), got in zip(batch, ids, strict=True):
            self.wrong_ids += got != self.model.post(body, row["id"], row["created_at"])
        self.acknowledged += ids
        self.recent = (self.recent + ids)[-5_000:]

    def withdraw(self, count: int) -> None:
        # The model does not know whether feedback that waits for its target was looked for again by now.
        certain = [one for one in self.recent if self.model.feedback[one].certain(self.world.late)]
        for feedback_id in self.rng.sample(certain, min(count, len(certain))):
            with self.engine.begin() as connection:
                self.store.withdraw_feedback(connection, "default", feedback_id, self.now)
            self.model.withdraw(feedback_id)

    def sweep(self) -> None:
        sweep(self.engine, SETTINGS, self.now, LEARNING)
        # Whoever waits for a late one is looked at again in time, if not now.
        self.model.settle(self.recorded - self.world.late)

    def train(self, step: int) -> None:
        """A step takes some that are alone, as the trainer leaves them."""
        self.sweep()
        lone = [name for name in self.world.turns if self.world.group_of(name) is None]
        names = self.rng.sample(sorted(set(lone) - self.world.late - self.model.trained), 20)
        t, f = schema.trajectories.c, schema.feedback.c
        with self.engine.begin() as connection:
            ours = (f.project == "default", f.trajectory_id.in_(names), f.state == "applied")
            connection.execute(update(schema.feedback).where(*ours).values(state="used", step=step))
            trained = (t.project == "default", t.id.in_(names))
            connection.execute(
                update(schema.trajectories).where(*trained).values(state="trained", trained_in_step=step)
            )
        self.model.trained |= set(names)

    def record_some(self, count: int) -> None:
        waiting = sorted(self.world.late - self.recorded)
        chosen = self.rng.sample(waiting, min(count, len(waiting)))
        siblings = {f"{name}.1" for name in chosen} | {name.removesuffix(".1") for name in chosen}
        self._record(sorted((set(chosen) | siblings) & set(waiting)))

    def finish(self) -> None:
        self.record_some(len(self.world.late))
        self.sweep()
        self.now += WAITS
        self.sweep()
        self.now += WAITS
        self.sweep()
        self.model.settle(self.recorded)

    def _record(self, names: list[str]) -> None:
        self.world.record(self.engine, names, self.now)
        self.recorded |= set(names)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_feedback_ends_as_in_a_sequential_model_whatever_comes_when(
    engine: Engine, seed: Seed, database_kind: str, record_property: Any
) -> None:
    """Batches out of order, revised, repeated, withdrawn; for what is unknown, another project's, not there yet."""
    rng = random.Random(4)
    run = Run(engine, seed, rng)
    waiting: list[list[tuple[dict[str, Any], dict[str, Any]]]] = []
    steps = 0
    while len(run.acknowledged) < COUNTS[database_kind]:
        # Several proxies write: the first feedback may be committed last.
        waiting.append(run.batch(rng.randint(1, 400)))
        if len(waiting) == 4:
            run.post(waiting.pop(rng.randrange(4)))
            if rng.random() < 0.4:
                run.sweep()
            if rng.random() < 0.3:
                run.withdraw(rng.randint(1, 40))
            if rng.random() < 0.5 and (run.now - seed.now).total_seconds() < LATE_S:
                run.record_some(5)
            if rng.random() < 0.02:
                steps += 1
                run.train(steps)
    for batch in waiting:
        run.post(batch)
    run.finish()
    differing = compare(run)
    record_property("feedback", {"acknowledged": len(run.acknowledged), **vars(differing)})
    assert vars(differing) == dict.fromkeys(vars(differing), 0)


def compare(run: Run) -> SimpleNamespace:
    """How many things differ between the tables and the model, by kind."""
    rewards, states = run.model.outcome()
    t, f = schema.trajectories.c, schema.feedback.c
    with run.engine.connect() as connection:
        trajectories = connection.execute(
            select(t.id, t.reward, t.reward_source, t.state).where(t.project == "default")
        ).all()
        stored = {row.id: row.state for row in connection.execute(select(f).where(f.project == "default"))}
        touched = select(func.count()).where(t.project == "other", t.reward.is_not(None) | (t.state != "open"))
        foreign = connection.execute(touched).scalar_one()
    model = run.model
    return SimpleNamespace(
        lost=len(set(run.acknowledged) - stored.keys()),
        counted_twice=len(stored) - len(set(run.acknowledged)),
        wrong_ids=run.wrong_ids,
        wrong_rewards=sum(
            (one.reward, one.reward_source) != rewards[one.id] for one in trajectories if one.id not in model.trained
        ),
        wrong_trajectory_states=sum(one.state != _state(one.id, model, rewards) for one in trajectories),
        wrong_feedback_states=sum(state != states[one] for one, state in stored.items()),
        foreign_touched=foreign,
    )


def _state(name: str, model: Model, rewards: dict[str, tuple[float | None, str | None]]) -> str:
    if name in model.trained:
        return "trained"
    return "open" if name not in model.ended else "ended" if rewards[name][0] is None else "rewarded"
