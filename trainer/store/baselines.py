"""Read from SQL what singles are compared with: running means, and what earlier steps know of their prompts."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from sqlalchemy import Connection, and_, case, func, select

from migrations import schema
from trainer.domain.baselines import LARGEST, BaselineComparison, Key, Mean, PromptMean, compare, remembered
from trainer.domain.eligible_groups import CandidateMember
from whetstone.config.trainer import TrainerSettings
from whetstone.database.engine import chunks

MOST_STEPS = 32
"""The newest steps whose rewards are read: the cost must not grow with the history."""

b, r, s, m, t = (
    schema.baselines.c,
    schema.gate_results.c,
    schema.steps.c,
    schema.step_trajectories.c,
    schema.trajectories.c,
)


def read_comparison(
    connection: Connection, project: str, policy: str, singles: Sequence[CandidateMember], settings: TrainerSettings
) -> tuple[Mapping[Key, Mean], BaselineComparison]:
    """Return the running means of the singles' tasks and users, where there are any, and each single's baseline."""
    known = _read_means(connection, project, policy, singles)
    if settings.single_baseline == "task":
        return known, compare(singles, known)
    prompts = read_prompt_means(connection, project, policy, singles, settings.prompt_half_life)
    return known, compare(singles, known, prompts)


def _read_means(
    connection: Connection, project: str, policy: str, singles: Sequence[CandidateMember]
) -> dict[Key, Mean]:
    """Return the running means of these trajectories' tasks and users, where there are any."""
    query = (
        select(b.task, b.end_user, b.mean, b.count)
        .where(b.project == project, b.policy == policy)
        .where(b.task.in_({single.task for single in singles}))
        .where(b.end_user.in_({"", *(single.end_user for single in singles)}))
    )
    return {(task, user): Mean(mean, count) for task, user, mean, count in connection.execute(query)}


def read_prompt_means(
    connection: Connection, project: str, policy: str, singles: Sequence[CandidateMember], half_life: float
) -> dict[str, PromptMean]:
    """Return the mean reward of each prompt that singles share with trajectories of the last MOST_STEPS steps.

    A reward counts less the farther the policy has moved since, see `baselines.remembered`. `half_life`: nats a token.
    """
    prompts = {single.prompt for single in singles} - {""}
    weights = _weights(connection, project, policy, half_life)
    sums: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    reward = case((m.reward > LARGEST, LARGEST), (m.reward < -LARGEST, -LARGEST), else_=m.reward)
    query = (
        select(t.prompt_hash, m.step_id, func.count(), func.avg(reward))
        .join(schema.trajectories, and_(t.project == m.project, t.id == m.trajectory_id))
        .where(m.project == project, m.step_id.in_(weights), t.policy == policy)
        .group_by(t.prompt_hash, m.step_id)
    )
    for some in chunks(sorted(prompts)):
        for prompt, step_id, count, mean in connection.execute(query.where(t.prompt_hash.in_(some))):
            sums[prompt][0] += weights[step_id] * count
            sums[prompt][1] += weights[step_id] * count * mean
    return {prompt: PromptMean(total / weight, weight) for prompt, (weight, total) in sums.items() if weight}


def _weights(connection: Connection, project: str, policy: str, half_life: float) -> Mapping[str, float]:
    """Return for each of the last steps how much its rewards still count."""
    of_probe = and_(r.project == s.project, r.policy == s.policy, r.version == s.version_out, r.test == "probe")
    query = (
        select(s.id, s.state, r.figures)
        .join(schema.gate_results, of_probe, isouter=True)
        .where(s.project == project, s.policy == policy, s.ended_at.is_not(None))
        .order_by(s.number.desc())
        .limit(MOST_STEPS)
    )
    weights: dict[str, float] = {}
    moved = 0.0
    for step_id, state, figures in connection.execute(query):
        if step_id in weights:
            continue  # a probe that was repeated
        if state == "promoted":
            moved += (figures or {}).get("parent_kl", half_life)
        weights[step_id] = remembered(moved, half_life)
    return weights
