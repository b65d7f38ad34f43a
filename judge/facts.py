"""What the judge decides with: what is known of feedback, trajectories and groups. Values only; pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from whetstone.worth import LearningSettings

OVER = frozenset({"claimed", "trained"})
"""Trajectory and group states in which rewards are frozen."""


UNCLAIMED = ("open", "closed", "scored")
"""States of a group that the judge still decides on."""

EVALUATION = "evaluation"
"""How a group was formed of a held-out prompt that two versions answered: ranked, but no step ever takes it."""
DRAWN = ("shadow", EVALUATION)
"""How groups were formed whose members the proxy drew: nobody can go on from those."""


@dataclass(frozen=True, slots=True)
class Rules:
    """When things end, close and fail; counts of trajectories, and times."""

    target_size: int
    minimum_size: int
    deadline: timedelta
    feedback_waits: timedelta
    prompt_window: timedelta = timedelta(0)
    """How long a group of one first prompt takes new members; 0: there are none."""
    learning: Mapping[str, LearningSettings] = field(default_factory=dict)
    """By policy; one without an entry has the defaults."""
    judges: frozenset[str] = frozenset()
    """Names of the judges there are."""

    def learning_of(self, policy: str) -> LearningSettings:
        """What the policy's attempts are worth."""
        return self.learning.get(policy, LearningSettings())


@dataclass(frozen=True, slots=True)
class Feedback:
    """One feedback as it came, with what it was applied to where that is known."""

    id: str
    created_at: datetime
    target_kind: str
    target_id: str
    choice: int
    reward: float | None
    rewards: Mapping[str, float] | None
    parts: Mapping[str, float] | None
    demonstrates: bool
    """Whether it says what would have been right."""
    source: str
    final: bool
    state: str
    reason: str | None
    trajectory_id: str | None
    completion_id: str | None
    applied_at: datetime | None
    withdrawn_at: datetime | None
    judge: Mapping[str, Any] | None = None
    """Which judge is to rank the group, and by what rubric."""

    @property
    def order(self) -> tuple[datetime, str]:
        """Of two feedbacks on the same thing, the greater counts."""
        return self.created_at, self.id


@dataclass(frozen=True, slots=True)
class Trajectory:
    """What decisions need of a trajectory."""

    id: str
    group_id: str | None
    split: str
    no_train: bool
    state: str
    reward: float | None
    reward_source: str | None
    completions: int
    why_not_trained: str | None
    trained_in_step: int | None
    created_at: datetime
    last_seen_at: datetime
    ended_at: datetime | None
    policy: str = ""
    prompt_hash: str | None = None
    left_group_id: str | None = None
    """The group it was moved from, which feedback may still name."""
    code_parts: Mapping[str, float] | None = None
    code_due_at: datetime | None = None
    """While it is set, the policy's reward functions have not run, and the trajectory has no reward."""

    def is_of(self, group_id: str) -> bool:
        """Whether feedback on this group speaks of it."""
        return group_id in (self.group_id, self.left_group_id)

    @property
    def counts(self) -> bool:
        """Whether its group compares it with the others."""
        return self.split == "train" and not self.no_train and self.completions > 0 and self.state != "excluded"


@dataclass(frozen=True, slots=True)
class Group:
    """What decisions need of a group, and what they change in it."""

    id: str
    state: str
    reason: str | None
    size: int
    rewarded: int
    reward_mean: float | None
    reward_spread: float | None
    step: int | None
    created_at: datetime
    closed_at: datetime | None
    due_at: datetime | None
    policy: str = ""
    formed_by: str = "header"
    prompt_hash: str | None = None
    target_size: int | None = None
    """Members the app or the drawing said it will have."""
    close_asked_at: datetime | None = None
    compared_with: str | None = None
    judge_asked_at: datetime | None = None
    judge_due_at: datetime | None = None
    """While it is set, judges have not ranked its members."""
    judged_at: datetime | None = None
    judge_noise: float | None = None
    judge_waits: str | None = None
    """Why judges have not ranked it."""


@dataclass(frozen=True, slots=True)
class Became:
    """What a feedback became. `due_at` is set while it waits: when to look for its target again."""

    id: str
    state: str
    reason: str | None
    reward: float | None
    trajectory_id: str | None
    completion_id: str | None
    applied_at: datetime | None
    due_at: datetime | None


@dataclass(frozen=True, slots=True)
class Known:
    """What the project knows of the targets of some feedback, read under their locks.

    `completions` maps (target id, choice) to (completion id, trajectory id). `standing` is the feedback that was
    applied to these trajectories and to their groups and still counts; where some is withdrawn, also what it may have
    superseded.
    """

    trajectories: Mapping[str, Trajectory]
    groups: Mapping[str, Group]
    completions: Mapping[tuple[str, int], tuple[str, str]]
    standing: Sequence[Feedback]


@dataclass(frozen=True, slots=True)
class Settled:
    """What a batch of feedback changes."""

    feedback: tuple[Became, ...]
    trajectories: tuple[Trajectory, ...]
    closing: Mapping[str, datetime]
    """Groups that the app asked to close, and when it last did."""
    ranking: Mapping[str, datetime]
    """Groups that the app asked to have ranked, and when it last did."""
    kept: tuple[str, ...]
    """Feedback that was withdrawn when a step had claimed what it speaks of: it stands."""
