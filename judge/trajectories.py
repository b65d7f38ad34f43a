"""What becomes of one trajectory: its end, its state by its reward, and why no step has trained on it. Pure."""

from dataclasses import replace
from datetime import datetime

from judge.facts import OVER, Trajectory
from whetstone.reasons import WhyNotTrained

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
    }
)
"""The reasons that are decided here; any other was written by who captured or trained, and stays."""


def ended(trajectory: Trajectory, now: datetime) -> Trajectory:
    """The trajectory after its end; one that ended before stays as it is."""
    if trajectory.state != "open":
        return trajectory
    return rewarded(replace(trajectory, state="ended", ended_at=now))


def rewarded(trajectory: Trajectory) -> Trajectory:
    """The trajectory in the state its reward gives it: ended with a reward is `rewarded`, also after an exclusion."""
    waits = trajectory.state == "ended" or (
        trajectory.state == "excluded" and trajectory.why_not_trained == WhyNotTrained.NO_REWARD
    )
    return replace(trajectory, state="rewarded") if waits and trajectory.reward is not None else trajectory


def explained(trajectory: Trajectory, group_state: str | None) -> Trajectory:
    """The trajectory with the reason why no step has trained on it, as far as that is decided here."""
    foreign = trajectory.why_not_trained is not None and trajectory.why_not_trained not in OURS
    if foreign or trajectory.state in OVER:
        return trajectory
    return replace(trajectory, why_not_trained=_why(trajectory, group_state))


def _why(trajectory: Trajectory, group_state: str | None) -> WhyNotTrained:
    if trajectory.split == "eval":
        return WhyNotTrained.SPLIT_EVAL
    if trajectory.no_train:
        return WhyNotTrained.NO_TRAIN
    if trajectory.group_id is None:
        return WhyNotTrained.NO_GROUP
    if trajectory.completions == 0:
        return WhyNotTrained.EMPTY
    if group_state in OVER:
        return WhyNotTrained.NO_REWARD if trajectory.state == "excluded" else WhyNotTrained.LATE
    if trajectory.reward is None:
        return WhyNotTrained.NO_REWARD
    if group_state == "discarded":
        too_few = trajectory.why_not_trained in (WhyNotTrained.TOO_FEW, WhyNotTrained.GROUP_OPEN)
        return WhyNotTrained.TOO_FEW if too_few else WhyNotTrained.LATE
    return WhyNotTrained.WAITING_STEP if group_state == "scored" else WhyNotTrained.GROUP_OPEN
