"""What the judge decides with: what is known of feedback, trajectories and groups. Values only; pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

OVER = frozenset({"claimed", "trained"})
"""Trajectory and group states in which rewards are frozen."""


@dataclass(frozen=True, slots=True)
class Rules:
    """When things end, close and fail; counts of trajectories, and times."""

    target_size: int
    minimum_size: int
    deadline: timedelta
    feedback_waits: timedelta


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
    final: bool
    state: str
    trajectory_id: str | None
    completion_id: str | None
    applied_at: datetime | None

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


@dataclass(frozen=True, slots=True)
class Became:
    """What a feedback became. `due_at` is set while it waits: when to look for its target again."""

    id: str
    state: str
    reason: str | None = None
    trajectory_id: str | None = None
    completion_id: str | None = None
    applied_at: datetime | None = None
    due_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class Known:
    """What the project knows of the targets of some feedback, read under their locks.

    `completions` maps (target id, choice) to (completion id, trajectory id). `standing` is the applied feedback of
    these trajectories and of their groups.
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
