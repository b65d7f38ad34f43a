"""What a reward function is told of a trajectory: these classes, written as JSON, are its one argument. Values only.

docs/rewards_in_code.md describes them to those who write functions: a field may be added here, none may go.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Spoken:
    """One completion of it."""

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
class Said:
    """One feedback that counts."""

    completion_id: str | None
    """The completion it speaks of; None where it speaks of the whole trajectory."""
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
    """The conversation of its last completion, with that one's answer."""
    completions: list[Spoken]
    reward: float | None
    """What feedback alone makes of it."""
    feedback: list[Said]
