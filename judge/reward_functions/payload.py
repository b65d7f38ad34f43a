"""The argument of a reward function: these classes, written as JSON, describe one trajectory.

docs/rewards_in_code.md describes them to the authors of functions: fields may be added here, none may be removed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class CompletionPayload:
    """One completion of the trajectory."""

    completion_id: str
    turn: int
    response: Mapping[str, Any] | None
    finish_reason: str | None
    status: str
    policy_version: int
    total_ms: float | None
    prompt_tokens: int | None
    completion_tokens: int | None


@dataclass(frozen=True, slots=True)
class FeedbackPayload:
    """One feedback that counts."""

    completion_id: str | None
    """The completion that it targets; None where it targets the whole trajectory."""
    source: str
    reward: float | None
    parts: Mapping[str, float] | None
    comment: str | None


@dataclass(frozen=True, slots=True)
class Attempt:
    """A trajectory that has ended."""

    trajectory_id: str
    policy: str
    task: str | None
    split: str
    metadata: Mapping[str, Any] | None
    end_user: str | None
    messages: list[Any]
    """The conversation of its last completion, including that completion's answer."""
    completions: list[CompletionPayload]
    reward: float | None
    """The reward from feedback alone."""
    feedback: list[FeedbackPayload]
