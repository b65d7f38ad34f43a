"""Assign a group to trajectories that the app did not group. Pure: values in, decisions out."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from judge.decisions.lifecycle import alone, ended, explained
from judge.decisions.model import EVALUATION, OVER, UNCLAIMED, Group, Rules, Trajectory
from whetstone.domain.ids import SHADOW, new_id

TICK = timedelta(microseconds=1)
"""The shortest time difference that both databases can store."""

Prompt = tuple[str, str]
"""Policy and hash of a first prompt."""


@dataclass(frozen=True, slots=True)
class PlacementContext:
    """The state that placing may change, read under locks on the trajectories' policies: nothing else places them."""

    trajectories: Mapping[str, Trajectory]
    """The trajectories to place, and those that shadow groups were drawn for."""
    unplaced: Collection[str]
    """Ids of the trajectories to place."""
    groups: Mapping[str, Group]
    """The groups they belong to already, and the newest groups of their first prompts."""
    sizes: Mapping[str, int]
    """Number of members of each group."""
    newest: Mapping[Prompt, str]
    """The id of each first prompt's newest group."""


@dataclass(frozen=True, slots=True)
class PlacementResult:
    """The result of placing."""

    trajectories: tuple[Trajectory, ...]
    opened: tuple[Group, ...]
    left: tuple[str, ...]
    """Groups that now have no members."""


def original_of(trajectory: Trajectory) -> str | None:
    """Return the id of the trajectory that its group was drawn for, if it is a shadow group."""
    group_id = trajectory.group_id or ""
    return group_id.removesuffix(SHADOW) if group_id.endswith(SHADOW) else None


def prompt_of(trajectory: Trajectory, rules: Rules) -> Prompt | None:
    """Return the prompt to group it by, if it has to be grouped by its first prompt."""
    is_free = trajectory.group_id is None and trajectory.counts and bool(rules.prompt_window)
    return (trajectory.policy, trajectory.prompt_hash) if is_free and trajectory.prompt_hash is not None else None


def wanted(unplaced: Iterable[Trajectory], rules: Rules) -> dict[Prompt, datetime]:
    """Return the first prompts whose newest group is needed, and the time before which that group must have begun."""
    until: dict[Prompt, datetime] = {}
    for one in unplaced:
        if prompt := prompt_of(one, rules):
            until[prompt] = max(one.created_at + rules.prompt_window, until.get(prompt, one.created_at))
    return until


def assign_groups(around: PlacementContext, now: datetime, rules: Rules) -> PlacementResult:
    """Place trajectories, in the order they began.

    A trajectory that the proxy drew ends at once, as nothing can continue it. The original of a shadow group joins that
    group if it is one call and is compared with nothing yet. A trajectory without a group joins the newest group of its
    first prompt that began within the window and has room; else it begins one. A trajectory that has a reward and is
    alone gets a group of its own.
    """
    places = _Places(around, now, rules)
    moved = dict(around.trajectories)
    in_order = sorted((moved[name] for name in around.unplaced), key=lambda one: (one.created_at, one.id))
    for one in in_order:
        group = places.groups.get(one.group_id or "")
        if group is not None and group.formed_by == EVALUATION:
            moved[one.id] = ended(one, now, rules)
        if group is not None and group.formed_by == "shadow" and original_of(one) != one.id:
            moved[one.id] = ended(one, now, rules)
            original = moved.get(original_of(one) or "")
            if original is not None and original.policy == one.policy and places.may_leave(original):
                moved[original.id] = places.moved(original, group)
    for one in in_order:
        moved[one.id] = places.grouped(moved[one.id])
    states = {group.id: group.state for group in places.groups.values()}
    return PlacementResult(
        trajectories=tuple(explained(one, states.get(one.group_id or "")) for one in moved.values()),
        opened=tuple(group for name, group in places.groups.items() if name not in around.groups),
        left=tuple(name for name in around.groups if name not in places.groups),
    )


class _Places:
    """The groups while trajectories are placed into them."""

    def __init__(self, around: PlacementContext, now: datetime, rules: Rules) -> None:
        self.groups = dict(around.groups)
        self._sizes = dict(around.sizes)
        self._newest = dict(around.newest)
        self._now = now
        self._rules = rules

    def may_leave(self, one: Trajectory) -> bool:
        """Return whether it is a single call that has been compared with nothing, except through our own grouping."""
        if one.completions != 1 or not one.counts or one.state in OVER:
            return False
        group = self.groups.get(one.group_id or "")
        if group is None:
            return one.group_id is None
        return group.formed_by in ("prompt", "single") and group.state in UNCLAIMED and self._sizes[group.id] == 1

    def moved(self, one: Trajectory, group: Group) -> Trajectory:
        """Return the trajectory in another group; it was the only member of its own."""
        if one.group_id is not None:
            del self.groups[one.group_id]
        return replace(one, group_id=group.id, left_group_id=one.group_id)

    def grouped(self, one: Trajectory) -> Trajectory:
        """Return the trajectory with its group, if the app has not set one."""
        group = self.groups.get(one.group_id or "")
        prompt = prompt_of(one, self._rules)
        if prompt is not None:
            chosen = self._with_room(one, prompt)
            self._sizes[chosen.id] += 1
            return replace(one, group_id=chosen.id)
        if alone(one, group.state if group else None) and self._rules.learning_of(one.policy).baseline:
            own = self._open(f"single.{new_id()}", one, "single", one.created_at)
            return replace(one, group_id=own.id, left_group_id=one.group_id)
        return one

    def _with_room(self, one: Trajectory, prompt: Prompt) -> Group:
        newest = self.groups.get(self._newest.get(prompt, ""))
        began = one.created_at
        if newest is not None and abs(began - newest.created_at) < self._rules.prompt_window:
            if newest.state in UNCLAIMED and self._sizes[newest.id] < self._rules.target_size:
                return newest
            # Strictly after the previous one, so that it is clear which of the two is the newest.
            began = max(began, newest.created_at + TICK)
        group_id = f"prompt.{prompt[1][:16]}.{new_id()}"
        self._newest[prompt] = group_id
        return self._open(group_id, one, "prompt", began, prompt[1])

    def _open(
        self, group_id: str, one: Trajectory, formed_by: str, began: datetime, prompt_hash: str | None = None
    ) -> Group:
        group = Group(
            id=group_id,
            state="open",
            reason=None,
            size=0,
            rewarded=0,
            reward_mean=None,
            reward_spread=None,
            step=None,
            created_at=began,
            closed_at=None,
            due_at=self._now,
            policy=one.policy,
            formed_by=formed_by,
            prompt_hash=prompt_hash,
        )
        self.groups[group_id] = group
        self._sizes[group_id] = 0
        return group
