"""Whether judges are to rank a group, until when they are waited for, and whether they told its members apart. Pure."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta

from judge.facts import DRAWN, EVALUATION, Group, Rules, Trajectory
from judge.numbers import spread
from whetstone.worth import LearningSettings, RulerSettings

FUNCTIONS_FIRST = "its reward functions have not run yet"
SAID = frozenset({"trajectory", "completions", "group"})
"""Sources of a reward that the app itself gave."""


def ranking(
    group: Group, members: Sequence[Trajectory], now: datetime, rules: Rules, *, enough: bool
) -> tuple[Group, datetime | None]:
    """The closed group, due for its judges if they are to rank it, and until when they are waited for; None: not.

    They look at it once its members are as they are and reward functions have seen all of them.
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
    """Whether a member came after judges ranked the group: a retry in the place of another leaves the size as it is."""
    return group.judged_at is not None and any(
        group.judged_at < max(member.created_at, member.ended_at or member.created_at) for member in members
    )


def judged_by(group: Group, ruler: RulerSettings) -> datetime:
    """Until when judges are waited for, of a group that has closed."""
    assert group.closed_at is not None
    since = group.closed_at if group.judge_asked_at is None else max(group.closed_at, group.judge_asked_at)
    return since + timedelta(seconds=ruler.wait_s)


def is_wanted(group: Group, members: Sequence[Trajectory], ruler: RulerSettings, *, enough: bool) -> bool:
    """Whether judges are to rank it: somebody has asked for it, or the settings have it ranked."""
    return group.judge_asked_at is not None or (enough and _ranked_unasked(group, members, ruler))


def _ranked_unasked(group: Group, members: Sequence[Trajectory], ruler: RulerSettings) -> bool:
    """Whether the settings alone have it ranked."""
    if not ruler.judges or ruler.rank == "asked" or (ruler.rank == "shadow" and group.formed_by not in DRAWN):
        return False
    counting = [member for member in members if member.counts or group.formed_by == EVALUATION]
    said = sum(member.reward is not None and member.reward_source in SAID for member in counting)
    return said < len(counting) or bool(counting and ruler.weight)


def is_within_noise(group: Group, members: Sequence[Trajectory], learning: LearningSettings) -> bool:
    """Whether its rewards differ by less than the judges differ from themselves, where scores have a part in them."""
    counting = [member for member in members if member.counts]
    share = abs(learning.ruler.weight) if group.judged_at is not None else 0.0
    if any(member.reward_source == "judge" for member in counting):
        share = max(share, 1.0)
    noise = share * max(group.judge_noise or 0.0, learning.ruler.min_spread)
    return spread([member.reward for member in counting if member.reward is not None]) < noise
