"""Compute the baselines of single trajectories (those without a group): running means of rewards. Pure.

REINFORCE with a baseline (R. J. Williams, Machine Learning 8, 1992): A = r - b. Any b that does not depend on this
trajectory leaves the gradient's expectation unchanged, and the nearer b is to the expected reward, the smaller the
variance. So b is the mean of the earlier rewards and of the other rewards of the step, never of the trajectory's own.
Without history this is RLOO's leave-one-out mean (arXiv 2402.14740).

A baseline may also know what earlier answers to the same prompt got, which counts less the farther the policy has moved
since. Both ideas are those of SPO (arXiv 2509.13232).
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trainer.domain.eligible_groups import CandidateMember

WINDOW = 512
"""The most rewards that the history of a mean counts for. The policy changes, and the expected reward with it: a
reward's weight falls to 1/e after about this many later rewards. With thumbs (spread at most 0.5) the error of such a
mean is 0.02.
"""
SHRINKAGE = 8
"""This many rewards of a user weigh as much as the task's mean: variance within a user divided by variance between
users (empirical Bayes, Efron and Morris, JASA 70, 1975). Thumbs vary by 0.25 at most within a user; 8 is right for
users whose shares of thumbs up spread by 0.18.
"""
LARGEST = 1e15
"""Largest absolute reward that enters a mean; larger rewards are clipped to it. The squares of gradients must fit into
float32: above this, one mistaken reward would fail not only its own step but every later one.
"""

Key = tuple[str, str]
"""Task ("" without one) and end user ("" for all users together)."""


@dataclass(frozen=True, slots=True)
class Mean:
    """A running mean."""

    mean: float
    count: int
    """Number of rewards in it, including those that have lost their weight."""

    @property
    def weight(self) -> int:
        """How many rewards it counts for."""
        return min(self.count, WINDOW)

    def joined(self, rewards: Sequence[float]) -> "Mean":
        """Return the mean with these rewards added. It is exactly their value if all are equal to the mean."""
        origin = self.mean if self.count else rewards[0]
        moved = math.fsum(reward - origin for reward in rewards) / (self.weight + len(rewards))
        return Mean(origin + moved, self.count + len(rewards))


NOTHING = Mean(0.0, 0)


@dataclass(frozen=True, slots=True)
class PromptMean:
    """What earlier steps know of a prompt: the mean of its rewards, and how many rewards it counts for."""

    mean: float
    weight: float


UNKNOWN = PromptMean(0.0, 0.0)


def remembered(moved: float, half_life: float) -> float:
    """Return how much a reward counts after the policy has moved this far: 2^(-moved / half_life).

    `moved`, `half_life`: KL, nats a token.
    """
    return float(2.0 ** (-moved / half_life))


@dataclass(frozen=True, slots=True)
class BaselineComparison:
    """The baselines of a step's singles, and the updated means."""

    baselines: Mapping[str, float]
    """Trajectory id -> its baseline; absent where it is the first of its task and the only one in the step."""
    means: Mapping[Key, Mean]
    """The running means with the step's rewards added."""


def compare(
    singles: Sequence[CandidateMember], known: Mapping[Key, Mean], prompts: Mapping[str, PromptMean] | None = None
) -> BaselineComparison:
    """Compute each single's baseline, and the means after the step. `known` are the means before the step.

    b = m_task + (m_user - m_task) · n / (n + SHRINKAGE), where n is the number of rewards that m_user counts for. Both
    means exclude the single's own reward. So a thumb up from a harsh user weighs more than one from a kind user, once
    both users have a history.

    With `prompts`, what earlier steps know by hash of the prompt, b is then moved towards the mean of the prompt in the
    same way: b + (m_prompt - b) · n / (n + SHRINKAGE). m_prompt is over those rewards and over the others of the step.
    """
    rewards: defaultdict[Key, list[float]] = defaultdict(list)
    for single in singles:
        for key in _keys(single):
            rewards[key].append(_bounded(single.reward))
    before = {key: known.get(key, NOTHING) for key in rewards}
    means = {key: before[key].joined(values) for key, values in rewards.items()}

    def others(key: Key) -> int:
        return before[key].weight + len(rewards[key]) - 1

    def without(key: Key, reward: float) -> float:
        return means[key].mean - (reward - means[key].mean) / others(key)

    baselines = {}
    for single in singles:
        task, *user = _keys(single)
        if not others(task):
            continue
        baseline = without(task, _bounded(single.reward))
        if user and (known_of_user := others(user[0])):
            apart = without(user[0], _bounded(single.reward)) - baseline
            baseline += apart * known_of_user / (known_of_user + SHRINKAGE)
        baselines[single.trajectory_id] = baseline
    if prompts is not None:
        _move_to_prompts(baselines, singles, prompts)
    return BaselineComparison(baselines, means)


def _move_to_prompts(
    baselines: dict[str, float], singles: Sequence[CandidateMember], prompts: Mapping[str, PromptMean]
) -> None:
    of_prompt: defaultdict[str, list[CandidateMember]] = defaultdict(list)
    for single in singles:
        if single.prompt:
            of_prompt[single.prompt].append(single)
    for prompt, among in of_prompt.items():
        before = prompts.get(prompt, UNKNOWN)
        total = math.fsum(_bounded(single.reward) for single in among)
        weight = before.weight + len(among) - 1
        for single in among:
            if weight and single.trajectory_id in baselines:
                mean = (before.mean * before.weight + total - _bounded(single.reward)) / weight
                baseline = baselines[single.trajectory_id]
                baselines[single.trajectory_id] += (mean - baseline) * weight / (weight + SHRINKAGE)


def _keys(single: CandidateMember) -> list[Key]:
    """Return the key of its task, then the key of its user in that task if it has one."""
    return [(single.task, user) for user in dict.fromkeys(("", single.end_user))]


def _bounded(reward: float) -> float:
    return max(-LARGEST, min(LARGEST, reward))
