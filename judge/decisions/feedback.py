"""Decide what feedback changes, which feedback on the same target still counts, and what reward it gives. Pure.

A decision depends on the facts alone, never on the order in which workers saw them: of two feedbacks on the same target
the one with the later (created_at, id) counts, in whichever order they were applied. Scores of judges are separate from
the app's feedback, which takes precedence over them.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from statistics import fmean

from judge.decisions.lifecycle import ended, explained, judged_by, rewarded
from judge.decisions.model import OVER, UNCLAIMED, Feedback, FeedbackChanges, FeedbackContext, Group, Rules, Trajectory
from judge.decisions.reward_parts import Given, worth
from whetstone.config.rewards import RewardSettings
from whetstone.domain.reward_bounds import MAX_REWARD
from whetstone.domain.states import UNKNOWN_GROUP, UNKNOWN_TARGET

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

    A trajectory's reward: see `rewards_from_feedback`. A feedback is superseded when later feedback with the same
    target replaces it completely; when that is withdrawn, it counts again. Once a step has claimed the trajectory,
    feedback is unused.
    """
    # Withdrawn feedback is left out: its state as read here does not count, `known.standing` has the current one.
    resolved = [_resolve(one, known, now, rules) for one in batch if one.state == "waiting"]
    became = [one for one in resolved if isinstance(one, Feedback)]
    applicable = [one for one in resolved if isinstance(one, tuple)]
    back, restored = _withdrawn(batch, known)
    became += [_became(one, "withdrawn") for one, _ in back]
    taken = {one.id for one, _ in back}
    standing = [one for one in known.standing if one.id not in taken]
    counted = [*standing, *(one for one, _ in applicable)]
    gone = superseded(counted)
    fresh = [replace(one, applied_at=now, reason=_missing(one, known)) for one, _ in applicable]
    became += [
        _became(one, fate)
        for one in (*(one for one in standing if one.state in _CHANGEABLE), *fresh)
        if (fate := "superseded" if one.id in gone else "applied") != one.state
    ]
    ending = {trajectory_id for one, ids in applicable if one.final for trajectory_id in ids}
    affected = {trajectory_id for _, ids in (*applicable, *back) for trajectory_id in ids}
    moved = {trajectory_id: known.trajectories[trajectory_id] for trajectory_id in sorted(affected)}
    rewards: dict[str, Given | None] = dict.fromkeys(trajectory_id for _, ids in back for trajectory_id in ids)
    rewards |= rewards_from_feedback(counted, moved, rules.learning)
    after = (_after(one, rewards, one.id in ending, known, now, rules) for one in moved.values())
    changed = tuple(new for new, old in zip(after, moved.values(), strict=True) if new != old)
    waits = {one.id for one in became if one.reason == WAITS}
    requests = [one for one in batch if one.id in waits]
    closes = [*(one for one, _ in applicable if one.source == "close"), *(one for one in requests if one.final)]
    return FeedbackChanges(tuple(became), changed, _last_times(closes), _last_times(requests), restored)


def _last_times(requests: Iterable[Feedback]) -> dict[str, datetime]:
    """Return target -> time of the last request."""
    return {one.target_id: one.created_at for one in sorted(requests, key=lambda one: one.order)}


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
    group = known.groups.get(after.group_id or "")
    return explained(after, group.state if group else None)


def _resolve(one: Feedback, known: FeedbackContext, now: datetime, rules: Rules) -> Feedback | Resolved:
    """Return the feedback with its target and the trajectories it changes; alone, as it is now, if it changes none."""
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
            policy = known.trajectories[trajectory_id].policy
            one = replace(one, reward=weighted(one.parts, rules.learning_of(policy).weights))
    if one.reward is not None and not abs(one.reward) <= MAX_REWARD:
        reason = f"its weighted parts make a reward of {one.reward:g}, which is beyond ±{MAX_REWARD:g}"
        return _became(replace(one, reward=None), "failed", reason)
    free = frozenset(name for name in named if known.trajectories[name].state not in OVER)
    if not free:
        claimed = known.trajectories[min(named)]
        group = known.groups.get(claimed.group_id or "")
        step = claimed.trained_in_step if claimed.trained_in_step is not None else group.step if group else None
        return _became(one, "unused", _trained_in(step))
    return one, free


def _resolve_request(one: Feedback, known: FeedbackContext, now: datetime, rules: Rules) -> Feedback | Resolved:
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
    return replace(one, reason=WAITS, due_at=now + JUDGED_MEANWHILE)


def _given_up(one: Feedback, group: Group, now: datetime, rules: Rules) -> bool:
    """Return whether the wait for judges that the settings allow is over, counted from this request."""
    was_requested = group.judge_asked_at is not None and group.judge_asked_at >= one.created_at
    waiting = group.closed_at is not None and group.judged_at is None and group.judge_due_at is None
    return was_requested and waiting and now >= judged_by(group, rules.learning_of(group.policy).ruler)


def _unfound(one: Feedback, now: datetime, rules: Rules, reason: str) -> Feedback:
    age = now - one.created_at
    if age >= rules.feedback_waits:
        return _became(one, "failed", reason)
    return replace(one, due_at=min(now + max(age, FIRST_LOOK_AGAIN), one.created_at + rules.feedback_waits))


def _withdrawn(batch: Sequence[Feedback], known: FeedbackContext) -> tuple[list[Resolved], tuple[str, ...]]:
    """Return what is undone of withdrawn applied feedback in `batch`, and the ids of what a step has claimed."""
    wanted = {one.id for one in batch if one.state != "waiting"}
    back: list[Resolved] = []
    restored = []
    for one in known.standing:
        if one.id in wanted and one.state in _CHANGEABLE:
            named = _named(one, known)
            free = frozenset(name for name in named if known.trajectories[name].state not in OVER)
            if one.state == "applied" and free != named:
                restored.append(one.id)
            else:
                back.append((one, free))
    return back, tuple(sorted(restored))


def _became(one: Feedback, state: str, reason: str | None = None) -> Feedback:
    return replace(one, state=state, reason=reason or one.reason, due_at=None)


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


def rewards_from_feedback(
    counted: Iterable[Feedback],
    trajectories: Mapping[str, Trajectory],
    learning: Mapping[str, RewardSettings] | None = None,
) -> dict[str, Given]:
    """Return the reward and source that feedback gives each of these trajectories; those without feedback are left out.

    That is the last reward given to the whole trajectory (also in a group's feedback), else the mean of those given to
    its completions, plus the sum of what was earned at its steps (`credit`); without any of these the score of the
    judges. `learning`, by policy, decides whether a score is added to the app's reward (`ruler.weight`).
    """
    whole: dict[str, Given] = {}
    scores: dict[str, float] = {}
    by_completion: dict[str, dict[str, float]] = {}
    steps: dict[str, dict[str, float]] = {}
    for one in sorted(counted, key=lambda feedback: feedback.order):
        if one.target_kind == "group":
            of_members = {
                name: reward
                for name, reward in (one.rewards or {}).items()
                if name in trajectories and trajectories[name].is_of(one.target_id)
            }
            if one.source == "judge":
                scores |= of_members
            else:
                whole |= {name: (reward, "group") for name, reward in of_members.items()}
        elif one.trajectory_id in trajectories and one.reward is not None:
            assert one.trajectory_id is not None
            if one.completion_id is None:
                whole[one.trajectory_id] = (one.reward, "trajectory")
            else:
                given = steps if one.credit == "step" else by_completion
                given.setdefault(one.trajectory_id, {})[one.completion_id] = one.reward
    given_rewards = {name: (fmean(rewards.values()), "completions") for name, rewards in by_completion.items()} | whole
    for name, rewards in steps.items():
        reward, source = given_rewards.get(name, (0.0, "steps"))
        given_rewards[name] = (reward + math.fsum(rewards.values()), source)
    judged = {name: (score, "judge") for name, score in scores.items() if name not in given_rewards}
    for name in scores.keys() & given_rewards.keys():
        settings = (learning or {}).get(trajectories[name].policy)
        if settings is not None and settings.ruler.weight:
            reward, source = given_rewards[name]
            given_rewards[name] = (reward + settings.ruler.weight * scores[name], source)
    return given_rewards | judged


def weighted(parts: Mapping[str, float], weights: Mapping[str, float]) -> float:
    """Return the sum of weight × number; a part without a weight counts with 1.

    The result does not depend on the order.
    """
    try:
        return math.fsum(weights.get(name, 1.0) * number for name, number in parts.items())
    except (OverflowError, ValueError):  # the sum of finite numbers with finite weights can overflow
        return math.inf


def superseded(counted: Iterable[Feedback]) -> set[str]:
    """Return the ids of feedback that later feedback with the same target replaces completely."""
    later: dict[tuple[str, str | None], set[str]] = {}
    gone: set[str] = set()
    for one in sorted(counted, key=lambda feedback: feedback.order, reverse=True):
        says, later_fields = _says(one), later.setdefault(_target(one), set())
        if says and says <= later_fields:
            gone.add(one.id)
        later_fields |= says
    return gone


def _target(one: Feedback) -> tuple[str, str | None]:
    if one.target_kind == "group":
        return "judged" if one.source == "judge" else "group", one.target_id
    return one.target_kind, one.completion_id if one.target_kind == "completion" else one.trajectory_id


def _says(one: Feedback) -> set[str]:
    """Return what the feedback sets.

    For a group: the trajectories it rewards. Else: a reward, a step's reward, a demonstration, or two of them.
    """
    if one.target_kind == "group":
        return set(one.rewards or ())
    fields = (
        ("reward" if one.credit is None else one.credit, one.reward is not None),
        ("demonstration", one.demonstrates),
    )
    return {name for name, is_given in fields if is_given}
