"""Build the rows of a step that learns from preferences: good and bad trajectories, or pairs of a group. Pure."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace

from trainer.domain.advantages import uniform
from trainer.domain.claims import Member
from trainer.domain.row_builder import StepRows
from trainer.domain.rows import Row, merge
from trainer.domain.usable_members import usable_members
from whetstone.config.trainer import TrainerSettings
from whetstone.domain.why_not_trained import WhyNotTrained


def kto_rows(members: Sequence[Member], settings: TrainerSettings, unfit: Collection[str] = ()) -> StepRows:
    """Build the rows of all members: advantage 1 of those with a reward above `kto_desirable_above`, -1 of the others.

    Where all are good or all are bad, none teaches (`group_uniform`): the step could only make everything likelier, or
    less likely. `unfit`: see `usable_members`.
    """
    some, left_out = _usable(members, settings, unfit)
    signs = {member.trajectory_id: 1.0 if member.reward > settings.kto_desirable_above else -1.0 for member in some}
    if len(set(signs.values())) < 2:
        return StepRows((), {}, {}, left_out | dict.fromkeys(signs, WhyNotTrained.GROUP_UNIFORM.value), 0)
    rows = [
        row for member in some for row in merge(member.trajectory_id, member.completions, signs[member.trajectory_id])
    ]
    return _step(rows, some, signs, left_out)


def dpo_rows(members: Sequence[Member], settings: TrainerSettings, unfit: Collection[str] = ()) -> StepRows:
    """Build the rows of pairs: advantage 1 of the better trajectory, -1 of the worse.

    In each group, of the trajectories with the same first prompt, the best is paired with the worst, the second best
    with the second worst, and so on as long as their rewards differ (`uniform`). A trajectory without a partner is left
    out: `group_uniform`, or `too_few` where it is alone. `unfit`: see `usable_members`.
    """
    some, left_out = _usable(members, settings, unfit)
    rows: list[Row] = []
    signs: dict[str, float] = {}
    for better, worse in _pairs(some):
        for member, sign in ((better, 1.0), (worse, -1.0)):
            name = member.trajectory_id
            signs[name] = sign
            rows += [replace(row, pair=better.trajectory_id) for row in merge(name, member.completions, sign)]
    for member in some:
        if member.trajectory_id not in signs:
            why = WhyNotTrained.TOO_FEW if member.alone else WhyNotTrained.GROUP_UNIFORM
            left_out[member.trajectory_id] = why.value
    return _step(rows, [member for member in some if member.trajectory_id in signs], signs, left_out)


def _usable(
    members: Sequence[Member], settings: TrainerSettings, unfit: Collection[str]
) -> tuple[list[Member], dict[str, str]]:
    """Return the members that rows are built of, and why the others are left out."""
    cut_off = "mask" if settings.cut_off == "clamp" else settings.cut_off
    usable = usable_members(members, settings.max_row_tokens, unfit, cut_off)
    left_out = {**usable.left_out, **{name: why for name, why in usable.unusable.items() if why is not None}}
    return [member for member in usable.among if member.trajectory_id not in left_out], left_out


def _pairs(members: Iterable[Member]) -> Iterator[tuple[Member, Member]]:
    """Yield the better and the worse trajectory of each pair."""
    answers: defaultdict[tuple[str, tuple[int, ...]], list[Member]] = defaultdict(list)
    for member in members:
        if not member.alone:
            answers[member.group_id, member.completions[0].prompt_ids].append(member)
    for same in answers.values():
        by_reward = sorted(same, key=lambda member: member.reward)
        for worse, better in zip(by_reward, reversed(by_reward), strict=True):
            if better.reward <= worse.reward or uniform((worse.reward, better.reward)):
                break
            yield better, worse


def _step(
    rows: Sequence[Row], members: Iterable[Member], signs: dict[str, float], left_out: dict[str, str]
) -> StepRows:
    answers = sum(bool(completion.token_ids) for member in members for completion in member.completions)
    return StepRows(tuple(rows), signs, {}, left_out, answers)
