"""Decide whether judges rank a group, how long to wait for them, and whether scores separate its members. Pure."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta

from judge.decisions.model import DRAWN, EVALUATION, Group, Rules, Trajectory
from judge.decisions.numbers import spread
from whetstone.config.rewards import RewardSettings, RulerSettings

FUNCTIONS_FIRST = "its reward functions have not run yet"
FEEDBACK_SOURCES = frozenset({"trajectory", "completions", "group"})
"""Sources of a reward that came from the app itself."""


def ranking(
    group: Group, members: Sequence[Trajectory], now: datetime, rules: Rules, *, enough: bool
) -> tuple[Group, datetime | None]:
    """Return the closed group, due for its judges if they rank it, and the time until which to wait; None: do not wait.

    They rank it once its members no longer change and reward functions have run on all of them.
    """
    assert group.closed_at is not None
    ruler = rules.learning_of(group.policy).ruler
    until = judged_by(group, ruler)
    wanted = is_wanted(group, members, ruler, enough=enough)
    if group.judged_at is not None or not members or now >= until or not wanted:
        return replace(group, judge_due_at=None, judge_waits=None), None
    if any(member.code_due_at is not None for member in members):
        return replace(group, judge_waits=FUNCTIONS_FIRST), until
    return replace(group, judge_due_at=group.judge_due_at or now), until


def joined_since(group: Group, members: Sequence[Trajectory]) -> bool:
    """Return whether a member joined after judges ranked the group.

    The size does not show it: a retry may replace a member.
    """
    return group.judged_at is not None and any(
        group.judged_at < max(member.created_at, member.ended_at or member.created_at) for member in members
    )


def judged_by(group: Group, ruler: RulerSettings) -> datetime:
    """Return until when a closed group waits for judges."""
    assert group.closed_at is not None
    since = group.closed_at if group.judge_asked_at is None else max(group.closed_at, group.judge_asked_at)
    return since + timedelta(seconds=ruler.wait_s)


def is_wanted(group: Group, members: Sequence[Trajectory], ruler: RulerSettings, *, enough: bool) -> bool:
    """Return whether judges have to rank it: by request, or by the settings."""
    return group.judge_asked_at is not None or (enough and _ranked_unasked(group, members, ruler))


def _ranked_unasked(group: Group, members: Sequence[Trajectory], ruler: RulerSettings) -> bool:
    """Return whether the settings alone require a ranking."""
    if not ruler.judges or ruler.rank == "asked" or (ruler.rank == "shadow" and group.formed_by not in DRAWN):
        return False
    counting = [member for member in members if member.counts or group.formed_by == EVALUATION]
    rewarded = sum(member.reward is not None and member.reward_source in FEEDBACK_SOURCES for member in counting)
    return rewarded < len(counting) or bool(counting and ruler.weight)


def is_within_noise(group: Group, members: Sequence[Trajectory], learning: RewardSettings) -> bool:
    """Return whether its rewards differ by less than its judges do among themselves.

    False where scores have no part in the rewards.
    """
    counting = [member for member in members if member.counts]
    share = abs(learning.ruler.weight) if group.judged_at is not None else 0.0
    if any(member.reward_source == "judge" for member in counting):
        share = max(share, 1.0)
    noise = share * max(group.judge_noise or 0.0, learning.ruler.min_spread)
    return spread([member.reward for member in counting if member.reward is not None]) < noise
