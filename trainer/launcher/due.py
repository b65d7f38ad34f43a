"""Decide whether a policy has a step that a training worker would take now. Only reads."""

from datetime import datetime

from sqlalchemy import Connection, select

from migrations import schema
from trainer.domain.triggers import choose
from trainer.store.eligible_groups import read_candidates, read_lineage, read_live_since, unfinished_step
from trainer.store.parts import with_parts
from whetstone.config.rewards import RewardSettings
from whetstone.config.trainer import TrainerSettings


def why_due(
    connection: Connection,
    project: str,
    policy: str,
    settings: TrainerSettings,
    now: datetime,
    learning: RewardSettings | None = None,
) -> str | None:
    """Return why the policy has a step to take now; None if it has none, or if a worker is taking it.

    The rules are those of `trainer.store.claims`. `learning`: the settings by whose weights the parts of rewards add
    up; None: parts do not count.
    """
    p = schema.policies.c
    columns = (p.state, p.live_version, p.step_asked_at)
    row = connection.execute(select(*columns).where(p.project == project, p.id == policy)).one_or_none()
    if row is None or row.state == "paused":
        return None
    step = unfinished_step(connection, project, policy)
    if step is not None:
        # A step in `waiting_gate` has no lease: the gate's tests end it.
        is_left = step.state != "waiting_gate" and step.lease_until <= now
        is_wanted = row.state == "training" or step.asked_at is not None
        return f"{policy}: the worker of step {step.number} has ended" if is_left and is_wanted else None
    if row.step_asked_at is not None:
        return f"{policy}: a step was requested"
    if row.state != "training":
        return None
    choice = choose(
        with_parts(connection, project, read_candidates(connection, project, policy), learning),
        read_lineage(connection, project, policy, row.live_version),
        now,
        settings,
        live_since=read_live_since(connection, project, policy, row.live_version),
    )
    return f"{policy}: a step of {len(choice.claimed)} groups is due" if choice.claimed else None
