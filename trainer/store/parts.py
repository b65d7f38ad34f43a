"""Read from SQL the parts that rewards were added up from: those of feedback, and numbers of reward functions.

A reward has parts only where they add up to it, with the weights of the policy's present settings. So a veto, the
reward of a failure, or weights that have changed since leave none. Reads only.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from sqlalchemy import Connection, select

from migrations import schema
from trainer.domain.advantages import Parts, RewardPart, common_parts, parts_relative
from trainer.domain.eligible_groups import Candidate
from whetstone.config.rewards import RewardSettings
from whetstone.database.engine import chunks

GIVEN, JUDGE = "given", "judge"
"""Parts without a name of their own: a reward that was given as one number, and a judge's score beside it."""
ROUNDING = 1e-9
"""Most that a sum of parts may differ from the reward, as a share of their sizes: sums in another order."""


def with_parts(
    connection: Connection, project: str, candidates: Iterable[Candidate], learning: RewardSettings | None
) -> list[Candidate]:
    """Return the candidates, and of those with equal rewards whether parts of them differ. None: parts do not count."""
    groups = list(candidates)
    if learning is None:
        return groups
    equal = [group for group in groups if group.uniform]
    parts = read_parts(connection, project, [one.trajectory_id for group in equal for one in group.members], learning)
    differing = {group.group_id for group in equal if _differ([parts[one.trajectory_id] for one in group.members])}
    return [replace(group, differs_in_parts=group.group_id in differing) for group in groups]


def _differ(members: Sequence[Parts]) -> bool:
    common = common_parts({str(place): parts for place, parts in enumerate(members)})
    return common is not None and bool(parts_relative(common))


def read_parts(
    connection: Connection, project: str, trajectory_ids: Collection[str], learning: RewardSettings
) -> dict[str, Parts]:
    """Return the parts of each trajectory's reward, by its id. A claim freezes what they are read from."""
    t, f = schema.trajectories.c, schema.feedback.c
    parts: dict[str, Parts] = {}
    for some in chunks(trajectory_ids):
        given: dict[str, list[Any]] = {}
        of_trajectories = (f.project == project, f.trajectory_id.in_(some), f.target_kind != "group")
        query = (
            select(f.trajectory_id, f.completion_id, f.reward, f.parts)
            .where(*of_trajectories, f.reward.is_not(None), f.credit.is_(None), f.state.in_(("applied", "used")))
            .order_by(f.created_at, f.id)
        )
        for row in connection.execute(query):
            given.setdefault(row.trajectory_id, []).append(row)
        of_rewards = select(t.id, t.reward, t.reward_source, t.code_parts).where(t.project == project, t.id.in_(some))
        parts |= {row.id: _parts_of(row, given.get(row.id, []), learning) for row in connection.execute(of_rewards)}
    return parts


def _parts_of(trajectory: Any, given: Sequence[Any], learning: RewardSettings) -> Parts:
    """Return the parts of a reward; empty where they do not add up to it. `given`: its feedback, the oldest first."""
    source = trajectory.reward_source
    parts = _of_functions(trajectory.code_parts or {}, learning)
    if source in ("trajectory", "completions"):
        parts |= _of_feedback(
            [row for row in given if (row.completion_id is None) == (source == "trajectory")], learning
        )
        if learning.ruler.weight:
            score = (trajectory.reward - _sum(parts.values())) / learning.ruler.weight
            parts[JUDGE] = RewardPart(score, learning.ruler.weight)
    elif source in ("group", "judge"):
        parts[GIVEN] = RewardPart(trajectory.reward - _sum(parts.values()), 1.0)
    elif source != "code":
        return {}
    sizes = math.fsum(abs(part.weight * part.number) for part in parts.values())
    return parts if abs(trajectory.reward - _sum(parts.values())) <= ROUNDING * sizes else {}


def _of_functions(numbers: Mapping[str, float], learning: RewardSettings) -> dict[str, RewardPart]:
    weights = {function.name: function.weight for function in learning.rewards if function.kind != "veto"}
    return {
        f"code/{name}": RewardPart(number, weights[function])
        for name, number in numbers.items()
        if (function := name.partition(".")[0]) in weights
    }


def _of_feedback(rows: Sequence[Any], learning: RewardSettings) -> dict[str, RewardPart]:
    """Return the parts of the last feedback on the trajectory, or their means over its completions' last feedback."""
    last = list({row.completion_id: row for row in rows}.values())
    names = {frozenset(row.parts or ()) for row in last}
    if len(names) != 1 or names == {frozenset()}:
        return {GIVEN: RewardPart(fmean(row.reward for row in last), 1.0)} if last else {}
    return {
        f"feedback/{name}": RewardPart(fmean(row.parts[name] for row in last), learning.weights.get(name, 1.0))
        for name in sorted(last[0].parts)
    }


def _sum(parts: Iterable[RewardPart]) -> float:
    return math.fsum(part.weight * part.number for part in parts)
