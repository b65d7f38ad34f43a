"""Decide the lifecycle of one trajectory: its end, its state by its reward, and why no step trained on it. Pure."""

from dataclasses import replace
from datetime import datetime

from judge.decisions.model import OVER, Rules, Trajectory
from whetstone.config.rewards import RewardSettings
from whetstone.domain.why_not_trained import WhyNotTrained

OURS = frozenset(
    {
        WhyNotTrained.NO_REWARD,
        WhyNotTrained.NO_GROUP,
        WhyNotTrained.GROUP_OPEN,
        WhyNotTrained.WAITING_STEP,
        WhyNotTrained.SPLIT_EVAL,
        WhyNotTrained.NO_TRAIN,
        WhyNotTrained.TOO_FEW,
        WhyNotTrained.LATE,
        WhyNotTrained.EMPTY,
        WhyNotTrained.JUDGE_NOISE,
    }
)
"""The reasons that are decided here. Any other was written by the proxy or the trainer, and stays."""


def ended(trajectory: Trajectory, now: datetime, rules: Rules) -> Trajectory:
    """Return the trajectory after its end; one that ended before stays unchanged.

    If its policy has reward functions, they are due now, and until they have run it has no reward: else a step could
    take it before a veto.
    """
    if trajectory.state != "open":
        return trajectory
    after = replace(trajectory, state="ended", ended_at=now)
    if rules.learning_of(trajectory.policy).rewards:
        return replace(after, code_due_at=now, reward=None, reward_source=None)
    return rewarded(after)


def rewarded(trajectory: Trajectory) -> Trajectory:
    """Return the trajectory in the state that its reward gives it.

    Ended with a reward is `rewarded`, also after an exclusion; if the reward is withdrawn, it is `ended` again.
    """
    if trajectory.state == "rewarded" and trajectory.reward is None:
        return replace(trajectory, state="ended")
    waits = trajectory.state == "ended" or (
        trajectory.state == "excluded" and trajectory.why_not_trained == WhyNotTrained.NO_REWARD
    )
    return replace(trajectory, state="rewarded") if waits and trajectory.reward is not None else trajectory


def failed(trajectory: Trajectory, learning: RewardSettings) -> Trajectory:
    """Return the trajectory with the policy's reward for failures.

    One that has a reward, or may still get one, is unchanged.
    """
    known = trajectory.reward is not None or trajectory.code_due_at is not None
    if known or learning.failure_reward is None:
        return trajectory
    return rewarded(replace(trajectory, reward=learning.failure_reward, reward_source="failure"))


def within_noise(trajectory: Trajectory) -> Trajectory:
    """Mark the member of a group whose scores differ by less than its judges differ from themselves."""
    ours = trajectory.why_not_trained is None or trajectory.why_not_trained in OURS
    if not ours or not trajectory.counts:
        return explained(trajectory, "discarded")
    return replace(trajectory, why_not_trained=WhyNotTrained.JUDGE_NOISE)


def _only_judged(trajectory: Trajectory) -> bool:
    """Return whether it was left out because of the judges' noise, and has had no other feedback since."""
    return trajectory.why_not_trained == WhyNotTrained.JUDGE_NOISE and trajectory.reward_source == "judge"


def alone(trajectory: Trajectory, group_state: str | None) -> bool:
    """Return whether it has a reward, but no group that a step may still take: it had none, or the reward was too late.

    Then it can only be compared with its policy's baseline. A trajectory that a step left out for a reason of its own
    does not come back.
    """
    ours = trajectory.why_not_trained is None or trajectory.why_not_trained in OURS
    free = trajectory.group_id is None or group_state == "discarded" or group_state in OVER
    rewarded_train = trajectory.state == "rewarded" and trajectory.counts
    return rewarded_train and ours and free and not _only_judged(trajectory)


def explained(trajectory: Trajectory, group_state: str | None) -> Trajectory:
    """Return the trajectory with the reason why no step has trained on it, if that reason is decided here."""
    foreign = trajectory.why_not_trained is not None and trajectory.why_not_trained not in OURS
    if foreign or trajectory.state in OVER:
        return trajectory
    return replace(trajectory, why_not_trained=_why(trajectory, group_state))


def _why(trajectory: Trajectory, group_state: str | None) -> WhyNotTrained:
    if trajectory.split == "eval":
        return WhyNotTrained.SPLIT_EVAL
    if trajectory.no_train:
        return WhyNotTrained.NO_TRAIN
    if trajectory.completions == 0:
        return WhyNotTrained.EMPTY
    if group_state in OVER:
        return WhyNotTrained.NO_REWARD if trajectory.state == "excluded" else WhyNotTrained.LATE
    if trajectory.reward is None:
        return WhyNotTrained.NO_REWARD
    if trajectory.group_id is None:
        return WhyNotTrained.NO_GROUP
    if group_state == "discarded":
        if _only_judged(trajectory):
            return WhyNotTrained.JUDGE_NOISE
        too_few = trajectory.why_not_trained in (WhyNotTrained.TOO_FEW, WhyNotTrained.GROUP_OPEN)
        return WhyNotTrained.TOO_FEW if too_few else WhyNotTrained.LATE
    return WhyNotTrained.WAITING_STEP if group_state == "scored" else WhyNotTrained.GROUP_OPEN
