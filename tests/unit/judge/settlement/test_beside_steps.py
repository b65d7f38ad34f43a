"""Judge and trainer at once, on the same rows: no deadlock, nothing trained on twice, nothing forgotten."""

import random
import threading
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from sqlalchemy import func, select

from judge.settlement.sweep import sweep
from migrations import schema
from trainer.domain.claims import Probe
from trainer.store.unit_of_work import Store
from whetstone.config.settings import GroupSettings
from whetstone.config.trainer import TrainerSettings

TRAJECTORIES = 600
GROUPS = GroupSettings(target_size=4, prompt_window_s=600)
STEPS = TrainerSettings(
    groups_per_step=2, max_groups_per_step=6, singles_per_step=8, min_fresh_share=0, max_staleness=10_000
)
LATE = 0.1
"""Share of rewards that come when their groups may have been taken."""


def test_sweeps_and_steps_at_once_use_each_trajectory_once(engine, seed):
    failures, over = [], threading.Event()
    chance = random.Random(4)

    def guarded(work):
        def run():
            try:
                while not over.is_set():
                    work()
                work()
            except Exception as error:
                failures.append(error)

        return threading.Thread(target=run)

    store = Store(engine, "default")
    workers = [guarded(lambda: sweep(engine, GROUPS, datetime.now(UTC))) for _ in range(2)]
    workers.append(guarded(lambda: step(store)))
    for worker in workers:
        worker.start()
    began = datetime.now(UTC) - timedelta(seconds=590)
    owed = []
    for start in range(0, TRAJECTORIES, 10):
        names = [f"t{number:03d}" for number in range(start, start + 10)]
        # One prompt for half of them: its newest group is often one that a step holds.
        prompts = ["0" if chance.random() < 0.5 else str(number) for number in range(start, start + 10)]
        with engine.begin() as connection:
            connection.execute(schema.trajectories.insert(), list(map(row, names, prompts, [began] * 10)))
        owed += names
        told = [name for name in owed if chance.random() > LATE]
        owed = [name for name in owed if name not in told]
        with engine.begin() as connection:
            connection.execute(schema.feedback.insert(), [reward(name, chance.random()) for name in told])
    with engine.begin() as connection:
        connection.execute(schema.feedback.insert(), [reward(name, chance.random()) for name in owed or ["nobody"]])
    over.set()
    for worker in workers:
        worker.join()
    assert failures == []
    # The windows end; whoever is left is scored, and taken.
    sweep(engine, GROUPS, datetime.now(UTC) + timedelta(seconds=600))
    while step(store):
        pass
    t, m = schema.trajectories.c, schema.step_trajectories.c
    with engine.connect() as connection:
        states = Counter(dict(connection.execute(select(t.state, func.count()).group_by(t.state)).all()))
        taken = connection.execute(select(func.count(), func.count(m.trajectory_id.distinct()))).one()
    assert states.total() == TRAJECTORIES
    assert states.keys() <= {"trained", "rewarded"}
    # Fewer than a step takes may be left.
    assert states["rewarded"] < STEPS.groups_per_step * GROUPS.target_size + STEPS.singles_per_step
    assert tuple(taken) == (states["trained"], states["trained"])


@pytest.mark.parametrize("of", ["its prompt", "its header", "what it was drawn for"])
def test_a_sweep_does_not_wait_for_the_groups_of_a_step_that_ends(judge, database_kind, of):
    """The step holds its groups and wants the policy, which whoever places trajectories holds."""
    if database_kind == "sqlite":
        pytest.skip("one writer at a time")
    judge.prompt("a")
    judge.sweep()
    group_id = judge.trajectory("a").group_id
    with judge.engine.begin() as connection:
        connection.execute(schema.groups.update().values(state="claimed", step=1))
        connection.execute(schema.trajectories.update().values(state="claimed"))
    judge.seed.group("a.shadow", formed_by="shadow")
    joins = {"its prompt": None, "its header": group_id, "what it was drawn for": "a.shadow"}
    judge.prompt("b", after_s=1, group_id=joins[of])
    sweeping = threading.Thread(target=judge.sweep)
    with judge.engine.begin() as ending:
        ending.execute(schema.groups.update().where(schema.groups.c.id == group_id).values(state="trained"))
        ending.execute(schema.trajectories.update().where(schema.trajectories.c.id == "a").values(state="trained"))
        sweeping.start()
        sweeping.join(timeout=10)
        assert not sweeping.is_alive()
        ending.execute(schema.policies.update().values(live_version=0))
    assert judge.trajectory("b").placed_at is not None


def step(store):
    """A step that trains on all it claims; whether there was one."""
    claim = store.claim("starter", STEPS)
    if claim is None:
        return False
    members = store.members(claim)
    store.note_advantages(claim, {member.trajectory_id: 1.0 for member in members}, {})
    store.trained(claim, {"loss": 0.0}, Path("/nowhere"), "0" * 64)
    store.loaded(claim)
    store.promote(claim, {"seconds": 0.1}, Probe(0.0, 1), keep_served=2)
    return True


def row(name, prompt, at):
    return {
        "project": "default", "id": name, "policy": "starter", "split": "train", "no_train": False, "state": "open",
        "first_version": 0, "last_version": 0, "completions": 1, "sampled_tokens": 1, "created_at": at,
        "last_seen_at": datetime.now(UTC), "prompt_hash": prompt * 32,
    }  # fmt: skip


def reward(name, value):
    return {
        "project": "default", "id": f"f-{name}", "target_kind": "trajectory", "target_id": name, "choice": 0,
        "reward": value, "source": "reward", "final": True, "state": "waiting", "created_at": datetime.now(UTC),
    }  # fmt: skip
