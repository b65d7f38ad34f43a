"""Detect signs that a policy learns to please its judge instead of doing well, and that its judge has changed. Pure.

A sign is no proof: an honest policy may well write more. Each alarm names what to look at.
"""

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from whetstone.domain.stats import Z_95, Interval

LEAST_AGREEMENT, LARGEST_FALL = 0.7, 0.15
"""Drift alarm: judge and strong judge order less than this share of pairs alike, or the share fell by at least this
much.
"""
FEWEST_PAIRS = 30
FEWEST_GROUPS = 10
"""Groups in each half of the time; with fewer nothing is concluded."""
LEAST_RISE = 0.1
"""A rise by a smaller share of the earlier value is no sign, even if it is certain."""
SHINGLE = 4
LONGEST_WORDS = 1000
"""Words of a text that are checked: longer texts repeat more by nature."""

_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|[^\W\u3040-\u30ff\u3400-\u9fff]+")
"""A word, or one character of a script without spaces."""


@dataclass(frozen=True, slots=True)
class RankedGroup:
    """A group that judges have ranked, with means over its attempts: None where there are no values."""

    id: str
    policy: str
    at: datetime
    noise: float | None
    """How much its judges differ from themselves."""
    discarded: bool
    """Its scores differ by less than judges differ from themselves, so it was discarded."""
    version: int | None
    """The oldest version that answered in it."""
    reward: float | None
    tokens: float | None
    """Tokens sampled in an attempt."""
    repetition: float | None = None
    """The share of its texts that repeats itself, where the texts were read."""


@dataclass(frozen=True, slots=True)
class DriftDay:
    """Comparison of judge and strong judge on one day."""

    policy: str
    day: str
    pairs: int
    agreement: float
    """Share of the pairs of attempts that both order alike."""
    difference: float
    """How much higher the judge scores."""


@dataclass(frozen=True, slots=True)
class Alarm:
    """One sign."""

    name: str
    policy: str
    figures: str
    look_at: str


SIGNS: Mapping[str, tuple[str, str]] = {
    "length": (
        "tokens",
        "the longest attempts of the latest versions: do they contain more, or are they only longer? Give the rubric a "
        "part for brevity, or take off for length in code",
    ),
    "repetition": (
        "repetition",
        "the latest versions' texts: do they say the same again to look thorough? A penalty in code can count it",
    ),
    "disagreement": (
        "noise",
        "groups with a large judge_noise: attempts may have grown so alike, or so strange, that judges guess",
    ),
}
"""Sign -> the figure that rises together with the reward, and what to look at."""


def repetition(text: str) -> float | None:
    """Return the share of the text's four-word sequences that are repeats: 1 - distinct / all; None for fewer words."""
    words = [one.group().lower() for _, one in zip(range(LONGEST_WORDS), _WORD.finditer(text), strict=False)]
    runs = [tuple(words[start : start + SHINGLE]) for start in range(len(words) - SHINGLE + 1)]
    return 1 - len(set(runs)) / len(runs) if runs else None


def hacked(seen: Sequence[RankedGroup]) -> list[Alarm]:
    """Return alarms for policies whose reward rose together with a figure that should not rise.

    The halves are by version, then by time. Both rises lie beyond their 95 % intervals.
    """
    alarms = []
    for policy in sorted({one.policy for one in seen}):
        earlier, later = halves([one for one in seen if one.policy == policy])
        reward = _rise(earlier, later, "reward")
        if reward is None:
            continue
        for name, (figure, look_at) in SIGNS.items():
            if (rise := _rise(earlier, later, figure)) and rise[1].mean >= LEAST_RISE * abs(rise[0]):
                alarms.append(Alarm(name, policy, f"reward {_shown(*reward)}, {figure} {_shown(*rise)}", look_at))
    return alarms


def halves(seen: Sequence[RankedGroup]) -> tuple[list[RankedGroup], list[RankedGroup]]:
    """Return the earlier and the later half, by version, then by time."""
    ordered = sorted(seen, key=lambda one: (-1 if one.version is None else one.version, one.at))
    middle = len(ordered) // 2
    return ordered[:middle], ordered[middle:]


def change(before: Sequence[float], after: Sequence[float]) -> Interval | None:
    """Return mean(after) - mean(before) with its normal 95 % interval, ±1.96·√(s²/n + s'²/n').

    None if a side has fewer than two values.
    """
    if min(len(before), len(after)) < 2:
        return None
    mean = statistics.fmean(after) - statistics.fmean(before)
    half = Z_95 * math.sqrt(sum(statistics.variance(one) / len(one) for one in (before, after)))
    return Interval(mean, mean - half, mean + half)


def drifted(days: Sequence[DriftDay]) -> list[Alarm]:
    """Return alarms for judges that no longer rank as their strong judge does, on the last days with enough pairs."""
    alarms = []
    for policy in sorted({one.policy for one in days}):
        recent, before = _recent(sorted((one for one in days if one.policy == policy), key=lambda one: one.day))
        now = _agreement(recent)
        if now is None:
            continue
        then = _agreement(before)
        if now < LEAST_AGREEMENT or (then is not None and then - now >= LARGEST_FALL):
            figures = f"judge and strong judge order alike {now:.0%} of {_pairs(recent)} pairs since {recent[0].day}"
            figures += f", {then:.0%} of {_pairs(before)} before" if then is not None else ""
            alarms.append(
                Alarm(
                    name="drift",
                    policy=policy,
                    figures=figures,
                    look_at="groups in admin_judgements where purpose 'reward' and 'drift' differ: has the judge's "
                    "model changed?",
                )
            )
    return alarms


def _rise(earlier: Sequence[RankedGroup], later: Sequence[RankedGroup], figure: str) -> tuple[float, Interval] | None:
    """Return the figure's earlier mean and its rise; None where a rise is not certain."""
    before, after = (
        [value for one in half if (value := getattr(one, figure)) is not None] for half in (earlier, later)
    )
    if min(len(before), len(after)) < FEWEST_GROUPS:
        return None
    rise = change(before, after)
    return (statistics.fmean(before), rise) if rise is not None and rise.low > 0 else None


def _shown(before: float, rise: Interval) -> str:
    return f"{before:.3g} → {before + rise.mean:.3g} (+{rise.low:.2g} to +{rise.high:.2g})"


def _recent(days: Sequence[DriftDay]) -> tuple[Sequence[DriftDay], Sequence[DriftDay]]:
    """Return the last days that have enough pairs together, and those before."""
    start = len(days)
    while start and _pairs(days[start:]) < FEWEST_PAIRS:
        start -= 1
    return days[start:], days[:start]


def _agreement(days: Sequence[DriftDay]) -> float | None:
    """Return the agreement over all their pairs; None for too few pairs."""
    pairs = _pairs(days)
    return math.fsum(one.agreement * one.pairs for one in days) / pairs if pairs >= FEWEST_PAIRS else None


def _pairs(days: Sequence[DriftDay]) -> int:
    return sum(one.pairs for one in days)
