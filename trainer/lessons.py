"""A step's members in, rows out: what each teaches, or why it teaches nothing. Pure; knows no table and no torch."""

import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from trainer.advantages import group_relative
from trainer.claims import Member
from trainer.errors import RowError
from trainer.rows import Row, merge
from whetstone.reasons import WhyNotTrained

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Lessons:
    """What a step teaches."""

    rows: tuple[Row, ...]
    """Empty where nothing can be learned."""
    advantages: dict[str, float]
    """Of the trajectories that the rows are of, by id; an advantage of 0 is one of them."""
    left_out: dict[str, str]
    """Why not, by id, of all others."""


def lessons(members: Sequence[Member], max_row_tokens: int) -> Lessons:
    """Rows and advantages of all that teaches something, and why the rest does not.

    Raises:
        RewardError: the rewards are too large to be compared.
    """
    copies = set(_copies(members))
    compared = dict(_compared(member for member in members if member.trajectory_id not in copies))
    left_out: dict[str, str] = dict.fromkeys(copies, WhyNotTrained.FIXED_SEED)
    rows: list[Row] = []
    advantages: dict[str, float] = {}
    for member in members:
        if member.trajectory_id in copies:
            continue
        own = _rows(member, compared.get(member.trajectory_id), max_row_tokens)
        if isinstance(own, str):
            left_out[member.trajectory_id] = own
        else:
            rows += own
            advantages[member.trajectory_id] = compared[member.trajectory_id]
    if not any(advantages.values()):
        # Singles of a task in which every reward was always the same; an update would follow the last ones' momentum.
        return Lessons((), {}, dict.fromkeys(advantages, WhyNotTrained.GROUP_UNIFORM.value) | left_out)
    return Lessons(tuple(rows), advantages, left_out)


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


def _compared(members: Iterable[Member]) -> Iterator[tuple[str, float]]:
    """Id and advantage of each member that there is something to compare with.

    Raises:
        RewardError: the rewards are too large to be compared.
    """
    rewards: defaultdict[str, dict[str, float]] = defaultdict(dict)
    for member in members:
        if not member.alone:
            rewards[member.group_id][member.trajectory_id] = member.reward
        elif member.baseline is not None:
            yield member.trajectory_id, member.reward - member.baseline
    yield from group_relative(rewards).by_trajectory.items()


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
