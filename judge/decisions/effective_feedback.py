"""Decide which feedback on the same target still counts, and what reward it gives. Pure.

Of two feedbacks on the same target the one with the later (created_at, id) counts. Scores of judges are separate from
the app's feedback, which takes precedence over them.
"""

import math
from collections.abc import Iterable, Mapping

from judge.decisions.model import Feedback, Trajectory
from judge.decisions.numbers import mean
from judge.decisions.reward_parts import Given
from whetstone.config.rewards import RewardSettings


def rewards_from_feedback(
    counted: Iterable[Feedback],
    trajectories: Mapping[str, Trajectory],
    learning: Mapping[str, RewardSettings] | None = None,
) -> dict[str, Given]:
    """Return the reward and source that feedback gives each of these trajectories; those without feedback are left out.

    That is the last reward given to the whole trajectory (also in a group's feedback), else the mean of those given to
    its completions, else the score of the judges. `learning`, by policy, decides whether a score is added to the app's
    reward (`ruler.weight`).
    """
    whole: dict[str, Given] = {}
    scores: dict[str, float] = {}
    by_completion: dict[str, dict[str, float]] = {}
    for one in sorted(counted, key=lambda feedback: feedback.order):
        if one.target_kind == "group":
            for name, reward in (one.rewards or {}).items():
                if name not in trajectories or not trajectories[name].is_of(one.target_id):
                    continue
                if one.source == "judge":
                    scores[name] = reward
                else:
                    whole[name] = (reward, "group")
        elif one.trajectory_id in trajectories and one.reward is not None:
            assert one.trajectory_id is not None
            if one.completion_id is None:
                whole[one.trajectory_id] = (one.reward, "trajectory")
            else:
                by_completion.setdefault(one.trajectory_id, {})[one.completion_id] = one.reward
    means = {name: (mean(rewards.values()), "completions") for name, rewards in by_completion.items()}
    given_rewards = means | whole
    judged = {name: (score, "judge") for name, score in scores.items() if name not in given_rewards}
    for name in scores.keys() & given_rewards.keys():
        settings = (learning or {}).get(trajectories[name].policy)
        if settings is not None and settings.ruler.weight:
            reward, source = given_rewards[name]
            given_rewards[name] = (reward + settings.ruler.weight * scores[name], source)
    return given_rewards | judged


def weighted(parts: Mapping[str, float], weights: Mapping[str, float]) -> float:
    """Return the sum of weight × number; a part without a weight counts with 1.

    The result does not depend on the order.
    """
    try:
        return math.fsum(weights.get(name, 1.0) * number for name, number in parts.items())
    except (OverflowError, ValueError):  # the sum of finite numbers with finite weights can overflow
        return math.inf


def superseded(counted: Iterable[Feedback]) -> set[str]:
    """Return the ids of feedback that later feedback with the same target replaces completely."""
    later: dict[tuple[str, str | None], set[str]] = {}
    gone: set[str] = set()
    for one in sorted(counted, key=lambda feedback: feedback.order, reverse=True):
        later_fields = later.setdefault(_target(one), set())
        says = _says(one)
        if says and says <= later_fields:
            gone.add(one.id)
        later_fields.update(says)
    return gone


def _target(one: Feedback) -> tuple[str, str | None]:
    if one.target_kind == "group":
        return "judged" if one.source == "judge" else "group", one.target_id
    return one.target_kind, one.completion_id if one.target_kind == "completion" else one.trajectory_id


def _says(one: Feedback) -> set[str]:
    """Return what the feedback sets.

    For a group: the trajectories it rewards. Else: a reward, a demonstration, or both.
    """
    if one.target_kind == "group":
        return set(one.rewards or ())
    fields = {"reward": one.reward is not None, "demonstration": one.demonstrates}
    return {name for name, is_given in fields.items() if is_given}
