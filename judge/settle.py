"""What feedback changes. Pure: values in, decisions out; knows no table and no clock.

What is decided depends on the facts alone, never on the order in which workers saw them: of two feedbacks the one with
the later (created_at, id) counts, whichever was applied first.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from datetime import datetime, timedelta

from judge.facts import OVER, Became, Feedback, Known, Rules, Settled
from judge.numbers import mean
from judge.trajectories import ended, explained, rewarded

UNKNOWN_TARGET = "no such trajectory in this project"
FIRST_LOOK_AGAIN = timedelta(seconds=1)


def settle(batch: Sequence[Feedback], known: Known, now: datetime, rules: Rules) -> Settled:
    """Apply waiting feedback to what it speaks of.

    A trajectory's reward is its last trajectory-level one (a group's entry for it is one), else the mean of its
    completion-level ones. A feedback of which nothing counts any more because later ones speak of the same is
    superseded. Once a step claimed the trajectory, feedback is unused.
    """
    became: list[Became] = []
    found: list[tuple[Feedback, frozenset[str]]] = []
    for one in batch:
        resolved = _resolve(one, known, now, rules)
        if isinstance(resolved, Became):
            became.append(resolved)
        else:
            found.append(resolved)
    counted = [*known.standing, *(one for one, _ in found)]
    gone = _superseded(counted)
    for one, _ in found:
        fate = "superseded" if one.id in gone else "applied"
        became.append(Became(one.id, fate, _missing(one, known), one.trajectory_id, one.completion_id, applied_at=now))
    became += [
        Became(one.id, "superseded", None, one.trajectory_id, one.completion_id, one.applied_at)
        for one in known.standing
        if one.id in gone
    ]
    spoken_of = {trajectory_id for _, ids in found for trajectory_id in ids}
    ending = {trajectory_id for one, ids in found if one.final for trajectory_id in ids}
    rewards = _rewards(counted, spoken_of)
    changed = []
    for trajectory_id in sorted(spoken_of):
        before = known.trajectories[trajectory_id]
        reward, source = rewards.get(trajectory_id, (before.reward, before.reward_source))
        after = rewarded(replace(before, reward=reward, reward_source=source))
        if trajectory_id in ending:
            after = ended(after, now)
        group = known.groups.get(after.group_id) if after.group_id is not None else None
        after = explained(after, group.state if group else None)
        if after != before:
            changed.append(after)
    return Settled(tuple(became), tuple(changed))


def _resolve(one: Feedback, known: Known, now: datetime, rules: Rules) -> Became | tuple[Feedback, frozenset[str]]:
    """The feedback with its target filled in and the trajectories it moves; or what it becomes without."""
    named = _named(one, known)
    if one.target_kind == "completion" and named:
        completion_id, trajectory_id = known.completions[one.target_id, one.choice]
        one = replace(one, completion_id=completion_id, trajectory_id=trajectory_id)
    elif one.target_kind == "trajectory" and named:
        one = replace(one, trajectory_id=one.target_id)
    age = now - one.created_at
    if not named or (_missing(one, known) and age < rules.feedback_waits):
        if age >= rules.feedback_waits:
            return Became(one.id, "failed", UNKNOWN_TARGET)
        again = min(now + max(age, FIRST_LOOK_AGAIN), one.created_at + rules.feedback_waits)
        return Became(one.id, "waiting", due_at=again)
    free = frozenset(name for name in named if known.trajectories[name].state not in OVER)
    if not free:
        claimed = known.trajectories[min(named)]
        group = known.groups.get(claimed.group_id) if claimed.group_id is not None else None
        step = claimed.trained_in_step if claimed.trained_in_step is not None else group.step if group else None
        reason = "trained in step" if step is None else f"trained in step {step}"
        return Became(one.id, "unused", reason, one.trajectory_id, one.completion_id)
    return one, free


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
    return trajectory is not None and trajectory.group_id == group_id


def _superseded(counted: Iterable[Feedback]) -> set[str]:
    """Ids of those of which later ones with the same target say all they say."""
    later: dict[tuple[str, str | None], set[str]] = {}
    gone: set[str] = set()
    for one in sorted(counted, key=lambda feedback: feedback.order, reverse=True):
        key: tuple[str, str | None]
        if one.target_kind == "group":
            key, says = ("group", one.target_id), set(one.rewards or ())
        else:
            key = (one.target_kind, one.completion_id if one.target_kind == "completion" else one.trajectory_id)
            says = {"reward"} if one.reward is not None else set()
        if says and says <= later.get(key, set()):
            gone.add(one.id)
        later.setdefault(key, set()).update(says)
    return gone


def _rewards(counted: Iterable[Feedback], trajectory_ids: Collection[str]) -> dict[str, tuple[float, str]]:
    """Reward and source of each of these trajectories that has one."""
    whole: dict[str, tuple[float, str]] = {}
    by_completion: dict[str, dict[str, float]] = {}
    for one in sorted(counted, key=lambda feedback: feedback.order):
        if one.target_kind == "group":
            whole |= {name: (reward, "group") for name, reward in (one.rewards or {}).items() if name in trajectory_ids}
        elif one.trajectory_id in trajectory_ids and one.reward is not None:
            assert one.trajectory_id is not None
            if one.completion_id is None:
                whole[one.trajectory_id] = (one.reward, "trajectory")
            else:
                by_completion.setdefault(one.trajectory_id, {})[one.completion_id] = one.reward
    means = {name: (mean(rewards.values()), "completions") for name, rewards in by_completion.items()}
    return means | whole
