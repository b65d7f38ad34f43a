"""What a trajectory that is alone is compared with: running means of rewards. Pure; knows no table and no clock.

REINFORCE with a baseline (R. J. Williams, Machine Learning 8, 1992): A = r - b. Any b that this very trajectory had no
part in leaves the gradient's expectation as it is, and the nearer b is to what was to be expected, the smaller its
variance. So b is the mean of what was learned before and of the other rewards of the step, never of its own: with no
history it is RLOO's leave-one-out mean (arXiv 2402.14740).
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trainer.candidates import CandidateMember

WINDOW = 512
"""The most rewards that a mean's history counts for. The policy moves, and with it what is to be expected: a reward's
weight falls to 1/e after about so many others. Thumbs (spread at most 0.5) leave such a mean an error of 0.02."""
SHRINKAGE = 8
"""So many rewards of a user count as much as what the task tells of them: variance within a user over variance between
users (empirical Bayes, Efron and Morris, JASA 70, 1975). Thumbs vary by 0.25 at most within a user; 8 is right for
users whose shares of thumbs up spread by 0.18."""
LARGEST = 1e15
"""Rewards enter a mean as at most this. The squares of gradients must fit into float32: beyond it, one mistaken reward
would fail not its own step alone but every later one."""

Key = tuple[str, str]
"""Task ("" without one) and end user ("" for everybody)."""


@dataclass(frozen=True, slots=True)
class Mean:
    """A running mean."""

    mean: float
    count: int
    """Rewards it was made of, forgotten ones too."""

    @property
    def weight(self) -> int:
        """How many rewards it counts for."""
        return min(self.count, WINDOW)

    def joined(self, rewards: Sequence[float]) -> "Mean":
        """The mean with these rewards in it; exactly theirs if all are equal to it."""
        origin = self.mean if self.count else rewards[0]
        moved = math.fsum(reward - origin for reward in rewards) / (self.weight + len(rewards))
        return Mean(origin + moved, self.count + len(rewards))


NOTHING = Mean(0.0, 0)


@dataclass(frozen=True, slots=True)
class Compared:
    """The singles of a step beside what was to be expected of them."""

    baselines: Mapping[str, float]
    """Trajectory id -> its baseline; absent where it is the first of its task and alone in the step."""
    means: Mapping[Key, Mean]
    """The running means with the step's rewards in them."""


def compare(singles: Sequence[CandidateMember], known: Mapping[Key, Mean]) -> Compared:
    """Find each single's baseline, and the means after them all. `known` are the means before the step.

    b = m_task + (m_user - m_task) · n / (n + SHRINKAGE), n the rewards that m_user counts for; both means leave the
    single's own reward out. So a harsh user's thumb up says more than a kind one's, once the two are known.
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
    return Compared(baselines, means)


def _keys(single: CandidateMember) -> list[Key]:
    """Its task's, then its user's in that task if it has one."""
    return [(single.task, user) for user in dict.fromkeys(("", single.end_user))]


def _bounded(reward: float) -> float:
    return max(-LARGEST, min(LARGEST, reward))
