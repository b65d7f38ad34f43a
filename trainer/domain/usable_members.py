"""Find out which members of a step can be trained on at all, whatever is made of their rewards. Pure."""

import logging
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from trainer.domain.claims import Member
from trainer.domain.rows import check
from trainer.errors import RowError
from whetstone.config.trainer import CutOff
from whetstone.domain.why_not_trained import WhyNotTrained

LARGEST_GAP = 1e6
"""Largest gap between rewards that are compared. Above it, one mistaken reward would dominate the step, and from 1e19
the square of its gradient does not fit into float32.
"""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Usable:
    """The members of a step, sorted by whether they can be compared and trained on."""

    among: tuple[Member, ...]
    """Those whose rewards are compared; some of them have no row."""
    unusable: Mapping[str, str | None]
    """Why no row can be built, by id; None where one can."""
    left_out: Mapping[str, str]
    """Why each of the other members is left out, by id."""


def usable_members(
    members: Sequence[Member], max_row_tokens: int, unfit: Collection[str] = (), cut_off: CutOff | None = None
) -> Usable:
    """Return which members are compared. `unfit`: trajectories with a row that does not fit into the device's memory.

    `cut_off`: see `treatment`.

    Which trajectories are too long depends on what was sampled, so they leave the comparison too. What remains is the
    gradient of E[r | the rows fit]. With their rewards in the mean the advantages of the others no longer add up to 0:
    where long answers are the good ones, everything that fits would be pushed down.
    """
    left_out: dict[str, str] = dict.fromkeys(_too_large(members), WhyNotTrained.REWARD_TOO_LARGE)
    left_out |= dict.fromkeys(_copies(members), WhyNotTrained.FIXED_SEED)
    unusable = {m.trajectory_id: _why_unusable(m, max_row_tokens) for m in members if m.trajectory_id not in left_out}
    too_long = [name for name, why in unusable.items() if why == WhyNotTrained.TOO_LONG or name in unfit]
    left_out |= dict.fromkeys(too_long, WhyNotTrained.TOO_LONG)
    left_out |= {
        member.trajectory_id: WhyNotTrained.CUT_OFF.value
        for member in members
        if member.trajectory_id not in left_out and treatment(member, cut_off) == "mask"
    }
    among = tuple(member for member in members if member.trajectory_id not in left_out)
    return Usable(among, unusable, left_out)


def treatment(member: Member, cut_off: CutOff | None) -> CutOff:
    """Return what is done with a member by `trainer.cut_off`; `train` with all that no length limit ended."""
    if not member.cut_off:
        return "train"
    return cut_off or ("mask" if member.judged else "train")


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


def _why_unusable(member: Member, max_row_tokens: int) -> str | None:
    """Return why no rows can be built of the member; None where they can."""
    if not any(completion.token_ids for completion in member.completions):
        return member.silent or WhyNotTrained.NO_TOKEN_IDS
    for completion in member.completions:
        if completion.constraints is not None and completion.constraints.unknown:
            unknown = ", ".join(completion.constraints.unknown)
            log.warning("trajectory %s: its constraints cannot be replayed: %s", member.trajectory_id, unknown)
            return WhyNotTrained.CONSTRAINED
    try:
        for completion in member.completions:
            check(completion)
    except RowError as error:
        log.warning("%s", error)
        return WhyNotTrained.NO_LOGPROBS
    # A row ends with a completion.
    spoken = [completion for completion in member.completions if completion.token_ids]
    longest = max(len(completion.prompt_ids) + len(completion.token_ids) for completion in spoken)
    return None if longest <= max_row_tokens else WhyNotTrained.TOO_LONG
