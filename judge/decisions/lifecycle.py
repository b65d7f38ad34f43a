"""Decide how trajectories end, and when groups open, close, are ranked by judges and scored. Pure.

Also why no step trained on a trajectory, as far as that is decided here.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from statistics import fmean

from judge.decisions.model import DRAWN, EVALUATION, OVER, Group, Rules, Trajectory
from whetstone.config.rewards import RewardSettings, RulerSettings
from whetstone.domain.states import FEEDBACK_SOURCES
from whetstone.domain.why_not_trained import WhyNotTrained

OURS = frozenset(
    {
        WhyNotTrained.NO_REWARD,
        WhyNotTrained.NO_GROUP,
        WhyNotTrained.GROUP_OPEN,
        WhyNotTrained.WAITING_STEP,
        WhyNotTrained.SPLIT_EVAL,
        WhyNotTrained.NO_TRAIN,
        WhyNotTrained.TOO_FEW,
        WhyNotTrained.LATE,
        WhyNotTrained.EMPTY,
        WhyNotTrained.JUDGE_NOISE,
    }
)
"""The reasons that are decided here. Any other was written by the proxy or the trainer, and stays."""
FUNCTIONS_FIRST = "its reward functions have not run yet"

Decided = tuple[Group, list[Trajectory]]
"""A group and its members, with their present states."""


def ended(trajectory: Trajectory, now: datetime, rules: Rules) -> Trajectory:
    """Return the trajectory after its end; one that ended before stays unchanged.

    If its policy has reward functions, they are due now, and until they have run it has no reward: else a step could
    take it before a veto.
    """
    if trajectory.state != "open":
        return trajectory
    after = replace(trajectory, state="ended", ended_at=now)
    if rules.learning_of(trajectory.policy).rewards:
        return replace(after, code_due_at=now, reward=None, reward_source=None)
    return rewarded(after)


def rewarded(trajectory: Trajectory) -> Trajectory:
    """Return the trajectory in the state that its reward gives it.

    Ended with a reward is `rewarded`, also after an exclusion; if the reward is withdrawn, it is `ended` again.
    """
    if trajectory.state == "rewarded" and trajectory.reward is None:
        return replace(trajectory, state="ended")
    waits = trajectory.state == "ended" or (
        trajectory.state == "excluded" and trajectory.why_not_trained == WhyNotTrained.NO_REWARD
    )
    return replace(trajectory, state="rewarded") if waits and trajectory.reward is not None else trajectory


def failed(trajectory: Trajectory, learning: RewardSettings) -> Trajectory:
    """Return the trajectory with the policy's reward for failures.

    One that has a reward, or may still get one, is unchanged.
    """
    if trajectory.reward is not None or trajectory.code_due_at is not None or learning.failure_reward is None:
        return trajectory
    return rewarded(replace(trajectory, reward=learning.failure_reward, reward_source="failure"))


def within_noise(trajectory: Trajectory) -> Trajectory:
    """Mark the member of a group whose scores differ by less than its judges differ from themselves."""
    if not _is_ours(trajectory) or not trajectory.counts:
        return explained(trajectory, "discarded")
    return replace(trajectory, why_not_trained=WhyNotTrained.JUDGE_NOISE)


def _is_ours(trajectory: Trajectory) -> bool:
    """Return whether the reason why no step trained on it, if there is one, was decided here."""
    return trajectory.why_not_trained is None or trajectory.why_not_trained in OURS


def _only_judged(trajectory: Trajectory) -> bool:
    """Return whether it was left out because of the judges' noise, and has had no other feedback since."""
    return trajectory.why_not_trained == WhyNotTrained.JUDGE_NOISE and trajectory.reward_source == "judge"


def alone(trajectory: Trajectory, group_state: str | None) -> bool:
    """Return whether it has a reward, but no group that a step may still take: it had none, or the reward was too late.

    Then it can only be compared with its policy's baseline. A trajectory that a step left out for a reason of its own
    does not come back.
    """
    free = trajectory.group_id is None or group_state == "discarded" or group_state in OVER
    rewarded_train = trajectory.state == "rewarded" and trajectory.counts
    return rewarded_train and _is_ours(trajectory) and free and not _only_judged(trajectory)


def explained(trajectory: Trajectory, group_state: str | None) -> Trajectory:
    """Return the trajectory with the reason why no step has trained on it, if that reason is decided here."""
    if not _is_ours(trajectory) or trajectory.state in OVER:
        return trajectory
    return replace(trajectory, why_not_trained=_why(trajectory, group_state))


def _why(trajectory: Trajectory, group_state: str | None) -> WhyNotTrained:
    is_excluded, is_discarded = trajectory.state == "excluded", group_state == "discarded"
    too_few = trajectory.why_not_trained in (WhyNotTrained.TOO_FEW, WhyNotTrained.GROUP_OPEN)
    # The first that applies.
    reasons = (
        (trajectory.split == "eval", WhyNotTrained.SPLIT_EVAL),
        (trajectory.no_train, WhyNotTrained.NO_TRAIN),
        (trajectory.completions == 0, WhyNotTrained.EMPTY),
        (group_state in OVER, WhyNotTrained.NO_REWARD if is_excluded else WhyNotTrained.LATE),
        (trajectory.reward is None, WhyNotTrained.NO_REWARD),
        (trajectory.group_id is None, WhyNotTrained.NO_GROUP),
        (is_discarded and _only_judged(trajectory), WhyNotTrained.JUDGE_NOISE),
        (is_discarded, WhyNotTrained.TOO_FEW if too_few else WhyNotTrained.LATE),
        (group_state == "scored", WhyNotTrained.WAITING_STEP),
    )
    return next((reason for applies, reason in reasons if applies), WhyNotTrained.GROUP_OPEN)


def advance_group(group: Group, members: Sequence[Trajectory], now: datetime, rules: Rules) -> Decided:
    """Return the present state of an unclaimed group and its members, independent of their earlier states.

    It is open until it has the members it waits for and all have ended, or until its time is over; then members that
    are still open end. A member that begins later reopens it, and has a deadline of its own. It is closed until all
    members that count have a reward and judges have ranked it, where they have to; at most one more deadline, or as
    long as it waits for judges.
    """
    if group.prompt_hash is not None:
        # A first prompt that occurs once has formed no group.
        is_single = len(members) == 1 and not _takes_more(group, now, rules)
        group = replace(group, formed_by="single" if is_single else "prompt")
    still_open = any(member.state == "open" for member in members)
    if group.closed_at is None or still_open or joined_since(group, members) or len(members) != group.size:
        group = replace(group, closed_at=now, judge_due_at=None, judged_at=None, judge_waits=None)
        if still_open or len(members) < _awaited(group, now, rules):
            over_at = _over_at(group, members, rules)
            if now < over_at:
                takes_until = group.created_at + rules.prompt_window if _takes_more(group, now, rules) else over_at
                return _moved(replace(group, closed_at=None), members, "open", due_at=min(over_at, takes_until))
            members = [ended(member, now, rules) for member in members]
    if group.formed_by != EVALUATION:
        return _compared(group, members, now, rules)
    # A held-out prompt's group waits for its judges only, as no step takes it.
    group, ranked_by = ranking(group, members, now, rules, enough=len(members) > 1)
    if ranked_by is not None:
        return _moved(group, members, "closed", due_at=ranked_by)
    return _moved(group, members, "discarded", reason=WhyNotTrained.SPLIT_EVAL)


def _compared(group: Group, members: Sequence[Trajectory], now: datetime, rules: Rules) -> Decided:
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
        return _moved(group, members, "closed", due_at=ranked_by)
    if enough and with_reward < len(counting) and now < rewards_due:
        return _moved(group, members, "closed", due_at=rewards_due)
    # Missing judgements are no evidence about an attempt.
    given_up = group.judged_at is None and is_wanted(group, members, learning.ruler, enough=enough)
    if enough and with_reward and not given_up:
        members = [failed(member, learning) if member.counts else member for member in members]
        with_reward = sum(member.counts and member.reward is not None for member in members)
    if with_reward < needed:
        return _moved(group, members, "discarded", reason=WhyNotTrained.TOO_FEW)
    members = [
        replace(member, state="excluded") if member.counts and member.reward is None else member for member in members
    ]
    if with_reward < rules.minimum_size:
        return _moved(group, members, "scored", compared_with="baseline")
    if is_within_noise(group, members, learning):
        group, _ = _moved(group, members, "discarded", reason=WhyNotTrained.JUDGE_NOISE)
        return group, [within_noise(member) for member in members]
    return _moved(group, members, "scored", compared_with="group")


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
    late = (one.created_at for one in members if one.state == "open" and one.created_at > over_at)
    return max((began + rules.deadline for began in late), default=over_at)


def _moved(
    group: Group,
    members: Sequence[Trajectory],
    state: str,
    *,
    due_at: datetime | None = None,
    reason: str | None = None,
    compared_with: str | None = None,
) -> Decided:
    """Return the group in this state, and its members with the reasons that follow from it."""
    rewards_G = [member.reward for member in members if member.counts and member.reward is not None]
    scored = state == "scored"
    moved = replace(
        group,
        state=state,
        reason=reason,
        size=0 if state == "open" else len(members),
        rewarded=len(rewards_G),
        reward_mean=fmean(rewards_G) if scored else None,
        reward_spread=spread(rewards_G) if scored else None,
        due_at=due_at,
        compared_with=compared_with,
    )
    return moved, [explained(member, state) for member in members]


def ranking(
    group: Group, members: Sequence[Trajectory], now: datetime, rules: Rules, *, enough: bool
) -> tuple[Group, datetime | None]:
    """Return the closed group, due for its judges if they rank it, and the time until which to wait; None: do not wait.

    They rank it once its members no longer change and reward functions have run on all of them.
    """
    assert group.closed_at is not None
    ruler = rules.learning_of(group.policy).ruler
    until = judged_by(group, ruler)
    over = group.judged_at is not None or not members or now >= until
    if over or not is_wanted(group, members, ruler, enough=enough):
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


def spread(values: Collection[float]) -> float:
    """Return the population standard deviation; exactly 0 for equal values, the same in any order.

    statistics.pstdev computes with fractions: 20 times slower, in a transaction.

    Raises:
        OverflowError: a square is no finite number.
    """
    middle = fmean(values)
    squares = ((value - middle) ** 2 for value in values)
    return math.sqrt(math.fsum(squares) / len(values)) if len(set(values)) > 1 else 0.0
