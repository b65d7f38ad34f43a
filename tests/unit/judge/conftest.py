"""A sweep some seconds after everything was seeded, and rows as they stand."""

from datetime import timedelta

import pytest
from sqlalchemy import select

from judge.settlement.sweep import sweep
from migrations import schema
from whetstone.config.rewards import RewardSettings
from whetstone.config.settings import GroupSettings

SETTINGS = GroupSettings(
    target_size=3, minimum_size=2, deadline_s=3600, prompt_window_s=60, idle_s=600, feedback_waits_s=900
)


class Judge:
    """Sweeps at a time of the test's, by settings of the test's."""

    def __init__(self, engine, seed):
        self.engine, self.seed = engine, seed
        self.settings, self.learning = SETTINGS, {}

    def rules(self, **values):
        self.settings = self.settings.model_copy(update=values)

    def policy(self, **values):
        self.learning = {"starter": RewardSettings(**values)}

    def sweep(self, after_s=1.0):
        return sweep(self.engine, self.settings, self.seed.now + timedelta(seconds=after_s), self.learning)

    def trajectory(self, trajectory_id):
        return self.seed.one(schema.trajectories, trajectory_id)

    def group_of(self, trajectory_id):
        return self.seed.one(schema.groups, self.trajectory(trajectory_id).group_id)

    def groups(self, formed_by=None):
        """Who is with whom: sorted members by group, smallest first."""
        t, g = schema.trajectories.c, schema.groups.c
        query = select(t.id, t.group_id).join(schema.groups, (g.project == t.project) & (g.id == t.group_id))
        with self.engine.connect() as connection:
            rows = connection.execute(query if formed_by is None else query.where(g.formed_by == formed_by)).all()
        found = {}
        for trajectory_id, group_id in rows:
            found.setdefault(group_id, []).append(trajectory_id)
        return sorted("".join(sorted(members)) for members in found.values())

    def prompt(self, *names, after_s=0.0, **values):
        """Trajectories that ask the same at the same time."""
        at = self.seed.now + timedelta(seconds=after_s)
        for name in names:
            row = {"prompt_hash": "a" * 32, "created_at": at, "last_seen_at": at}
            self.seed.trajectory(name, **(row | values))

    def reward(self, *names, value=1.0, after_s=0.0, **values):
        for name in names:
            self.seed.feedback(name, value, created_at=self.seed.now + timedelta(seconds=after_s), **values)


@pytest.fixture
def judge(engine, seed):
    return Judge(engine, seed)
