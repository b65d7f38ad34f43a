"""What feedback, trajectories and groups become. Pure: values in, decisions out; knows no table and no clock.

What is decided depends on the facts alone, never on the order in which workers saw them: of two feedbacks the one with
the later (created_at, id) counts, whichever was applied first.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from whetstone.reasons import WhyNotTrained

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
    }
)
"""The reasons that are decided here; any other was written by who captured or trained, and stays."""

UNKNOWN_TARGET = "no such trajectory in this project"
FIRST_LOOK_AGAIN = timedelta(seconds=1)

OVER = frozenset({"claimed", "trained"})
"""Trajectory and group states in which rewards are frozen."""


@dataclass(frozen=True, slots=True)
class Rules:
    """When things end, close and fail; counts of trajectories, and times."""

    target_size: int
    minimum_size: int
    deadline: timedelta
    feedback_waits: timedelta


@dataclass(frozen=True, slots=True)
class Feedback:
    """One feedback as it came, with what it was applied to where that is known."""

    id: str
    created_at: datetime
    target_kind: str
    target_id: str
    choice: int
    reward: float | None
    rewards: Mapping[str, float] | None
    final: bool
    state: str
    trajectory_id: str | None
    completion_id: str | None
    applied_at: datetime | None

    @property
    def order(self) -> tuple[datetime, str]:
        """Of two feedbacks on the same thing, the greater counts."""
        return self.created_at, self.id


@dataclass(frozen=True, slots=True)
class Trajectory:
    """What decisions need of a trajectory."""

    id: str
    group_id: str | None
    split: str
    no_train: bool
    state: str
    reward: float | None
    reward_source: str | None
    completions: int
    why_not_trained: str | None
    trained_in_step: int | None
    created_at: datetime
    last_seen_at: datetime
    ended_at: datetime | None

    @property
    def counts(self) -> bool:
        """Whether its group compares it with the others."""
        return self.split == "train" and not self.no_train and self.completions > 0 and self.state != "excluded"


@dataclass(frozen=True, slots=True)
class Group:
    """What decisions need of a group, and what they change in it."""

    id: str
    state: str
    reason: str | None
    size: int
    rewarded: int
    reward_mean: float | None
    reward_spread: float | None
    step: int | None
    created_at: datetime
    closed_at: datetime | None
    due_at: datetime | None


@dataclass(frozen=True, slots=True)
class Became:
    """What a feedback became. `due_at` is set while it waits: when to look for its target again."""

    id: str
    state: str
    reason: str | None = None
    trajectory_id: str | None = None
    completion_id: str | None = None
    applied_at: datetime | None = None
    due_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class Known:
    """What the project knows of the targets of some feedback, read under their locks.

    `completions` maps (target id, choice) to (completion id, trajectory id). `standing` is the applied feedback of
    these trajectories and of their groups.
    """

    trajectories: Mapping[str, Trajectory]
    groups: Mapping[str, Group]
    completions: Mapping[tuple[str, int], tuple[str, str]]
    standing: Sequence[Feedback]


@dataclass(frozen=True, slots=True)
class Settled:
    """What a batch of feedback changes."""

    feedback: tuple[Became, ...]
    trajectories: tuple[Trajectory, ...]


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


def ended(trajectory: Trajectory, now: datetime) -> Trajectory:
    """The trajectory after its end; one that ended before stays as it is."""
    if trajectory.state != "open":
        return trajectory
    return rewarded(replace(trajectory, state="ended", ended_at=now))


def rewarded(trajectory: Trajectory) -> Trajectory:
    """The trajectory in the state its reward gives it: ended with a reward is `rewarded`, also after an exclusion."""
    waits = trajectory.state == "ended" or (
        trajectory.state == "excluded" and trajectory.why_not_trained == WhyNotTrained.NO_REWARD
    )
    return replace(trajectory, state="rewarded") if waits and trajectory.reward is not None else trajectory


def explained(trajectory: Trajectory, group_state: str | None) -> Trajectory:
    """The trajectory with the reason why no step has trained on it, as far as that is decided here."""
    foreign = trajectory.why_not_trained is not None and trajectory.why_not_trained not in OURS
    if foreign or trajectory.state in OVER:
        return trajectory
    return replace(trajectory, why_not_trained=_why(trajectory, group_state))


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


def mean(values: Collection[float]) -> float:
    """Arithmetic mean; the same for the same values in any order."""
    return math.fsum(values) / len(values)


def spread(values: Collection[float]) -> float:
    """Population standard deviation; exactly 0 for equal values."""
    middle = mean(values)
    return (
        math.sqrt(math.fsum((value - middle) ** 2 for value in values) / len(values)) if len(set(values)) > 1 else 0.0
    )


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


def _why(trajectory: Trajectory, group_state: str | None) -> WhyNotTrained:
    if trajectory.split == "eval":
        return WhyNotTrained.SPLIT_EVAL
    if trajectory.no_train:
        return WhyNotTrained.NO_TRAIN
    if trajectory.group_id is None:
        return WhyNotTrained.NO_GROUP
    if trajectory.completions == 0:
        return WhyNotTrained.EMPTY
    if group_state in OVER:
        return WhyNotTrained.NO_REWARD if trajectory.state == "excluded" else WhyNotTrained.LATE
    if trajectory.reward is None:
        return WhyNotTrained.NO_REWARD
    if group_state == "discarded":
        too_few = trajectory.why_not_trained in (WhyNotTrained.TOO_FEW, WhyNotTrained.GROUP_OPEN)
        return WhyNotTrained.TOO_FEW if too_few else WhyNotTrained.LATE
    return WhyNotTrained.WAITING_STEP if group_state == "scored" else WhyNotTrained.GROUP_OPEN


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
