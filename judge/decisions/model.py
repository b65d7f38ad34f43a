"""The values that the judge decides with: feedback, trajectories and groups. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from whetstone.config.rewards import RewardSettings

OVER = frozenset({"claimed", "trained"})
"""Trajectory and group states in which rewards are frozen."""
UNCLAIMED = ("open", "closed", "scored")
"""States of a group that the judge still decides on."""
EVALUATION = "evaluation"
"""`formed_by` of a held-out prompt's group, answered by two versions: it is ranked, but no step ever takes it."""
DRAWN = ("shadow", EVALUATION)
"""`formed_by` of groups whose members the proxy drew: nothing can continue those."""


@dataclass(frozen=True, slots=True)
class Rules:
    """The settings for when things end, close and fail; counts of trajectories, and times."""

    target_size: int
    minimum_size: int
    deadline: timedelta
    feedback_waits: timedelta
    prompt_window: timedelta = timedelta(0)
    """How long a group of one first prompt accepts new members; 0: there are no such groups."""
    learning: Mapping[str, RewardSettings] = field(default_factory=dict)
    """By policy; a policy without an entry has the defaults."""
    judges: frozenset[str] = frozenset()
    """Names of the configured judges."""

    def learning_of(self, policy: str) -> RewardSettings:
        """Return the policy's reward settings."""
        return self.learning.get(policy, RewardSettings())


@dataclass(frozen=True, slots=True)
class Feedback:
    """One feedback as received, with the target it was applied to where that is known."""

    id: str
    created_at: datetime
    target_kind: str
    target_id: str
    choice: int
    reward: float | None
    rewards: Mapping[str, float] | None
    parts: Mapping[str, float] | None
    demonstrates: bool
    """Whether it includes the correct answer."""
    source: str
    final: bool
    state: str
    reason: str | None
    trajectory_id: str | None
    completion_id: str | None
    applied_at: datetime | None
    withdrawn_at: datetime | None
    judge: Mapping[str, Any] | None = None
    """Which judge has to rank the group, and by which rubric."""
    due_at: datetime | None = None
    """When to look for its target again, while it waits."""
    credit: str | None = None
    """`step`: the reward was earned at the completion, and is added to what the attempt got otherwise."""

    @property
    def order(self) -> tuple[datetime, str]:
        """Sort key: of two feedbacks on the same target, the greater counts."""
        return self.created_at, self.id


@dataclass(frozen=True, slots=True)
class Trajectory:
    """The fields of a trajectory that decisions need."""

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
    """The group it was moved from; feedback may still name it."""
    code_parts: Mapping[str, float] | None = None
    code_due_at: datetime | None = None
    """While it is set, the policy's reward functions have not run, and the trajectory has no reward."""

    def is_of(self, group_id: str) -> bool:
        """Return whether feedback on this group applies to it."""
        return group_id in (self.group_id, self.left_group_id)

    @property
    def counts(self) -> bool:
        """Whether its group compares it with the others."""
        return self.split == "train" and not self.no_train and self.completions > 0 and self.state != "excluded"


@dataclass(frozen=True, slots=True)
class Group:
    """The fields of a group that decisions need or change."""

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
    """Number of members that the app or the drawing announced."""
    close_asked_at: datetime | None = None
    compared_with: str | None = None
    judge_asked_at: datetime | None = None
    judge_due_at: datetime | None = None
    """While it is set, judges have not ranked its members."""
    judged_at: datetime | None = None
    judge_noise: float | None = None
    judge_waits: str | None = None
    """Why judges have not ranked it yet."""


@dataclass(frozen=True, slots=True)
class FeedbackContext:
    """The project's records of the targets of some feedback, read under their locks.

    `completions` maps (target id, choice) to (completion id, trajectory id). `standing` is the feedback that was
    applied to these trajectories and to their groups and still counts; where some is withdrawn, also feedback that it
    may have superseded.
    """

    trajectories: Mapping[str, Trajectory]
    groups: Mapping[str, Group]
    completions: Mapping[tuple[str, int], tuple[str, str]]
    standing: Sequence[Feedback]


@dataclass(frozen=True, slots=True)
class FeedbackChanges:
    """What a batch of feedback changes."""

    feedback: tuple[Feedback, ...]
    trajectories: tuple[Trajectory, ...]
    closing: Mapping[str, datetime]
    """Groups that the app requested to close -> time of the last request."""
    ranking: Mapping[str, datetime]
    """Groups that the app requested to have ranked -> time of the last request."""
    restored: tuple[str, ...]
    """Feedback that was withdrawn after a step had claimed its target: it still counts."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One completion of a trajectory, as it is stored."""

    extends: bool
    """Its prompt continues the turn before and its answer; `messages` has only the added messages."""
    messages: Sequence[Any]
    """JSON values: messages of OpenAI or Anthropic, items of Responses, `{"prompt": …}`."""
    response: Any | None
    """The assistant's message."""
    response_text: str | None
    """The text where there is no message: text completions."""
    tools: Any | None
    """None: the same as before."""
