"""Measure how far raters agree: by pairs, and as Krippendorff's alpha. Pure."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import combinations
from typing import Any

GOOD_FROM = 0.5
"""Ratings from here on call an answer good."""
Ratings = Mapping[str, Mapping[str, float]]
"""By what was rated, and by rater."""


@dataclass(frozen=True)
class Rater:
    """One rater's work."""

    name: str
    ratings: int
    mean: float
    last_at: datetime


@dataclass(frozen=True)
class RaterPair:
    """Two raters, and what both have rated."""

    first: str
    second: str
    both: int
    same_side: float
    """Share that both call good, or both bad."""
    apart: float
    """Mean distance of their ratings."""


def by_target(rows: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Return the last rating of each rater, by what was rated. `rows`: the latest first."""
    ratings: dict[str, dict[str, float]] = {}
    for row in rows:
        ratings.setdefault(row["target_id"], {}).setdefault(_name(row), row["reward"])
    return ratings


def raters(rows: Sequence[Mapping[str, Any]]) -> list[Rater]:
    """Return the raters, the most active first."""
    by_name: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        by_name.setdefault(_name(row), []).append(row)
    made = [
        Rater(name, len(own), math.fsum(row["reward"] for row in own) / len(own), max(row["created_at"] for row in own))
        for name, own in by_name.items()
    ]
    return sorted(made, key=lambda one: (-one.ratings, one.name))


def pairs(ratings: Ratings) -> list[RaterPair]:
    """Return each two raters that have rated the same, those with most in common first."""
    both: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for by_rater in ratings.values():
        for first, second in combinations(sorted(by_rater), 2):
            both.setdefault((first, second), []).append((by_rater[first], by_rater[second]))
    made = [
        RaterPair(
            *names,
            len(values),
            sum((x >= GOOD_FROM) == (y >= GOOD_FROM) for x, y in values) / len(values),
            math.fsum(abs(x - y) for x, y in values) / len(values),
        )
        for names, values in both.items()
    ]
    return sorted(made, key=lambda one: (-one.both, one.first, one.second))


def alpha(ratings: Ratings) -> float | None:
    """Return Krippendorff's alpha for interval data; None if nothing was rated twice, or all ratings are equal.

    alpha = 1 − D_o / D_e over the n ratings of units that have at least two (K. Krippendorff, "Computing
    Krippendorff's Alpha-Reliability", 2011): D_o = 1/n · Σ_u Σ_{i≠j} (x_ui − x_uj)² / (m_u − 1), where unit u has m_u
    ratings, and D_e = Σ_{a≠b} (x_a − x_b)² / (n (n − 1)) over all of them. 1 is perfect agreement, 0 is chance.
    """
    units = [list(by_rater.values()) for by_rater in ratings.values() if len(by_rater) > 1]
    values = [x for unit in units for x in unit]
    n = len(values)
    if not n or min(values) == max(values):
        return None
    observed = math.fsum(_squares(unit) / (len(unit) - 1) for unit in units) / n
    return 1 - observed / (_squares(values) / (n * (n - 1)))


def _name(row: Mapping[str, Any]) -> str:
    return str(row["metadata"]["rater"])


def _squares(values: Sequence[float]) -> float:
    """Return the sum of squared differences over all ordered pairs: 2 n Σ (x − mean)²."""
    mean = math.fsum(values) / len(values)
    return 2 * len(values) * math.fsum((x - mean) ** 2 for x in values)
