"""Select and read the pairs of answers of another policy of which a step prefers the better one.

A pair is two trajectories of one group or, without a group, of one prompt. Their answers are stored as examples
(`trainer.store.examples.answers`) under ids of their own (`PREFERRED`): the same answer may be imitated as well.
"""

from collections import defaultdict

from sqlalchemy import Connection, Select, func, select

from migrations import schema
from trainer.domain.advantages import uniform
from trainer.domain.claims import Claim
from trainer.domain.examples.sft_examples import ExampleSelection
from trainer.store.examples.answers import of_step
from trainer.store.examples.sources import USABLE, Source, answers_of, trainable_of
from whetstone.database.engine import chunks
from whetstone.domain.ids import PREFERRED

e, t = schema.examples.c, schema.trajectories.c
_UNIT = func.coalesce(t.group_id, t.prompt_hash)


def find_pairs(connection: Connection, claim: Claim, wanted: ExampleSelection) -> list[Source]:
    """Return the answers of the pairs that the step learns from: first of those that no step has used, then the newest.

    Of each group or prompt the trajectories with the highest and the lowest reward, where these differ (`uniform`).
    `wanted.limit` counts pairs.
    """
    pairs = [
        (row.better, row.worse)
        for row in connection.execute(_pairs(claim, wanted.source))
        if not uniform((row.highest, row.lowest))
    ]
    chosen = [trajectory_id for pair in pairs[: wanted.limit] for trajectory_id in pair]
    return answers_of(connection, claim, wanted.source, chosen, PREFERRED)


def read_pairs(connection: Connection, claim: Claim) -> list[tuple[str, str]]:
    """Return the step's pairs, as ids of the better and the worse trajectory, in a fixed order.

    Trajectories whose rewards were deleted, or became equal, are absent.
    """
    ids = sorted(set(connection.execute(select(e.trajectory_id).where(*of_step(claim))).scalars()))
    units: defaultdict[str, list[tuple[float, str]]] = defaultdict(list)
    for some in chunks(ids):
        query = select(t.id, t.reward, _UNIT.label("unit")).where(t.project == claim.project, t.id.in_(some))
        for row in connection.execute(query.where(t.reward.is_not(None), _UNIT.is_not(None))):
            units[row.unit].append((row.reward, row.id))
    return [
        (max(both)[1], min(both)[1])
        for _, both in sorted(units.items())
        if len(both) == 2 and not uniform([reward for reward, _ in both])
    ]


def _pairs(claim: Claim, policy: str) -> Select[tuple[str, str, float, float]]:
    """Select the best and the worst trajectory of each group or prompt of the policy, and their rewards."""
    best = func.row_number().over(partition_by=_UNIT, order_by=(t.reward.desc(), t.created_at.desc(), t.id))
    worst = func.row_number().over(partition_by=_UNIT, order_by=(t.reward, t.created_at.desc(), t.id))
    sides = (e.project == claim.project, e.policy == claim.policy, e.source_id.endswith(PREFERRED))
    ranked = (
        select(t.id, t.reward, t.created_at, _UNIT.label("unit"), best.label("best"), worst.label("worst"))
        .where(*trainable_of(claim, policy), t.reward.is_not(None), _UNIT.is_not(None))
        .where(t.id.not_in(select(e.trajectory_id).where(*sides, ~USABLE)))
        .subquery()
    )
    better, worse = ranked.alias().c, ranked.alias().c
    used = select(e.trajectory_id, func.max(e.step).label("step")).where(*sides).group_by(e.trajectory_id).subquery()
    return (
        select(better.id.label("better"), worse.id.label("worse"))
        .add_columns(better.reward.label("highest"), worse.reward.label("lowest"))
        .join_from(better.id.table, worse.id.table, better.unit == worse.unit)
        .join(used, used.c.trajectory_id == better.id, isouter=True)
        .where(better.best == 1, worse.worst == 1, better.reward > worse.reward)
        .order_by(func.coalesce(used.c.step, 0), better.created_at.desc(), better.id)
    )
