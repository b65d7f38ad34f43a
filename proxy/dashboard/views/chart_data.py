"""Build the values of charts for static/charts.js. Pure."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from proxy.dashboard.views.version_rewards import Beside, MeanReward, Point

DIGITS = 6
"""Significant digits that a chart gets."""


def rewards(points: Sequence[Point], live: int, candidate: int | None, beside: Beside | None = None) -> dict[str, Any]:
    """Return the reward curve over versions, with the state of each, and beside it the held-out rewards, and those of
    another policy. Versions that were never live are not part of the lines.
    """
    return {
        "kind": "rewards",
        "x": [one.version for one in points],
        **_means([one.training for one in points]),
        "was_live": [one.was_live for one in points],
        "state": [one.state for one in points],
        "held_out": _means([one.held_out for one in points]),
        "beside": beside
        and {
            "name": beside.policy,
            "y": [_short(mean.mean if (mean := beside.means.get(one.version)) else None) for one in points],
        },
        "live": live,
        "candidate": candidate,
        "x_is": "version",
        "y_is": "reward",
    }


def _means(means: Sequence[MeanReward | None]) -> dict[str, Any]:
    return {
        "y": [_short(one.mean if one else None) for one in means],
        "low": [_short(one.low if one else None) for one in means],
        "high": [_short(one.high if one else None) for one in means],
        "n": [one.rewarded if one else 0 for one in means],
        "few": [one is not None and one.is_few for one in means],
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


def hours(labels: Sequence[str], series: Sequence[tuple[str, str, Sequence[float | None]]]) -> dict[str, Any]:
    """Return several lines over hours. `labels`: the hours; `series`: name, colour and values of each line."""
    return {
        "kind": "hours",
        "x": list(range(len(labels))),
        "labels": list(labels),
        "series": [
            {"name": name, "colour": colour, "y": [_short(value) for value in values]}
            for name, colour, values in series
        ],
    }


def _short(value: float | None) -> float | None:
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.{DIGITS}g}")
