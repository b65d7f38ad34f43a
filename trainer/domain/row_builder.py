"""Build training rows from a step's members, or give the reason why a member yields none. Pure."""

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from trainer.domain.advantages import (
    common_parts,
    divisor,
    divisors,
    group_relative,
    parts_relative,
    state_relative,
    uniform,
)
from trainer.domain.claims import Member
from trainer.domain.measured import MeasuredRows
from trainer.domain.rows import Row, SampledCompletion, merge
from trainer.domain.usable_members import LARGEST_GAP, treatment, usable_members
from whetstone.config.trainer import AdvantageScale, BaselineName, CutOff
from whetstone.domain.why_not_trained import WhyNotTrained

State = tuple[str, str, tuple[int, ...]]
"""Whether rewards are compared in a `group` or on a `scale`, the name of that, and the ids of the prompt."""


@dataclass(frozen=True, slots=True)
class StepRows:
    """What a step trains on."""

    rows: tuple[Row, ...]
    """Empty where nothing can be learned."""
    advantages: dict[str, float]
    """Advantages of the trajectories in `rows`, by id: the mean over their sampled tokens. An advantage of 0 is
    included.
    """
    baselines: dict[str, float]
    """What each reward is compared with where no other trajectory met the state, by trajectory id: its group's mean,
    or its own baseline.
    """
    left_out: dict[str, str]
    """Why each of the other trajectories was left out, by id."""
    answers: int
    """Number of completions that the rows were merged from."""
    state_share: float | None = None
    """Share of the sampled tokens that were compared by state, those that constraints decided included; None where
    trajectories are not compared so.
    """
    replay: tuple[Row, ...] = ()
    """Rows of past attempts that are imitated beside `rows`."""

    def without(self, measured: MeasuredRows) -> "StepRows":
        """Return what is left once it is known what constraints decided."""
        left_out = self.left_out | dict.fromkeys(measured.left_out, WhyNotTrained.CONSTRAINED.value)
        rows, unpaired = _paired(measured.rows)
        left_out |= dict.fromkeys(unpaired, WhyNotTrained.TOO_FEW.value)
        advantages = {name: value for name, value in self.advantages.items() if name not in left_out}
        if not _teach(rows):
            return _uniform(advantages, left_out)
        baselines = {name: baseline for name, baseline in self.baselines.items() if name in advantages}
        return replace(self, rows=rows, advantages=advantages, baselines=baselines, left_out=left_out)


def build_rows(
    members: Sequence[Member],
    max_row_tokens: int,
    scale: AdvantageScale = "none",
    unfit: Collection[str] = (),
    baseline: BaselineName = "group",
    cut_off: CutOff | None = None,
) -> StepRows:
    """Build the rows and advantages of all members that teach something, and the reasons for the rest.

    A completion's tokens have the advantage of its trajectory in its group, or over its own baseline if it is alone.
    Where something was earned at steps of a group, they have that of their turn; see `_by_turn`. With the `baseline`
    "state" all that is so only for a completion whose prompt no other member met; see `_by_state` for the others. A
    member of a group without differing rewards then teaches where it is compared with members that have other rewards.

    `scale`: see `divisors`; with `parts` members of a group are compared by the parts of their rewards, see
    `_by_parts`, which is refused together with the `baseline` "state" by the settings. `unfit`: trajectories with a row
    that does not fit into the device's memory; they are left out like those with a row above `max_row_tokens`.
    `cut_off`: see `treatment`; by `clamp` no advantage is above 0.
    """
    usable = usable_members(members, max_row_tokens, unfit, cut_off)
    among, left_out = usable.among, dict(usable.left_out)
    compared, baselines, spread = _compared(among, scale)
    at_states = _by_state(among, scale) if baseline == "state" else {}
    at_turns = _by_turn(among, scale, spread)
    rows: list[Row] = []
    answers = tokens = tokens_at_states = 0
    advantages: dict[str, float] = {}
    for member in among:
        name = member.trajectory_id
        own, turns = compared.get(name), at_turns.get(name, {})
        here = [at_states.get(_state(member, completion), {}).get(name) for completion in member.completions]
        if why := usable.unusable[name]:
            left_out[name] = why
        elif own is None and not any(here) and not any(turns.values()):
            left_out[name] = WhyNotTrained.TOO_FEW if member.alone else WhyNotTrained.GROUP_UNIFORM
        else:
            of_completions = [
                turns.get(completion.turn, own or 0.0) if advantage is None else advantage
                for completion, advantage in zip(member.completions, here, strict=True)
            ]
            if treatment(member, cut_off) == "clamp":
                of_completions = [min(0.0, advantage) for advantage in of_completions]
            counts = [len(completion.token_ids) for completion in member.completions]
            rows += merge(name, member.completions, of_completions)
            answers += sum(map(bool, counts))
            advantages[name] = _mean(of_completions, counts)
            tokens += sum(counts)
            tokens_at_states += sum(
                count for count, advantage in zip(counts, here, strict=True) if advantage is not None
            )
            if not member.alone:
                baselines.setdefault(name, member.reward)  # its group is uniform
    if not _teach(rows):
        # These are singles of a task in which every reward was always the same. An update would only follow the
        # momentum of earlier steps.
        return _uniform(advantages, left_out)
    return StepRows(
        tuple(rows),
        advantages,
        {name: baselines[name] for name in advantages if name in baselines},
        left_out,
        answers,
        tokens_at_states / tokens if baseline == "state" else None,
    )


def _teach(rows: Iterable[Row]) -> bool:
    """Return whether an advantage differs from 0."""
    return any(any(row.advantages_T) for row in rows)


def _paired(rows: Sequence[Row]) -> tuple[tuple[Row, ...], set[str]]:
    """Return the rows without those whose pair lacks its other trajectory, and the ids of their trajectories."""
    pairs: defaultdict[str, set[str]] = defaultdict(set)
    for row in rows:
        pairs[row.pair].add(row.trajectory_id)
    alone = {name for pair, names in pairs.items() if pair and len(names) == 1 for name in names}
    return tuple(row for row in rows if row.trajectory_id not in alone), alone


def _mean(advantages: Sequence[float], tokens: Sequence[int]) -> float:
    """Return the mean over tokens of completions' advantages; exactly their value if all are equal."""
    first = advantages[0]
    return first + math.fsum(
        (advantage - first) * count for advantage, count in zip(advantages, tokens, strict=True)
    ) / sum(tokens)


def _uniform(advantages: Iterable[str], left_out: dict[str, str]) -> StepRows:
    """Return a step of trajectories of which none has an advantage."""
    return StepRows((), {}, {}, dict.fromkeys(advantages, WhyNotTrained.GROUP_UNIFORM.value) | left_out, 0)


def _compared(members: Sequence[Member], scale: AdvantageScale) -> tuple[dict[str, float], dict[str, float], float]:
    """Return, by member id, the advantage and the value it was compared with. Members without one are absent.

    The last value is what all advantages were divided by in the end: with the scale `parts` their own standard
    deviation over the step + 1e-4, else 1.
    """
    rewards: defaultdict[str, dict[str, float]] = defaultdict(dict)
    singles: dict[str, float] = {}
    for member in members:
        (singles if member.alone else rewards[member.group_id])[member.trajectory_id] = member.reward
    relative = group_relative(rewards)
    baselines = {m.trajectory_id: relative.means[m.group_id] for m in members if m.group_id in relative.means}
    baselines |= {m.trajectory_id: m.baseline for m in members if m.baseline is not None}
    gaps = {
        name: 0.0 if uniform((reward, baselines[name])) else reward - baselines[name]
        for name, reward in singles.items()
        if name in baselines
    }
    divided_by = divisors(rewards, singles, scale)
    gaps |= relative.by_trajectory
    advantages = {name: gap / divided_by[name] for name, gap in gaps.items()}
    if scale != "parts":
        return advantages, baselines, 1.0
    advantages = _by_parts(members, advantages)
    in_step = [advantages.get(m.trajectory_id, 0.0) for m in members if not m.alone or m.trajectory_id in advantages]
    spread = divisor("step", in_step, scale)
    return {name: advantage / spread for name, advantage in advantages.items()}, baselines, spread


def _groups(members: Iterable[Member]) -> Mapping[str, list[Member]]:
    """Return the members by group, without those that are alone."""
    groups: defaultdict[str, list[Member]] = defaultdict(list)
    for member in members:
        if not member.alone:
            groups[member.group_id].append(member)
    return groups


def _by_parts(members: Sequence[Member], by_reward: Mapping[str, float]) -> dict[str, float]:
    """Return the advantages in which groups are compared by the parts of their rewards, where they have any.

    `by_reward`: those by the whole rewards, divided by the groups' standard deviation. They stay where not all members
    of a group have the same parts, where something was earned at a step, and for members that are alone. GDPO (arXiv
    2601.05242) then subtracts the mean over the step and divides by the standard deviation. Advantages of a group add
    up to 0, so that mean is 0, and only the division is left.
    """
    advantages = dict(by_reward)
    for among in _groups(members).values():
        parts = common_parts({member.trajectory_id: member.parts for member in among})
        if parts is None or any(member.step_rewards for member in among):
            continue
        for trajectory_id in parts:
            advantages.pop(trajectory_id, None)
        advantages |= parts_relative(parts)
    return advantages


def _by_turn(members: Sequence[Member], scale: AdvantageScale, spread: float) -> Mapping[str, Mapping[int, float]]:
    """Return member id -> turn -> advantage, for the groups in which something was earned at a step.

    A turn's advantage is its return to go (`Member.to_go`) minus the mean of those of the group's members that reach
    that turn; 0 where only one does, or where their returns are equal or further apart than LARGEST_GAP. With all
    reward at the end and equal numbers of turns that is the advantage of the trajectory. Divided as by `divisors`, and
    by `spread`.
    """
    whole = divisor("step", [member.reward for member in members], scale) if scale == "batch" else None
    at_turns: defaultdict[str, dict[int, float]] = defaultdict(dict)
    for group_id, among in _groups(members).items():
        if not any(member.step_rewards for member in among):
            continue
        by = whole or divisor(f"group {group_id}", [member.reward for member in among], scale)
        returns: defaultdict[int, dict[str, float]] = defaultdict(dict)
        for member in among:
            for completion in member.completions:
                returns[completion.turn][member.trajectory_id] = member.to_go(completion.turn)
        for turn, reached in returns.items():
            too_far = max(reached.values()) - min(reached.values()) > LARGEST_GAP
            gaps = dict.fromkeys(reached, 0.0) if too_far else state_relative(reached)
            for name, gap in gaps.items():
                at_turns[name][turn] = gap / by / spread
    return at_turns


def _by_state(members: Sequence[Member], scale: AdvantageScale) -> Mapping[State, Mapping[str, float]]:
    """Return state -> member id -> advantage, for each state that at least two members met.

    A state is the prompt of a completion. Members that met it are compared with one another there, each once, by their
    return to go (`Member.to_go`): those of a group, and, where rewards mean the same in every group
    (`Member.reward_scale`), those of all groups. Divided as by `divisors`; the scales `group` and `mean` go
    by the rewards that are compared. A state whose rewards are further apart than LARGEST_GAP is absent.
    """
    met: defaultdict[State, dict[str, float]] = defaultdict(dict)
    for member in members:
        for completion in member.completions:
            met[_state(member, completion)].setdefault(member.trajectory_id, member.to_go(completion.turn))
    whole = divisor("step", [member.reward for member in members], scale) if scale == "batch" else None
    at_states = {}
    for state, rewards in met.items():
        if len(rewards) > 1 and max(rewards.values()) - min(rewards.values()) <= LARGEST_GAP:
            by = whole or divisor("state", rewards.values(), scale)
            at_states[state] = {name: gap / by for name, gap in state_relative(rewards).items()}
    return at_states


def _state(member: Member, completion: SampledCompletion) -> State:
    if member.reward_scale is None:
        return "group", member.group_id, completion.prompt_ids
    return "scale", member.reward_scale, completion.prompt_ids
