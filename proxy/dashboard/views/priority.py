"""Order attempts for rating: first those about which least is known, and those about which opinions differ. Pure."""

import math
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_UNKNOWN = math.sqrt(1 / 12)
"""Standard deviation of the Beta(1, 1) distribution: nothing is known."""
SET_BY_CODE = frozenset({"code", "failure", "group"})
"""Sources of a reward that no row of feedback on the attempt stands for."""


@dataclass
class Opinions:
    """What raters, apps, judges and reward functions reported about one attempt, from 0 to 1, by author."""

    of_attempt: dict[str, float] = field(default_factory=dict)
    of_answers: dict[str, dict[str, float]] = field(default_factory=dict)
    """By author and completion."""

    @property
    def values(self) -> list[float]:
        """Return one number for each author: of the whole attempt, else the mean over its answers."""
        means = {author: math.fsum(by.values()) / len(by) for author, by in self.of_answers.items()}
        return list((means | self.of_attempt).values())


def opinions(
    attempts: Sequence[Mapping[str, Any]],
    feedback: Sequence[Mapping[str, Any]],
    judged: Sequence[tuple[str, Mapping[str, Any]]],
) -> dict[str, Opinions]:
    """Return the opinions on each attempt. Of one author the last counts; `feedback` and `judged` are in any order and
    latest first."""
    by_attempt = {attempt["id"]: Opinions() for attempt in attempts}
    for row in sorted(feedback, key=lambda row: (row["created_at"], row["id"])):
        of = by_attempt.get(row["trajectory_id"] or row["target_id"])
        if of is not None and row["target_kind"] == "completion":
            of.of_answers.setdefault(author_of(row), {})[row["target_id"]] = _in_bounds(row["reward"])
        elif of is not None:
            of.of_attempt[author_of(row)] = _in_bounds(row["reward"])
    for judge, scores in reversed(judged):
        for trajectory_id, entry in scores.items():
            score = entry.get("score") if isinstance(entry, Mapping) else None
            if trajectory_id in by_attempt and score is not None:
                by_attempt[trajectory_id].of_attempt[f"judge {judge}"] = _in_bounds(score)
    for attempt in attempts:
        if attempt["reward_source"] in SET_BY_CODE and attempt["reward"] is not None:
            by_attempt[attempt["id"]].of_attempt["reward"] = _in_bounds(attempt["reward"])
    return by_attempt


def author_of(row: Mapping[str, Any]) -> str:
    """Return who gave this feedback: the rater, else the key that sent it."""
    rater = (row["metadata"] or {}).get("rater")
    return f"rater {rater}" if isinstance(rater, str) else f"key {row['key_id'] or ''}"


def priority(values: Sequence[float]) -> float:
    """Return how much a further rating would tell: uncertainty plus disagreement, from about 0 to 2.

    With n opinions x_i from 0 to 1 and s = Σ x_i:

    - uncertainty = sd(Beta(1 + s, 1 + n − s)) / sd(Beta(1, 1)): 1 without an opinion, less with each, least where all
      are near 0 or all near 1. It is the posterior of a share after n observations, from a uniform prior.
    - disagreement = 2 · the population standard deviation of the x_i: 0 where all are equal, 1 where half are 0 and
      half are 1.
    """
    n, s = len(values), math.fsum(values)
    a, b = 1 + s, 1 + n - s
    uncertainty = math.sqrt(a * b / ((a + b) ** 2 * (a + b + 1))) / _UNKNOWN
    disagreement = 2 * math.sqrt(math.fsum((x - s / n) ** 2 for x in values) / n) if n else 0.0
    return uncertainty + disagreement


def by_group(
    attempts: Sequence[Mapping[str, Any]], rated: Container[str], order: Callable[[Mapping[str, Any]], Any]
) -> list[dict[str, Any]]:
    """Return the attempts with `in_group`: 0 for the first of its group in this order, 1 for the second and so on; 0
    for those without a group.

    The `rated` count as the first, so that a rating moves no other attempt of its group.
    """
    seen: dict[tuple[str, str], int] = {}
    numbered = []
    for attempt in sorted(attempts, key=lambda one: (one["id"] not in rated, order(one))):
        in_group = 0
        if attempt["group_id"] is not None:
            group = attempt["policy"], attempt["group_id"]
            in_group = seen.get(group, 0)
            seen[group] = in_group + 1
        numbered.append({**attempt, "in_group": in_group})
    return numbered


def _in_bounds(reward: float) -> float:
    return min(1.0, max(0.0, float(reward)))
