"""What feedback changes. Pure: values in, decisions out; knows no table and no clock.

What is decided depends on the facts alone, never on the order in which workers saw them: of two feedbacks the one with
the later (created_at, id) counts, whichever was applied first.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta

from judge.facts import OVER, UNCLAIMED, Became, Feedback, Group, Known, Rules, Settled, Trajectory
from judge.parts import Given, worth
from judge.ranking import judged_by
from judge.standing import given, superseded, weighted
from judge.trajectories import ended, explained, rewarded
from whetstone.bounds import MAX_REWARD

UNKNOWN_TARGET = "no such trajectory in this project"
UNKNOWN_GROUP = "no such group in this project"
NO_JUDGE = "no judge is set up: name one in learning.<policy>.ruler.judges"
WAITS = "waits for its judges"
NOBODY_CAME = "no judge has ranked its group in time (ruler.wait_s)"
FIRST_LOOK_AGAIN = timedelta(seconds=1)
JUDGED_MEANWHILE = timedelta(minutes=10)
"""How often it is asked whether a group that is to be ranked is still there to be ranked."""
_CHANGEABLE = ("applied", "superseded")

Found = tuple[Feedback, frozenset[str]]
"""A feedback with its target filled in, and the trajectories it moves."""


def settle(batch: Sequence[Feedback], known: Known, now: datetime, rules: Rules) -> Settled:
    """Apply waiting feedback to what it speaks of, and take back what was withdrawn.

    A trajectory's reward is its last trajectory-level one (a group's entry for it is one), else the mean of its
    completion-level ones. A feedback of which nothing counts any more because later ones speak of the same is
    superseded; where those are withdrawn, it counts again. Once a step claimed the trajectory, feedback is unused.
    """
    became: list[Became] = []
    found: list[Found] = []
    for one in batch:
        if one.state != "waiting":
            continue  # withdrawn: what it was when it was read counts for nothing, `known.standing` has it
        resolved = _resolve(one, known, now, rules)
        if isinstance(resolved, Became):
            became.append(resolved)
        else:
            found.append(resolved)
    back, kept = _withdrawn(batch, known)
    became += [_became(one, "withdrawn") for one, _ in back]
    taken = {one.id for one, _ in back}
    standing = [one for one in known.standing if one.id not in taken]
    counted = [*standing, *(one for one, _ in found)]
    gone = superseded(counted)
    fresh = [replace(one, applied_at=now, reason=_missing(one, known)) for one, _ in found]
    for one in (*(one for one in standing if one.state in _CHANGEABLE), *fresh):
        fate = "superseded" if one.id in gone else "applied"
        if fate != one.state:
            became.append(_became(one, fate))
    ending = {trajectory_id for one, ids in found if one.final for trajectory_id in ids}
    spoken_of = {trajectory_id for _, ids in (*found, *back) for trajectory_id in ids}
    moved = {trajectory_id: known.trajectories[trajectory_id] for trajectory_id in sorted(spoken_of)}
    rewards: dict[str, Given | None] = dict.fromkeys(trajectory_id for _, ids in back for trajectory_id in ids)
    rewards |= given(counted, moved, rules.learning)
    after = (_after(one, rewards, one.id in ending, known, now, rules) for one in moved.values())
    changed = tuple(new for new, old in zip(after, moved.values(), strict=True) if new != old)
    waits = {one.id for one in became if one.reason == WAITS}
    asked = sorted((one for one in batch if one.id in waits), key=lambda one: one.order)
    closes = [*(one for one, _ in found if one.source == "close"), *(one for one in asked if one.final)]
    closing = {one.target_id: one.created_at for one in sorted(closes, key=lambda one: one.order)}
    ranking = {one.target_id: one.created_at for one in asked}
    return Settled(tuple(became), changed, closing, ranking, kept)


def _after(
    before: Trajectory, rewards: Mapping[str, Given | None], ends: bool, known: Known, now: datetime, rules: Rules
) -> Trajectory:
    """The trajectory with what feedback gives it now. One that `rewards` leaves out keeps what it has."""
    after = before
    if before.id in rewards and (rewards[before.id] or before.reward_source != "failure"):
        after = rewarded(worth(before, rewards[before.id], rules.learning_of(before.policy)))
    if ends:
        after = ended(after, now, rules)
    group = known.groups.get(after.group_id) if after.group_id is not None else None
    return explained(after, group.state if group else None)


def _resolve(one: Feedback, known: Known, now: datetime, rules: Rules) -> Became | Found:
    """The feedback with its target filled in and the trajectories it moves; or what it becomes without."""
    if one.withdrawn_at is not None:
        return _became(one, "withdrawn")
    if one.source == "close" or (one.source == "judge" and one.rewards is None):
        return _asked(one, known, now, rules)
    named = _named(one, known)
    if not named or (_missing(one, known) and now - one.created_at < rules.feedback_waits):
        return _unfound(one, now, rules, UNKNOWN_TARGET)
    if one.target_kind != "group":
        (trajectory_id,) = named
        completion_id = known.completions[one.target_id, one.choice][0] if one.target_kind == "completion" else None
        one = replace(one, trajectory_id=trajectory_id, completion_id=completion_id)
        if one.parts is not None:
            weights = rules.learning_of(known.trajectories[trajectory_id].policy).weights
            one = replace(one, reward=weighted(one.parts, weights))
    if one.reward is not None and not abs(one.reward) <= MAX_REWARD:
        reason = f"its weighted parts make a reward of {one.reward:g}, which is beyond ±{MAX_REWARD:g}"
        return _became(replace(one, reward=None), "failed", reason)
    free = frozenset(name for name in named if known.trajectories[name].state not in OVER)
    if not free:
        claimed = known.trajectories[min(named)]
        group = known.groups.get(claimed.group_id) if claimed.group_id is not None else None
        step = claimed.trained_in_step if claimed.trained_in_step is not None else group.step if group else None
        return _became(one, "unused", _trained_in(step))
    return one, free


def _asked(one: Feedback, known: Known, now: datetime, rules: Rules) -> Became | Found:
    """What is asked of a group as a whole: to be ranked by judges, or to close."""
    group = known.groups.get(one.target_id)
    if group is None:
        return _unfound(one, now, rules, UNKNOWN_GROUP)
    if group.state in OVER:
        return _became(one, "unused", _trained_in(group.step))
    if one.source == "close":
        return one, frozenset()
    if group.state not in UNCLAIMED:
        return _became(one, "unused", f"the group was discarded ({group.reason})")
    wanted = (one.judge or {}).get("model")
    if wanted is None and not rules.learning_of(group.policy).ruler.judges:
        return _became(one, "failed", NO_JUDGE)
    if _given_up(one, group, now, rules):
        return _became(one, "unused", NOBODY_CAME)
    if wanted is not None and wanted not in rules.judges:
        return _became(one, "failed", f"no judge is named {wanted!r}; there are: {', '.join(sorted(rules.judges))}")
    return replace(_became(one, "waiting", WAITS), due_at=now + JUDGED_MEANWHILE)


def _given_up(one: Feedback, group: Group, now: datetime, rules: Rules) -> bool:
    """Whether judges were waited for as long as the settings say, since this was asked."""
    heard = group.judge_asked_at is not None and group.judge_asked_at >= one.created_at
    waiting = group.closed_at is not None and group.judged_at is None and group.judge_due_at is None
    return heard and waiting and now >= judged_by(group, rules.learning_of(group.policy).ruler)


def _unfound(one: Feedback, now: datetime, rules: Rules, reason: str) -> Became:
    age = now - one.created_at
    if age >= rules.feedback_waits:
        return _became(one, "failed", reason)
    due_at = min(now + max(age, FIRST_LOOK_AGAIN), one.created_at + rules.feedback_waits)
    return replace(_became(one, "waiting"), due_at=due_at)


def _withdrawn(batch: Sequence[Feedback], known: Known) -> tuple[list[Found], tuple[str, ...]]:
    """Of the applied feedback in `batch`, which is withdrawn: what is taken back, and what a step has claimed."""
    wanted = {one.id for one in batch if one.state != "waiting"}
    back: list[Found] = []
    kept = []
    for one in known.standing:
        if one.id not in wanted or one.state not in _CHANGEABLE:
            continue
        named = _named(one, known)
        free = frozenset(name for name in named if known.trajectories[name].state not in OVER)
        if one.state == "applied" and free != named:
            kept.append(one.id)
        else:
            back.append((one, free))
    return back, tuple(sorted(kept))


def _became(one: Feedback, state: str, reason: str | None = None) -> Became:
    return Became(
        id=one.id,
        state=state,
        reason=reason or one.reason,
        reward=one.reward,
        trajectory_id=one.trajectory_id,
        completion_id=one.completion_id,
        applied_at=one.applied_at,
        due_at=None,
    )


def _trained_in(step: int | None) -> str:
    return "trained in step" if step is None else f"trained in step {step}"


def _named(one: Feedback, known: Known) -> frozenset[str]:
    """The known trajectories it speaks of."""
    if one.target_kind == "completion":
        found = known.completions.get((one.target_id, one.choice))
        return frozenset({found[1]} if found else ())
    if one.target_kind == "trajectory":
        return frozenset({one.target_id} & known.trajectories.keys())
    return frozenset(name for name in one.rewards or () if _is_member(name, one.target_id, known))


def _missing(one: Feedback, known: Known) -> str | None:
    """Of a group's rewards: those for trajectories the group does not have."""
    if one.target_kind != "group":
        return None
    strangers = sorted(name for name in one.rewards or () if not _is_member(name, one.target_id, known))
    return f"no such trajectory in this group: {', '.join(strangers)}" if strangers else None


def _is_member(trajectory_id: str, group_id: str, known: Known) -> bool:
    trajectory = known.trajectories.get(trajectory_id)
    return trajectory is not None and trajectory.is_of(group_id)
