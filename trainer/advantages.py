"""Rewards in, advantages out. Knows groups and numbers; nothing of tokens, rows or torch."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from trainer.errors import RewardError


@dataclass(frozen=True, slots=True)
class Advantages:
    """What a step's groups teach."""

    by_trajectory: Mapping[str, float]
    """Trajectory id -> reward minus the mean of its group. Trajectories of uniform groups are absent, not 0."""
    uniform_groups: tuple[str, ...]
    """Ids of the groups whose members all got the same reward: they prefer nothing (`group_uniform`)."""


def group_relative(rewards: Mapping[str, Mapping[str, float]]) -> Advantages:
    """A = r - mean(r), over the trajectories of a group; never over rows, never divided by a standard deviation.

    GRPO's baseline (arXiv 2402.03300) without its division, as Dr. GRPO argues (arXiv 2503.20783): divided, a gap of
    0.001 inside one group would train as hard as a gap of 1 in another.

    `rewards` maps group id -> trajectory id -> reward. A trajectory is in one group.

    Raises:
        RewardError: a reward is NaN or infinite, or rewards are too large to be compared.
    """
    by_trajectory: dict[str, float] = {}
    uniform_groups = []
    for group_id, reward_of in rewards.items():
        for trajectory_id, reward in reward_of.items():
            if not math.isfinite(reward):
                raise RewardError(f"group {group_id}: reward {reward} of trajectory {trajectory_id} is not finite")
        if len(set(reward_of.values())) < 2:
            uniform_groups.append(group_id)
            continue
        mean = _mean(group_id, reward_of)
        by_trajectory |= {trajectory_id: reward - mean for trajectory_id, reward in reward_of.items()}
    for trajectory_id, advantage in by_trajectory.items():
        if not math.isfinite(advantage):
            raise RewardError(f"trajectory {trajectory_id}: its reward differs from its group's mean by {advantage}")
    return Advantages(by_trajectory, tuple(uniform_groups))


def _mean(group_id: str, reward_of: Mapping[str, float]) -> float:
    try:
        return math.fsum(reward_of.values()) / len(reward_of)
    except OverflowError as error:
        raise RewardError(f"group {group_id}: its rewards are too near the largest number to be added up") from error
