"""Decide what feedback changes. Pure: values in, decisions out.

A decision depends on the facts alone, never on the order in which workers saw them: of two feedbacks the one with the
later (created_at, id) counts, in whichever order they were applied.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta

from judge.decisions.effective_feedback import rewards_from_feedback, superseded, weighted
from judge.decisions.judge_schedule import judged_by
from judge.decisions.model import (
    OVER,
    UNCLAIMED,
    Feedback,
    FeedbackChanges,
    FeedbackContext,
    FeedbackOutcome,
    Group,
    Rules,
    Trajectory,
)
from judge.decisions.reward_parts import Given, worth
from judge.decisions.trajectory_lifecycle import ended, explained, rewarded
from whetstone.domain.reward_bounds import MAX_REWARD

UNKNOWN_TARGET = "no such trajectory in this project"
UNKNOWN_GROUP = "no such group in this project"
NO_JUDGE = "no judge is set up: name one in learning.<policy>.ruler.judges"
WAITS = "waits for its judges"
NOT_RANKED_IN_TIME = "no judge has ranked its group in time (ruler.wait_s)"
FIRST_LOOK_AGAIN = timedelta(seconds=1)
JUDGED_MEANWHILE = timedelta(minutes=10)
"""How often to check whether a group that waits for its judges can still be ranked."""
_CHANGEABLE = ("applied", "superseded")

Resolved = tuple[Feedback, frozenset[str]]
"""A feedback with its target filled in, and the trajectories that it changes."""


def apply_feedback(batch: Sequence[Feedback], known: FeedbackContext, now: datetime, rules: Rules) -> FeedbackChanges:
    """Apply waiting feedback to its targets, and undo withdrawn feedback.

    A trajectory's reward is the last one given to it as a whole (also in a group's feedback), else the mean of those
    given to its completions. A feedback is superseded when later feedback with the same target replaces it completely;
    when that is withdrawn, it counts again. Once a step has claimed the trajectory, feedback is unused.
    """
    became: list[FeedbackOutcome] = []
    applicable: list[Resolved] = []
    for one in batch:
        if one.state != "waiting":
            continue  # withdrawn: its state as read here does not count, `known.standing` has the current one
        resolved = _resolve(one, known, now, rules)
        if isinstance(resolved, FeedbackOutcome):
            became.append(resolved)
        else:
            applicable.append(resolved)
    back, restored = _withdrawn(batch, known)
    became += [_became(one, "withdrawn") for one, _ in back]
    taken = {one.id for one, _ in back}
    standing = [one for one in known.standing if one.id not in taken]
    counted = [*standing, *(one for one, _ in applicable)]
    gone = superseded(counted)
    fresh = [replace(one, applied_at=now, reason=_missing(one, known)) for one, _ in applicable]
    for one in (*(one for one in standing if one.state in _CHANGEABLE), *fresh):
        fate = "superseded" if one.id in gone else "applied"
        if fate != one.state:
            became.append(_became(one, fate))
    ending = {trajectory_id for one, ids in applicable if one.final for trajectory_id in ids}
    affected = {trajectory_id for _, ids in (*applicable, *back) for trajectory_id in ids}
    moved = {trajectory_id: known.trajectories[trajectory_id] for trajectory_id in sorted(affected)}
    rewards: dict[str, Given | None] = dict.fromkeys(trajectory_id for _, ids in back for trajectory_id in ids)
    rewards |= rewards_from_feedback(counted, moved, rules.learning)
    after = (_after(one, rewards, one.id in ending, known, now, rules) for one in moved.values())
    changed = tuple(new for new, old in zip(after, moved.values(), strict=True) if new != old)
    waits = {one.id for one in became if one.reason == WAITS}
    requests = sorted((one for one in batch if one.id in waits), key=lambda one: one.order)
    closes = [*(one for one, _ in applicable if one.source == "close"), *(one for one in requests if one.final)]
    closing = {one.target_id: one.created_at for one in sorted(closes, key=lambda one: one.order)}
    ranking = {one.target_id: one.created_at for one in requests}
    return FeedbackChanges(tuple(became), changed, closing, ranking, restored)


def _after(
    before: Trajectory,
    rewards: Mapping[str, Given | None],
    ends: bool,
    known: FeedbackContext,
    now: datetime,
    rules: Rules,
) -> Trajectory:
    """Return the trajectory with its present reward from feedback. One that `rewards` leaves out keeps its reward."""
    after = before
    if before.id in rewards and (rewards[before.id] or before.reward_source != "failure"):
        after = rewarded(worth(before, rewards[before.id], rules.learning_of(before.policy)))
    if ends:
        after = ended(after, now, rules)
    group = known.groups.get(after.group_id) if after.group_id is not None else None
    return explained(after, group.state if group else None)


def _resolve(one: Feedback, known: FeedbackContext, now: datetime, rules: Rules) -> FeedbackOutcome | Resolved:
    """Return the feedback with its target and the trajectories it changes; or its outcome, if it cannot be applied."""
    if one.withdrawn_at is not None:
        return _became(one, "withdrawn")
    if one.source == "close" or (one.source == "judge" and one.rewards is None):
        return _resolve_request(one, known, now, rules)
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


def _resolve_request(one: Feedback, known: FeedbackContext, now: datetime, rules: Rules) -> FeedbackOutcome | Resolved:
    """Resolve a request about a group as a whole: to be ranked by judges, or to close."""
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
        return _became(one, "unused", NOT_RANKED_IN_TIME)
    if wanted is not None and wanted not in rules.judges:
        return _became(one, "failed", f"no judge is named {wanted!r}; there are: {', '.join(sorted(rules.judges))}")
    return replace(_became(one, "waiting", WAITS), due_at=now + JUDGED_MEANWHILE)


def _given_up(one: Feedback, group: Group, now: datetime, rules: Rules) -> bool:
    """Return whether the wait for judges that the settings allow is over, counted from this request."""
    was_requested = group.judge_asked_at is not None and group.judge_asked_at >= one.created_at
    waiting = group.closed_at is not None and group.judged_at is None and group.judge_due_at is None
    return was_requested and waiting and now >= judged_by(group, rules.learning_of(group.policy).ruler)


def _unfound(one: Feedback, now: datetime, rules: Rules, reason: str) -> FeedbackOutcome:
    age = now - one.created_at
    if age >= rules.feedback_waits:
        return _became(one, "failed", reason)
    due_at = min(now + max(age, FIRST_LOOK_AGAIN), one.created_at + rules.feedback_waits)
    return replace(_became(one, "waiting"), due_at=due_at)


def _withdrawn(batch: Sequence[Feedback], known: FeedbackContext) -> tuple[list[Resolved], tuple[str, ...]]:
    """Return what is undone of withdrawn applied feedback in `batch`, and the ids of what a step has claimed."""
    wanted = {one.id for one in batch if one.state != "waiting"}
    back: list[Resolved] = []
    restored = []
    for one in known.standing:
        if one.id not in wanted or one.state not in _CHANGEABLE:
            continue
        named = _named(one, known)
        free = frozenset(name for name in named if known.trajectories[name].state not in OVER)
        if one.state == "applied" and free != named:
            restored.append(one.id)
        else:
            back.append((one, free))
    return back, tuple(sorted(restored))


def _became(one: Feedback, state: str, reason: str | None = None) -> FeedbackOutcome:
    return FeedbackOutcome(
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


def _named(one: Feedback, known: FeedbackContext) -> frozenset[str]:
    """Return the known trajectories that it targets."""
    if one.target_kind == "completion":
        match = known.completions.get((one.target_id, one.choice))
        return frozenset({match[1]} if match else ())
    if one.target_kind == "trajectory":
        return frozenset({one.target_id} & known.trajectories.keys())
    return frozenset(name for name in one.rewards or () if _is_member(name, one.target_id, known))


def _missing(one: Feedback, known: FeedbackContext) -> str | None:
    """Name the trajectories in a group's rewards that do not belong to the group; None where there are none."""
    if one.target_kind != "group":
        return None
    strangers = sorted(name for name in one.rewards or () if not _is_member(name, one.target_id, known))
    return f"no such trajectory in this group: {', '.join(strangers)}" if strangers else None


def _is_member(trajectory_id: str, group_id: str, known: FeedbackContext) -> bool:
    trajectory = known.trajectories.get(trajectory_id)
    return trajectory is not None and trajectory.is_of(group_id)
