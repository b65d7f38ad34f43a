"""Decide when groups open, close and are scored. Pure: values in, decisions out."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime

from judge.decisions.judge_schedule import is_wanted, is_within_noise, joined_since, ranking
from judge.decisions.model import DRAWN, EVALUATION, Group, Rules, Trajectory
from judge.decisions.numbers import mean, spread
from judge.decisions.trajectory_lifecycle import ended, explained, failed, within_noise
from whetstone.domain.why_not_trained import WhyNotTrained


def advance_group(
    group: Group, members: Sequence[Trajectory], now: datetime, rules: Rules
) -> tuple[Group, list[Trajectory]]:
    """Return the present state of an unclaimed group and its members, independent of their earlier states.

    It is open until it has the members it waits for and all have ended, or until its time is over; then members that
    are still open end. A member that begins later reopens it, and has a deadline of its own. It is closed until all
    members that count have a reward and judges have ranked it, where they have to; at most one more deadline, or as
    long as it waits for judges.
    """
    group = replace(group, formed_by=_formed_by(group, members, now, rules))
    closed_at = group.closed_at
    still_open = any(member.state == "open" for member in members)
    if closed_at is None or still_open or joined_since(group, members) or len(members) != group.size:
        group = replace(group, judge_due_at=None, judged_at=None, judge_waits=None)
        if still_open or len(members) < _awaited(group, now, rules):
            over_at = _over_at(group, members, rules)
            if now < over_at:
                window_ends_at = group.created_at + rules.prompt_window
                due_at = min(over_at, window_ends_at) if _takes_more(group, now, rules) else over_at
                return _with_members(_moved(group, "open", members, due_at=due_at), members)
            members = [ended(member, now, rules) for member in members]
        closed_at = now
    closed = replace(group, closed_at=closed_at)
    return (_evaluated if group.formed_by == EVALUATION else _compared)(closed, members, now, rules)


def _evaluated(
    group: Group, members: Sequence[Trajectory], now: datetime, rules: Rules
) -> tuple[Group, list[Trajectory]]:
    """Handle the closed group of a held-out prompt: it waits for its judges, or is discarded, as no step takes it."""
    group, ranked_by = ranking(group, members, now, rules, enough=len(members) > 1)
    if ranked_by is not None:
        return _with_members(_moved(group, "closed", members, closed_at=group.closed_at, due_at=ranked_by), members)
    reason = WhyNotTrained.SPLIT_EVAL
    return _with_members(_moved(group, "discarded", members, closed_at=group.closed_at, reason=reason), members)


def _compared(
    group: Group, members: Sequence[Trajectory], now: datetime, rules: Rules
) -> tuple[Group, list[Trajectory]]:
    """Handle a closed group: it waits for rewards, is scored, or is discarded.

    Fewer members than the minimum are compared with the policy's baseline, if it has one. Members without a reward at
    the deadline get the reward of a failure, where the policy sets one and others have a reward; else they are left
    out. They are also left out where judges did not rank the group in time.
    """
    assert group.closed_at is not None
    learning = rules.learning_of(group.policy)
    needed = 1 if learning.baseline else rules.minimum_size
    counting = [member for member in members if member.counts]
    with_reward = sum(member.reward is not None for member in counting)
    enough = len(counting) >= needed
    rewards_due = group.closed_at + rules.deadline
    group, ranked_by = ranking(group, members, now, rules, enough=enough)
    if ranked_by is not None:
        return _with_members(_moved(group, "closed", members, closed_at=group.closed_at, due_at=ranked_by), members)
    if enough and with_reward < len(counting) and now < rewards_due:
        return _with_members(_moved(group, "closed", members, closed_at=group.closed_at, due_at=rewards_due), members)
    # Missing judgements are no evidence about an attempt.
    given_up = group.judged_at is None and is_wanted(group, members, learning.ruler, enough=enough)
    if enough and with_reward and not given_up:
        members = [failed(member, learning) if member.counts else member for member in members]
        with_reward = sum(member.counts and member.reward is not None for member in members)
    if with_reward < needed:
        reason = WhyNotTrained.TOO_FEW
        return _with_members(_moved(group, "discarded", members, closed_at=group.closed_at, reason=reason), members)
    members = [
        replace(member, state="excluded") if member.counts and member.reward is None else member for member in members
    ]
    if with_reward >= rules.minimum_size and is_within_noise(group, members, learning):
        reason = WhyNotTrained.JUDGE_NOISE
        group = _moved(group, "discarded", members, closed_at=group.closed_at, reason=reason)
        return group, [within_noise(member) for member in members]
    scored = _moved(group, "scored", members, closed_at=group.closed_at)
    compared_with = "group" if with_reward >= rules.minimum_size else "baseline"
    return _with_members(replace(scored, compared_with=compared_with), members)


def _formed_by(group: Group, members: Sequence[Trajectory], now: datetime, rules: Rules) -> str:
    """Return how the group was formed; a first prompt that occurs once has formed no group."""
    if group.prompt_hash is None:
        return group.formed_by
    return "single" if len(members) == 1 and not _takes_more(group, now, rules) else "prompt"


def _takes_more(group: Group, now: datetime, rules: Rules) -> bool:
    """Return whether it groups a first prompt, and its window has not ended."""
    return group.prompt_hash is not None and now < group.created_at + rules.prompt_window


def _awaited(group: Group, now: datetime, rules: Rules) -> int:
    """Return the number of members that makes it complete. Choices of a call, and singles, are all there at once."""
    if group.formed_by == "header" or _takes_more(group, now, rules):
        return group.target_size or rules.target_size
    return (group.target_size or 1) if group.formed_by in DRAWN else 1


def _over_at(group: Group, members: Sequence[Trajectory], rules: Rules) -> datetime:
    """Return when it stops waiting for missing or open members: its deadline, or when the app requested to close it."""
    over_at = group.created_at + rules.deadline
    if group.close_asked_at is not None and len(members) >= rules.minimum_size:
        over_at = min(over_at, group.close_asked_at)
    late = (member.created_at for member in members if member.state == "open" and member.created_at > over_at)
    return max([over_at, *(began + rules.deadline for began in late)])


def _moved(
    group: Group,
    state: str,
    members: Sequence[Trajectory],
    *,
    closed_at: datetime | None = None,
    due_at: datetime | None = None,
    reason: str | None = None,
) -> Group:
    rewards_G = [member.reward for member in members if member.counts and member.reward is not None]
    scored = state == "scored"
    return replace(
        group,
        state=state,
        reason=reason,
        size=0 if state == "open" else len(members),
        rewarded=len(rewards_G),
        reward_mean=mean(rewards_G) if scored else None,
        reward_spread=spread(rewards_G) if scored else None,
        closed_at=closed_at,
        due_at=due_at,
        compared_with=None,
    )


def _with_members(group: Group, members: Sequence[Trajectory]) -> tuple[Group, list[Trajectory]]:
    return group, [explained(member, group.state) for member in members]
