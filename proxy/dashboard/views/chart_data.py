"""Compute the values of charts for static/charts.js: means, intervals, series. Pure."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from proxy.dashboard.queries.policies import VersionRewards, VersionState
from whetstone.domain.stats import t_95

DIGITS = 6
"""Significant digits that a chart gets."""
LEAST_ALIKE = 30
"""Number of trajectories with equal rewards from which their interval may have zero width."""
ROUNDING = 1e-12
"""Relative rounding error of a variance that is computed from sums."""


@dataclass(frozen=True)
class Point:
    """A version's mean reward with its 95 % interval. All None if no trajectory has a reward; the interval None if
    there are too few."""

    version: int
    state: str
    was_live: bool
    rewarded: int
    mean: float | None
    low: float | None
    high: float | None


def points(states: Sequence[VersionState], rewards: Sequence[VersionRewards]) -> list[Point]:
    """Return the versions, in order, each with the rewards of its trajectories."""
    by_version = {version_rewards.version: version_rewards for version_rewards in rewards}
    return [_point(one, by_version.get(one.version)) for one in states]


def measured(rewards: Sequence[VersionRewards]) -> dict[int, Point]:
    """Return the mean rewards of all versions, however old."""
    with_rewards = (_point(VersionState(one.version, "", was_live=False), one) for one in rewards)
    return {point.version: point for point in with_rewards if point.rewarded}


def _point(version: VersionState, rewards: VersionRewards | None) -> Point:
    """Compute Student's interval: `mean ± t · s / √n`, s from the sample (n - 1). A few equal rewards do not show how
    much others differ, so they get no interval."""
    if rewards is None or rewards.rewarded < 1:
        return Point(version.version, version.state, version.was_live, 0, None, None, None)
    n = rewards.rewarded
    mean = rewards.reward_sum / n
    variance = max(0.0, rewards.reward_squares - n * mean * mean) / (n - 1) if n > 1 else 0.0
    if variance <= ROUNDING * mean * mean and n < LEAST_ALIKE:
        return Point(version.version, version.state, version.was_live, n, mean, None, None)
    half = t_95(n - 1) * math.sqrt(variance / n)
    return Point(version.version, version.state, version.was_live, n, mean, mean - half, mean + half)


def gain(live: Point | None, base: Point | None) -> float | None:
    """Return by how much the live version's mean reward exceeds version 0's; None if it is version 0 itself."""
    if live is None or base is None or live.mean is None or base.mean is None or live.version == 0:
        return None
    return live.mean - base.mean


def rewards(points: Sequence[Point], live: int, candidate: int | None) -> dict[str, Any]:
    """Return the reward curve over versions, with the state of each; versions that were never live are beside it."""
    return {
        "kind": "rewards",
        "x": [one.version for one in points],
        "y": [_short(one.mean) for one in points],
        "low": [_short(one.low) for one in points],
        "high": [_short(one.high) for one in points],
        "was_live": [one.was_live for one in points],
        "n": [one.rewarded for one in points],
        "state": [one.state for one in points],
        "live": live,
        "candidate": candidate,
        "x_is": "version",
        "y_is": "reward",
    }


def figure(steps: Sequence[Mapping[str, Any]], name: str, marked: int | None = None) -> dict[str, Any]:
    """Return one metric over the steps, in their order; the step `marked` is highlighted."""
    return {
        "kind": "figure",
        "x": [step["number"] for step in steps],
        "y": [_short(step[name]) for step in steps],
        "marked": marked,
        "x_is": "step",
        "y_is": name.replace("_", " "),
    }


def _short(value: float | None) -> float | None:
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.{DIGITS}g}")
