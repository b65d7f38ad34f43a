"""Decide which share of the requests a policy answers, while a model of another server answers the others. Pure.

Both samples grow from the last change of the share on. They are looked at whenever the smaller one reaches a size of
LOOKS, with the bounds of Welch's interval (B. L. Welch, Biometrika 34, 1947) for the difference policy - teacher of
their mean rewards:

    d ± t · sqrt(s_p² / n_p + s_t² / n_t)

The share rises where the lower bound is above -margin, and falls to the first where the upper bound is below it. The
allowed error is divided equally among the looks (Bonferroni). After the last look without either, the share stays and
both samples begin again.

How soon a policy is sent back that is `loss` below the teacher: with n groups of each and rewards that spread by s, an
upper bound is below -margin with probability `power` from

    n = 2 · s² · (z(1 - error/4) + z(power))² / (loss - margin)²

on, at the next look. With s = 0.5, loss 0.3, margin 0.05, error 0.05, power 0.8: 76, so at the look of 100.
"""

from dataclasses import dataclass
from typing import Literal

from trainer.domain.gate.verdict import Moments, student
from whetstone.config.rewards import HandoverSettings
from whetstone.domain.stats import Sample, welch

LOOKS = (50, 100, 200, 400)
"""Groups of the smaller sample at which a decision is possible."""

Decision = Literal["raise", "lower", "stay", "testing"]


@dataclass(frozen=True, slots=True)
class HandoverVerdict:
    """What both samples show."""

    decision: Decision
    share: float
    """Share of new trajectories that the policy answers from now on."""
    reason: str
    figures: dict[str, float]
    """The numbers that it is based on; `look` is how many looks are over."""


def handed_over(
    policy: Moments, teacher: Moments, share: float, looked: int, settings: HandoverSettings
) -> HandoverVerdict | None:
    """Return the verdict of the largest look that is due; None if it was taken already, or none is due.

    `share`: what the policy answers now. `looked`: how many looks are over since it changed.
    """
    n = min(policy.count, teacher.count)
    due = sum(n >= look for look in LOOKS)
    if due <= looked:
        return None
    allowed = settings.error_rate / len(LOOKS)
    interval = welch(_sample(teacher), _sample(policy), quantile=lambda degrees: student(1 - allowed, degrees))
    difference, low, high = interval.mean, interval.low, interval.high
    figures = {
        "policy_count": float(policy.count),
        "policy_mean": policy.mean,
        "teacher_count": float(teacher.count),
        "teacher_mean": teacher.mean,
        "difference": difference,
        "low": low,
        "high": high,
        "look": float(due),
    }
    seen = f"{difference:+.3g} to its teacher ({low:+.3g} to {high:+.3g}), of {policy.count} and {teacher.count} groups"
    first, larger = settings.shares[0], [each for each in settings.shares if each > share]
    if high < -settings.margin:
        return HandoverVerdict("lower", first, f"{seen}: it answers {first:.0%} again", figures)
    if low > -settings.margin and larger:
        return HandoverVerdict("raise", larger[0], f"{seen}: it answers {larger[0]:.0%} from now on", figures)
    if due < len(LOOKS) and low <= -settings.margin:
        return HandoverVerdict("testing", share, seen, figures)
    return HandoverVerdict("stay", share, f"{seen}: it goes on answering {share:.0%}", figures)


def _sample(of: Moments) -> Sample:
    return Sample(of.count, of.mean, of.variance * of.count / (of.count - 1))
