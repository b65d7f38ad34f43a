"""Combine the results of reward functions with feedback into a trajectory's reward. Pure: runs no function.

A function's number is stored under the function's name, its named numbers under `<function>.<name>`.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import replace

from judge.decisions.model import Trajectory
from judge.errors import JudgeError
from whetstone.config.rewards import RewardFunction, RewardSettings
from whetstone.domain.reward_bounds import MAX_PARTS, MAX_REWARD, PART

CODE = "code"
"""`reward_source` of a reward that functions alone decided."""

Given = tuple[float, str]
"""A reward, and its source."""


class NotNumbers(JudgeError):
    """A function's answer is neither a number nor named numbers; the message names what it is."""


def parts_of(function: str, answer: str) -> dict[str, float]:
    """Return the parts in a function's answer, which is JSON.

    Raises:
        NotNumbers: it is no JSON, or neither a finite number or boolean nor an object of these.
    """
    try:
        parsed = json.loads(answer)
    except (ValueError, RecursionError):
        raise NotNumbers(f"answered no JSON: {answer[:80]!r}") from None
    if not isinstance(parsed, dict):
        return {function: _number(parsed)}
    if len(parsed) > MAX_PARTS:
        raise NotNumbers(f"gave {len(parsed)} numbers, {MAX_PARTS} is the most")
    if unnamed := [name for name in parsed if not PART.fullmatch(name)]:
        raise NotNumbers(f"named a number {unnamed[0][:80]!a}; a name is 1 to 64 of A-Z a-z 0-9 . _ -")
    return {f"{function}.{name}": _number(number) for name, number in parsed.items()}


def _number(value: object) -> float:
    if not isinstance(value, bool | int | float):
        raise NotNumbers(f"gave {json.dumps(value)[:80]}, which is no number")
    if not -MAX_REWARD <= value <= MAX_REWARD:
        raise NotNumbers(f"gave {str(value)[:24]}, which is no number from {-MAX_REWARD:.0e} to {MAX_REWARD:.0e}")
    return float(value)


def worth(trajectory: Trajectory, given: Given | None, learning: RewardSettings) -> Trajectory:
    """Return the trajectory with the reward from feedback (`given`) and its parts; none while functions are due."""
    is_due = trajectory.code_due_at is not None
    reward, source = (None if is_due else combined(given, trajectory.code_parts or {}, learning)) or (None, None)
    return replace(trajectory, reward=reward, reward_source=source)


def combined(given: Given | None, parts: Mapping[str, float], learning: RewardSettings) -> Given | None:
    """Return an attempt's reward: `given`, plus weight × number of each function that returned something.

    A veto that is not 0 overrides everything; penalties count where something else gives a reward. Functions of kind
    `reward` are enough without feedback if all of them returned something: with one missing, the attempt would be
    compared with others that were measured by more. Parts of functions that the settings no longer name do not count.
    """
    numbers = {function.name: _numbers(function, parts) for function in learning.rewards}
    kinds = {kind: [one for one in learning.rewards if one.kind == kind] for kind in ("reward", "penalty")}
    if vetoed(parts, learning):
        return learning.failure_reward or 0.0, CODE
    if given is None and not (kinds["reward"] and all(numbers[one.name] for one in kinds["reward"])):
        return None
    base, source = given or (0.0, CODE)
    total = base + sum(one.weight * sum(numbers[one.name]) for one in [*kinds["reward"], *kinds["penalty"]])
    return (total, source) if math.isfinite(total) else None


def vetoed(parts: Mapping[str, float], learning: RewardSettings) -> bool:
    """Return whether a function of kind `veto` gave a number that is not 0."""
    return any(number for one in learning.rewards if one.kind == "veto" for number in _numbers(one, parts))


def _numbers(function: RewardFunction, parts: Mapping[str, float]) -> list[float]:
    """Return the function's numbers; a function's name has no dot, a part's may."""
    return [number for name, number in parts.items() if name.partition(".")[0] == function.name]
