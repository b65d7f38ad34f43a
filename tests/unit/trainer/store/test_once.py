"""Several training workers on one database: each trajectory is in one step, each step is one worker's."""

import threading
from collections import Counter
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Engine, select

from migrations import schema
from trainer.store.unit_of_work import Store
from whetstone.config.trainer import TrainerSettings
from whetstone.database.engine import connect

RULES = TrainerSettings(groups_per_step=1, min_groups_per_step=1, max_groups_per_step=1)
GROUPS, WORKERS = 24, 4


def left(engine: Engine) -> bool:
    """Whether a group still waits for a step."""
    with engine.execution_options(isolation_level="AUTOCOMMIT").connect() as connection:
        waiting = select(schema.groups.c.id).where(schema.groups.c.state == "scored")
        return connection.execute(waiting).first() is not None


def test_four_workers_at_once_take_each_trajectory_in_one_step(engine: Engine, database_url: str, seed: Any) -> None:
    for number in range(GROUPS):
        group = f"g{number:02d}"
        seed.group(group, state="scored", size=2, rewarded=2, closed_at=datetime.now(UTC))
        for reward in (0.0, 1.0):
            row = {"reward": reward, "why_not_trained": "waiting_step"}
            seed.trajectory(f"{group}-{reward}", group, state="rewarded", **row)
    taken: list[list[int]] = []
    failures: list[Exception] = []
    together = threading.Barrier(WORKERS)

    def work() -> None:
        own = connect(database_url)
        store, mine = Store(own, "default"), []
        try:
            together.wait()
            while left(own):
                if (claim := store.claim("starter", RULES)) is not None:
                    mine.append(claim.number)
                    store.end_without_version(claim, "noop", "nothing is learned in this test", {})
        except Exception as error:
            failures.append(error)
        finally:
            taken.append(mine)
            own.dispose()

    workers = [threading.Thread(target=work) for _ in range(WORKERS)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert failures == []
    assert sorted(number for mine in taken for number in mine) == list(range(1, GROUPS + 1))
    with engine.connect() as connection:
        told = list(connection.execute(select(schema.step_trajectories.c.trajectory_id)).scalars())
        states = Counter(connection.execute(select(schema.steps.c.state)).scalars())
    assert len(told) == len(set(told)) == 2 * GROUPS
    assert states == {"noop": GROUPS}
