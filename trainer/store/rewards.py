"""Read live rewards from SQL: the rewards of trajectories that a version began. Reads only.

A group counts once for each version, with the mean of its rewards: attempts at one prompt share its difficulty, so
eight of them are not eight times as informative as one.
"""

from datetime import datetime
from typing import Any

from sqlalchemy import Connection, Select, and_, case, func, select

from migrations import schema
from trainer.domain.baselines import LARGEST
from trainer.domain.gate.verdict import Moments
from whetstone.domain.ids import version_id

OVER = ("rewarded", "claimed", "trained", "excluded")
"""States of a trajectory that has ended and may have a reward."""

t, c, v, r = schema.trajectories.c, schema.completions.c, schema.policy_versions.c, schema.gate_results.c


def read_moments(connection: Connection, project: str, policy: str, version: int | None, since: datetime) -> Moments:
    """Return the moments of rewards of trajectories that a version began since then, group by group. None: any version.

    Two reads: with sums of squares, rewards far from 0 would leave no digits for the variance.
    """
    single = _rewards(project, policy, version).where(t.created_at >= since).subquery().c
    rewards = select(func.avg(single.reward).label("reward")).group_by(single.unit).subquery().c.reward
    count, mean = connection.execute(select(func.count(rewards), func.avg(rewards))).one()
    if not count:
        return Moments(0, 0.0, 0.0)
    gap = rewards - mean
    variance = connection.execute(select(func.avg(gap * gap))).scalar_one()
    return Moments(count, mean, variance or 0.0)


def read_rewards(
    connection: Connection, project: str, policy: str, version: int, before: datetime, most: int
) -> list[float]:
    """Return rewards of trajectories that a version began before then, group by group, the newest first.

    Only the newest `most` trajectories count.
    """
    # Start at the version's creation; else a version with few rewards causes a scan of all rows.
    made = select(v.created_at).where(v.project == project, v.id == version_id(policy, version)).scalar_subquery()
    query = _rewards(project, policy, version).where(t.created_at.between(made, before))
    single = query.order_by(t.created_at.desc()).limit(most).subquery().c
    grouped = select(func.avg(single.reward)).group_by(single.unit)
    return list(connection.execute(grouped.order_by(func.max(single.created_at).desc())).scalars())


def read_looked(
    connection: Connection, project: str, policy: str, version: int | None, test: str, since: datetime
) -> int:
    """Return how many looks of a test are over. Version None: of a test that is not of one version."""
    of_test = [r.project == project, r.policy == policy, r.test == test]
    if version is not None:
        of_test.append(r.version == version)
    query = select(r.figures).where(*of_test, r.decision == "testing", r.created_at >= since)
    figures = connection.execute(query.order_by(r.created_at.desc()).limit(1)).scalar_one_or_none()
    return 0 if figures is None else int(figures["look"])


def _rewards(project: str, policy: str, version: int | None) -> Select[Any]:
    """Select rewards in the train split, without shadow answers, which no app requested. Version None: of any."""
    first = and_(c.project == t.project, c.trajectory_id == t.id, c.turn == 0)
    reward = case((t.reward > LARGEST, LARGEST), (t.reward < -LARGEST, -LARGEST), else_=t.reward)
    query = (
        select(reward.label("reward"), t.created_at, func.coalesce(t.group_id, t.id).label("unit"))
        .join(schema.completions, first)
        .where(t.project == project, t.policy == policy, t.split == "train")
        .where(t.reward.is_not(None), t.state.in_(OVER), c.threaded_by != "shadow")
    )
    return query if version is None else query.where(t.first_version == version)
