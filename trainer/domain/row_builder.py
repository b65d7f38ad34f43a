"""Build training rows from a step's members, or give the reason why a member yields none. Pure."""

import logging
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from trainer.domain.advantages import divisors, group_relative, uniform
from trainer.domain.claims import Member
from trainer.domain.measured import MeasuredRows
from trainer.domain.rows import Row, merge
from trainer.errors import RowError
from whetstone.config.trainer import AdvantageScale
from whetstone.domain.why_not_trained import WhyNotTrained

LARGEST_GAP = 1e6
"""Largest gap between rewards that are compared. Above it, one mistaken reward would dominate the step, and from 1e19
the square of its gradient does not fit into float32.
"""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StepRows:
    """What a step trains on."""

    rows: tuple[Row, ...]
    """Empty where nothing can be learned."""
    advantages: dict[str, float]
    """Advantages of the trajectories in `rows`, by id. An advantage of 0 is included."""
    baselines: dict[str, float]
    """What each reward was compared with, by trajectory id: its group's mean, or its own baseline."""
    left_out: dict[str, str]
    """Why each of the other trajectories was left out, by id."""
    answers: int
    """Number of completions that the rows were merged from."""

    def without(self, measured: MeasuredRows) -> "StepRows":
        """Return what is left once it is known what constraints decided."""
        left_out = self.left_out | dict.fromkeys(measured.left_out, WhyNotTrained.CONSTRAINED.value)
        advantages = {name: value for name, value in self.advantages.items() if name not in left_out}
        if not any(advantages.values()):
            return _uniform(advantages, left_out)
        baselines = {name: self.baselines[name] for name in advantages}
        return replace(self, rows=measured.rows, advantages=advantages, baselines=baselines, left_out=left_out)


def build_rows(
    members: Sequence[Member],
    max_row_tokens: int,
    scale: AdvantageScale = "none",
    unfit: Collection[str] = (),
) -> StepRows:
    """Build the rows and advantages of all members that teach something, and the reasons for the rest.

    `scale`: see `divisors`. `unfit`: trajectories with a row that does not fit into the device's memory; they are left
    out like those with a row above `max_row_tokens`.
    """
    left_out: dict[str, str] = dict.fromkeys(_too_large(members), WhyNotTrained.REWARD_TOO_LARGE)
    left_out |= dict.fromkeys(_copies(members), WhyNotTrained.FIXED_SEED)
    built = {m.trajectory_id: _rows(m, max_row_tokens) for m in members if m.trajectory_id not in left_out}
    # Which trajectories are too long depends on what was sampled, so they leave the comparison too. What remains is
    # the gradient of E[r | the rows fit]. With their rewards in the mean the advantages of the others no longer add up
    # to 0: where long answers are the good ones, everything that fits would be pushed down.
    too_long = [name for name, rows in built.items() if rows == WhyNotTrained.TOO_LONG or name in unfit]
    left_out |= dict.fromkeys(too_long, WhyNotTrained.TOO_LONG)
    compared, baselines = _compared([member for member in members if member.trajectory_id not in left_out], scale)
    rows: list[Row] = []
    answers = 0
    advantages: dict[str, float] = {}
    for member in members:
        name = member.trajectory_id
        if name in left_out:
            continue
        own, advantage = built[name], compared.get(name)
        if isinstance(own, str):
            left_out[name] = own
        elif advantage is None:
            left_out[name] = WhyNotTrained.TOO_FEW if member.alone else WhyNotTrained.GROUP_UNIFORM
        else:
            rows += [replace(row, advantage=advantage) for row in own]
            answers += sum(bool(completion.token_ids) for completion in member.completions)
            advantages[name] = advantage
    if not any(advantages.values()):
        # These are singles of a task in which every reward was always the same. An update would only follow the
        # momentum of earlier steps.
        return _uniform(advantages, left_out)
    return StepRows(tuple(rows), advantages, {name: baselines[name] for name in advantages}, left_out, answers)


def _uniform(advantages: Iterable[str], left_out: dict[str, str]) -> StepRows:
    """Return a step of trajectories of which none has an advantage."""
    return StepRows((), {}, {}, dict.fromkeys(advantages, WhyNotTrained.GROUP_UNIFORM.value) | left_out, 0)


def _too_large(members: Sequence[Member]) -> Iterator[str]:
    """Yield the ids of members whose rewards are too far apart.

    That is: their group's rewards, or their own reward and baseline, differ by more than LARGEST_GAP.
    """
    rewards: defaultdict[str, list[float]] = defaultdict(list)
    for member in members:
        key = member.trajectory_id if member.alone else member.group_id
        rewards[key] += [member.reward] if member.baseline is None else [member.reward, member.baseline]
    for member in members:
        beside = rewards[member.trajectory_id if member.alone else member.group_id]
        if max(beside) - min(beside) > LARGEST_GAP:
            yield member.trajectory_id


def _copies(members: Iterable[Member]) -> Iterator[str]:
    """Yield the ids of members that repeat an earlier member of their group: same version, same prompt, same seed.

    The choices of one call differ all the same: vLLM increments the seed from choice to choice.
    """
    seen = set()
    for member in members:
        if member.seed is None or not member.completions:
            continue
        first = member.completions[0]
        drawn = (member.group_id, member.seed, first.version, first.prompt_ids)
        if drawn in seen:
            yield member.trajectory_id
        seen.add(drawn)


def _compared(members: Sequence[Member], scale: AdvantageScale) -> tuple[dict[str, float], dict[str, float]]:
    """Return, by member id, the advantage and the value it was compared with. Members without one are absent."""
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
    return {name: gap / divided_by[name] for name, gap in gaps.items()}, baselines


def _rows(member: Member, max_row_tokens: int) -> list[Row] | str:
    """Return the member's rows, with advantage 0, or the reason why it has none."""
    if not any(completion.token_ids for completion in member.completions):
        return member.silent or WhyNotTrained.NO_TOKEN_IDS
    for completion in member.completions:
        if completion.constraints is not None and completion.constraints.unknown:
            unknown = ", ".join(completion.constraints.unknown)
            log.warning("trajectory %s: its constraints cannot be replayed: %s", member.trajectory_id, unknown)
            return WhyNotTrained.CONSTRAINED
    try:
        rows = merge(member.trajectory_id, member.completions, 0.0)
    except RowError as error:
        log.warning("%s", error)
        return WhyNotTrained.NO_LOGPROBS
    return rows if max(len(row.token_ids_T) for row in rows) <= max_row_tokens else WhyNotTrained.TOO_LONG
