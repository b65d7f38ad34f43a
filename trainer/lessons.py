"""A step's members in, rows out: what each teaches, or why it teaches nothing. Pure; knows no table and no torch."""

import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from trainer.advantages import divisors, group_relative
from trainer.claims import Member
from trainer.errors import RowError
from trainer.rows import Row, merge
from whetstone.reasons import WhyNotTrained
from whetstone.training import AdvantageScale

LARGEST_GAP = 1e6
"""Rewards that are compared lie at most so far apart: beyond it one mistaken reward would be all that a step sees, and
from 1e19 on the square of its gradient does not fit into float32."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Lessons:
    """What a step teaches."""

    rows: tuple[Row, ...]
    """Empty where nothing can be learned."""
    advantages: dict[str, float]
    """Of the trajectories that the rows are of, by id; an advantage of 0 is one of them."""
    baselines: dict[str, float]
    """What the reward of each was compared with, by id: its group's mean, or its own baseline."""
    left_out: dict[str, str]
    """Why not, by id, of all others."""
    answers: int
    """How many the rows were merged from."""


def lessons(members: Sequence[Member], max_row_tokens: int, scale: AdvantageScale = "none") -> Lessons:
    """Rows and advantages of all that teaches something, and why the rest does not. `scale`: as `divisors` has it."""
    left_out: dict[str, str] = dict.fromkeys(_too_large(members), WhyNotTrained.REWARD_TOO_LARGE)
    left_out |= dict.fromkeys(_copies(members), WhyNotTrained.FIXED_SEED)
    compared, baselines = _compared([member for member in members if member.trajectory_id not in left_out], scale)
    rows: list[Row] = []
    answers = 0
    advantages: dict[str, float] = {}
    for member in members:
        if member.trajectory_id in left_out:
            continue
        own = _rows(member, compared.get(member.trajectory_id), max_row_tokens)
        if isinstance(own, str):
            left_out[member.trajectory_id] = own
        else:
            rows += own
            answers += sum(bool(spoken.token_ids) for spoken in member.spoken)
            advantages[member.trajectory_id] = compared[member.trajectory_id]
    if not any(advantages.values()):
        # Singles of a task in which every reward was always the same; an update would follow the last ones' momentum.
        return Lessons((), {}, {}, dict.fromkeys(advantages, WhyNotTrained.GROUP_UNIFORM.value) | left_out, 0)
    return Lessons(tuple(rows), advantages, {name: baselines[name] for name in advantages}, left_out, answers)


def _too_large(members: Sequence[Member]) -> Iterator[str]:
    """Ids of those whose group's rewards, or whose own reward and baseline, are further apart than LARGEST_GAP."""
    rewards: defaultdict[str, list[float]] = defaultdict(list)
    for member in members:
        key = member.trajectory_id if member.alone else member.group_id
        rewards[key] += [member.reward] if member.baseline is None else [member.reward, member.baseline]
    for member in members:
        beside = rewards[member.trajectory_id if member.alone else member.group_id]
        if max(beside) - min(beside) > LARGEST_GAP:
            yield member.trajectory_id


def _copies(members: Iterable[Member]) -> Iterator[str]:
    """Ids of those that a seed makes repeat an earlier member of their group: same version, same prompt, same seed.

    The choices of one call differ all the same: vLLM counts its seed up from choice to choice.
    """
    seen = set()
    for member in members:
        if member.seed is None or not member.spoken:
            continue
        first = member.spoken[0]
        drawn = (member.group_id, member.seed, first.version, first.prompt_ids)
        if drawn in seen:
            yield member.trajectory_id
        seen.add(drawn)


def _compared(members: Sequence[Member], scale: AdvantageScale) -> tuple[dict[str, float], dict[str, float]]:
    """Of each member that there is something to compare with, by id: its advantage, and what it is compared with."""
    rewards: defaultdict[str, dict[str, float]] = defaultdict(dict)
    singles: dict[str, float] = {}
    for member in members:
        (singles if member.alone else rewards[member.group_id])[member.trajectory_id] = member.reward
    relative = group_relative(rewards)
    baselines = {m.trajectory_id: relative.means[m.group_id] for m in members if m.group_id in relative.means}
    baselines |= {m.trajectory_id: m.baseline for m in members if m.baseline is not None}
    gaps = {name: reward - baselines[name] for name, reward in singles.items() if name in baselines}
    divided_by = divisors(rewards, singles, scale)
    gaps |= relative.by_trajectory
    return {name: gap / divided_by[name] for name, gap in gaps.items()}, baselines


def _rows(member: Member, advantage: float | None, max_row_tokens: int) -> list[Row] | str:
    """The member's rows, or why it has none."""
    if not any(spoken.token_ids for spoken in member.spoken):
        return member.silent or WhyNotTrained.NO_TOKEN_IDS
    if advantage is None:
        return WhyNotTrained.TOO_FEW if member.alone else WhyNotTrained.GROUP_UNIFORM
    try:
        rows = merge(member.trajectory_id, member.spoken, advantage)
    except RowError as error:
        log.warning("%s", error)
        return WhyNotTrained.NO_LOGPROBS
    return rows if max(len(row.token_ids_T) for row in rows) <= max_row_tokens else WhyNotTrained.TOO_LONG
