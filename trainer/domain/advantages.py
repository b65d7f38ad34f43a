"""Compute advantages from rewards."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from trainer.errors import RewardError
from whetstone.config.trainer import AdvantageScale

SMALLEST_SPREAD = 1e-4
"""Added to a standard deviation before dividing by it, as TRL does."""
SMALLEST_GAP = 1e-4
"""Rewards whose gap is at most this share of the largest of them, in size, count as equal. Judges and metrics repeat
themselves to three or four digits; AdamW scales a step up to its usual size, so a step of gaps that are noise would
train on the noise alone. Relative, so that rewards may have any unit.
"""
SMALLEST_SUM = 1e-3
"""Parts whose weighted differences add up to no more than this share of the largest weight cancel out: what is left is
mostly SMALLEST_SPREAD, which counts for more in a part of small numbers.
"""


@dataclass(frozen=True, slots=True)
class Advantages:
    """The advantages that a step's groups yield."""

    by_trajectory: Mapping[str, float]
    """Trajectory id -> reward minus the mean of its group. Trajectories of uniform groups are absent, not 0."""
    means: Mapping[str, float]
    """Group id -> mean of its rewards; uniform groups are absent."""


@dataclass(frozen=True, slots=True)
class RewardPart:
    """One of the numbers that a reward was added up from."""

    number: float
    weight: float


Parts = Mapping[str, RewardPart]
"""The parts of one reward, by name; empty where it has none."""


def uniform(rewards: Collection[float]) -> bool:
    """Return whether finite rewards prefer none of their trajectories: there are fewer than two, or all are equal up to
    SMALLEST_GAP.
    """
    return len(rewards) < 2 or max(rewards) - min(rewards) <= SMALLEST_GAP * max(map(abs, rewards))


def group_relative(rewards: Mapping[str, Mapping[str, float]]) -> Advantages:
    """Compute A = r - mean(r) over the trajectories of a group, never over rows.

    This is GRPO's baseline (arXiv 2402.03300) without its division, as Dr. GRPO argues (arXiv 2503.20783): with the
    division, a gap of 0.001 inside one group would train as hard as a gap of 1 in another. `divisors` returns the
    divisors for those who want the division.

    `rewards` maps group id -> trajectory id -> reward. A trajectory is in one group.

    Raises:
        RewardError: a reward is NaN or infinite, or rewards are too large to be compared.
    """
    by_trajectory: dict[str, float] = {}
    means: dict[str, float] = {}
    for group_id, reward_of in rewards.items():
        for trajectory_id, reward in reward_of.items():
            if not math.isfinite(reward):
                raise RewardError(f"group {group_id}: reward {reward} of trajectory {trajectory_id} is not finite")
        if uniform(reward_of.values()):
            continue
        mean = means[group_id] = _mean(f"group {group_id}", reward_of.values())
        by_trajectory |= {trajectory_id: reward - mean for trajectory_id, reward in reward_of.items()}
    for trajectory_id, advantage in by_trajectory.items():
        if not math.isfinite(advantage):
            raise RewardError(f"trajectory {trajectory_id}: its reward differs from its group's mean by {advantage}")
    return Advantages(by_trajectory, means)


def state_relative(rewards: Mapping[str, float]) -> Mapping[str, float]:
    """Compute A = r - mean(r) over the trajectories that met one state, by trajectory id; 0 for all if `uniform`.

    The idea is that of GiGPO's anchor states (arXiv 2505.10978). `rewards` maps trajectory id -> finite reward.

    Raises:
        RewardError: rewards are too large to be added up.
    """
    if uniform(rewards.values()):
        return dict.fromkeys(rewards, 0.0)
    mean = _mean("state", rewards.values())
    return {trajectory_id: reward - mean for trajectory_id, reward in rewards.items()}


def turn_credit(judged: Sequence[Sequence[float]]) -> list[float]:
    """Return what was earned at each of an attempt's T answers, from the scores that J judgements gave each of them.

    The mean over judgements of (s_t - mean over t of s_t) / T. It adds up to 0, so the attempt is worth what its whole
    was scored; dividing by T keeps the credit of one turn within that of the whole, however many turns there are. A
    judgement that is stricter overall gives the same credit. All J have T scores, at least one.
    """
    turns = len(judged[0])
    of_each = [[(score - math.fsum(scores) / turns) / turns for score in scores] for scores in judged]
    return [math.fsum(at_turn) / len(judged) for at_turn in zip(*of_each, strict=True)]


def common_parts(members: Mapping[str, Parts]) -> Mapping[str, Parts] | None:
    """Return the parts of all members of a group; None where a member has none, or other parts than another."""
    names = {frozenset(parts) for parts in members.values()}
    return members if len(names) == 1 and names != {frozenset()} else None


def parts_relative(members: Mapping[str, Parts]) -> Mapping[str, float]:
    """Compute the advantages of a group's trajectories from the parts of their rewards, by trajectory id.

        A = Σ_k w_k · (r_k - mean(r_k)) / (s(r_k) + 1e-4)        over the parts k, each over the group

    This is GDPO's sum before its normalisation over the step (arXiv 2601.05242). A part that is `uniform` adds nothing.
    Empty where no member is preferred: no part differs, or what they say cancels out. `members` have `common_parts`.

    Raises:
        RewardError: numbers of a part are too large to be compared.
    """
    summed: dict[str, list[float]] = {trajectory_id: [] for trajectory_id in members}
    largest = 0.0
    for name in next(iter(members.values())):
        numbers = {trajectory_id: parts[name].number for trajectory_id, parts in members.items()}
        if uniform(numbers.values()):
            continue
        mean, by = _mean(f"part {name}", numbers.values()), divisor(f"part {name}", numbers.values(), "parts")
        for trajectory_id, number in numbers.items():
            weight = members[trajectory_id][name].weight
            summed[trajectory_id].append(weight * (number - mean) / by)
            largest = max(largest, abs(weight))
    advantages = {trajectory_id: math.fsum(terms) for trajectory_id, terms in summed.items()}
    return advantages if max(map(abs, advantages.values())) > SMALLEST_SUM * largest else {}


def divisors(
    rewards: Mapping[str, Mapping[str, float]], singles: Mapping[str, float], scale: AdvantageScale
) -> Mapping[str, float]:
    """Return trajectory id -> the divisor of its advantage.

    - `none`: 1 (Dr. GRPO, arXiv 2503.20783).
    - `group`: s(its group) + 1e-4 (GRPO, arXiv 2402.03300).
    - `batch`: s(all rewards of the step) + 1e-4 (arXiv 2508.08221: steadier than the group's where groups are small).
    - `mean`: mean(its group), 1 where a reward is negative (MaxRL, arXiv 2602.02710: with rewards of 0 and 1 it gives
      the gradient of log(success rate), so a prompt that is rarely answered right weighs more).
    - `parts`: as `group`, for rewards without parts (GDPO, arXiv 2601.05242; see `parts_relative`).

    s(r) = sqrt(Σ (r - mean r)² / (n - 1)), the sample standard deviation. `rewards` has the form that `group_relative`
    takes, uniform groups included. `singles` maps the trajectories that are compared with a baseline to their rewards:
    they have no group, so `group`, `mean` and `parts` divide them by that of the step. Where all rewards of the step
    are equal, only singles have an advantage and there is no scale; their advantage is not divided.

    Raises:
        RewardError: rewards are too large to be compared.
    """
    everybody = [trajectory_id for reward_of in (*rewards.values(), singles) for trajectory_id in reward_of]
    if scale == "none":
        return dict.fromkeys(everybody, 1.0)
    in_step = [reward for reward_of in (*rewards.values(), singles) for reward in reward_of.values()]
    by_trajectory = dict.fromkeys(everybody, divisor("step", in_step, scale))
    if scale != "batch":
        for group_id, reward_of in rewards.items():
            by_trajectory |= dict.fromkeys(reward_of, divisor(f"group {group_id}", reward_of.values(), scale))
    return by_trajectory


def divisor(name: str, rewards: Collection[float], scale: AdvantageScale) -> float:
    """Return what differences of these rewards are divided by, see `divisors`; 1 where all rewards are equal.

    `name`: of what they are compared in.

    Raises:
        RewardError: rewards are too large to be compared.
    """
    if scale == "none" or len(set(rewards)) < 2:
        return 1.0
    mean = _mean(name, rewards)
    if scale == "mean":
        return mean if min(rewards) >= 0 else 1.0
    # Unlike a sum of squares, hypot overflows only where the result does.
    spread = math.hypot(*(reward - mean for reward in rewards)) / math.sqrt(len(rewards) - 1)
    if not math.isfinite(spread):
        raise RewardError(f"{name}: its rewards are too far apart to be compared")
    return spread + SMALLEST_SPREAD


def _mean(name: str, rewards: Collection[float]) -> float:
    try:
        return math.fsum(rewards) / len(rewards)
    except OverflowError as error:
        raise RewardError(f"{name}: its rewards are too near the largest number to be added up") from error
