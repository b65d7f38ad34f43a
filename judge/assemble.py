"""When groups open, close and are scored. Pure: values in, decisions out; knows no table and no clock."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime

from judge.facts import Group, Rules, Trajectory
from judge.numbers import mean, spread
from judge.trajectories import ended, explained
from whetstone.reasons import WhyNotTrained


def assess(group: Group, members: Sequence[Trajectory], now: datetime, rules: Rules) -> tuple[Group, list[Trajectory]]:
    """What an unclaimed group and its members are now, whatever they were before.

    Open until it has its target size and all members ended, or until its deadline. A member that begins later reopens
    it, and has a deadline of its own. Closed until all members that count have a reward, at most a deadline more;
    then those without are excluded, and the rest is scored or, if too few, discarded.
    """
    still_open = [member for member in members if member.state == "open"]
    closed_at = group.closed_at
    if closed_at is None or still_open or len(members) != group.size:
        if still_open or len(members) < rules.target_size:
            begun = max([group.created_at, *(m.created_at for m in still_open if _after_deadline(m, group, rules))])
            deadline = begun + rules.deadline
            if now < deadline:
                waiting = _moved(group, "open", members, due_at=deadline)
                return _with_members(waiting, members)
            if len(members) - len(still_open) < rules.minimum_size:
                return _with_members(_moved(group, "discarded", members, reason=WhyNotTrained.TOO_FEW), members)
            members = [ended(member, now) for member in members]
        closed_at = now
    counting = [member for member in members if member.counts]
    unrewarded = {member.id for member in counting if member.reward is None}
    with_reward = len(counting) - len(unrewarded)
    rewards_due = closed_at + rules.deadline
    if (unrewarded or with_reward < rules.minimum_size) and now < rewards_due:
        return _with_members(_moved(group, "closed", members, closed_at=closed_at, due_at=rewards_due), members)
    if with_reward < rules.minimum_size:
        discarded = _moved(group, "discarded", members, closed_at=closed_at, reason=WhyNotTrained.TOO_FEW)
        return _with_members(discarded, members)
    members = [replace(member, state="excluded") if member.id in unrewarded else member for member in members]
    return _with_members(_moved(group, "scored", members, closed_at=closed_at), members)


def _after_deadline(member: Trajectory, group: Group, rules: Rules) -> bool:
    return member.created_at > group.created_at + rules.deadline


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
    )


def _with_members(group: Group, members: Sequence[Trajectory]) -> tuple[Group, list[Trajectory]]:
    return group, [explained(member, group.state) for member in members]
