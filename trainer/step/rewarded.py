"""Build a step's rows from the rewards of its trajectories, by what the step makes of them."""

from collections.abc import Collection, Sequence

from trainer.domain.claims import Member
from trainer.domain.preference_rows import dpo_rows, kto_rows
from trainer.domain.row_builder import StepRows, build_rows
from whetstone.config.trainer import Kind, TrainerSettings


def rewarded(kind: Kind, members: Sequence[Member], settings: TrainerSettings, unfit: Collection[str] = ()) -> StepRows:
    """Return the rows of a step of that kind, which is not sft. `unfit`: see `usable_members`."""
    if kind == "kto":
        return kto_rows(members, settings, unfit)
    if kind == "dpo":
        return dpo_rows(members, settings, unfit)
    return build_rows(
        members, settings.max_row_tokens, settings.advantage_scale, unfit, settings.baseline, settings.cut_off
    )
