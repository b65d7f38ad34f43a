"""Plan the next step as a real step would, without taking it. Only reads, and needs no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Connection

from trainer.domain.claims import Member
from trainer.domain.eligible_groups import Standing
from trainer.domain.row_builder import StepRows
from trainer.domain.rows import Row
from trainer.domain.triggers import choose
from trainer.step.rewarded import rewarded
from trainer.store.baselines import read_comparison
from trainer.store.eligible_groups import policy_names, read_candidates, read_lineage, read_live_since, read_standing
from trainer.store.members import read_candidate_members
from trainer.store.parts import with_parts
from whetstone.config.rewards import RewardSettings
from whetstone.config.settings import SettingsError
from whetstone.config.trainer import TrainerSettings


@dataclass(frozen=True)
class PlannedTrajectory:
    """One trajectory that the step would take."""

    group_id: str
    trajectory_id: str
    reward: float
    baseline: float | None
    """What its reward is compared with: its group's mean, or a running mean; None where it teaches nothing. Where
    others met the same prompt and they are compared by state, it is their mean instead.
    """
    advantage: float | None
    """Mean over its sampled tokens."""
    completions: int
    """Trainable completions; the number of rows before merging."""
    rows: int
    """Number of rows after merging."""
    read_tokens: int
    """Tokens in its rows, each counted once."""
    sampled_tokens: int
    """Tokens of these that are trained."""
    versions: tuple[int, ...]
    """Versions that sampled its tokens."""
    left_out: str | None
    """Why it teaches nothing; None where it does."""


@dataclass(frozen=True)
class DryRun:
    """A step that is not taken."""

    policy: str
    version_in: int
    why_not_due: str | None
    """None where the step is due by itself. Else `trajectories` are what a step requested by hand would take."""
    trajectories: tuple[PlannedTrajectory, ...]
    discarded: Mapping[str, tuple[str, ...]]
    """Reason -> groups that it would discard."""
    rows: tuple[Row, ...]


def dry_run(
    connection: Connection,
    project: str,
    policy: str,
    settings: TrainerSettings,
    now: datetime,
    learning: RewardSettings | None = None,
) -> DryRun:
    """Return the policy's next step as it would be now. `learning`: as in `Store.claim`.

    Raises:
        SettingsError: there is no such policy.
    """
    standing = read_standing(connection, project, policy)
    if standing is None:
        there = ", ".join(policy_names(connection, project)) or "none yet"
        raise SettingsError(f"there is no policy {policy!r}; there are: {there}")
    candidates = with_parts(connection, project, read_candidates(connection, project, policy), learning)
    lineage = read_lineage(connection, project, policy, standing.live_version)
    live_since = read_live_since(connection, project, policy, standing.live_version)
    choice = choose(candidates, lineage, now, settings, live_since=live_since)
    why_not_due = _why_blocked(standing) or choice.waits_for
    if why_not_due is not None:
        choice = choose(candidates, lineage, now, settings, by_hand=True)
    singles = [member for group in choice.taken if group.alone for member in group.members]
    _, compared = read_comparison(connection, project, policy, singles, settings)
    members = read_candidate_members(connection, project, policy, choice.taken, compared.baselines, learning)
    taught = rewarded(settings.objective, members, settings)
    return DryRun(
        policy=policy,
        version_in=standing.live_version,
        why_not_due=why_not_due,
        trajectories=tuple(_planned(member, taught) for member in members),
        discarded=choice.discarded,
        rows=taught.rows,
    )


def _why_blocked(standing: Standing) -> str | None:
    """Return why no step is taken, independent of the available groups; None where one could be."""
    if standing.state == "paused":
        return "the policy is paused: no step is taken, and none can be requested"
    if standing.unfinished is not None:
        return f"step {standing.unfinished} is under way"
    if standing.state != "training":
        return "the policy only records: `whetstone policies train on` lets it train, `whetstone step` takes one step"
    return None


def _planned(member: Member, taught: StepRows) -> PlannedTrajectory:
    name = member.trajectory_id
    rows = [row for row in taught.rows if row.trajectory_id == name]
    return PlannedTrajectory(
        group_id=member.group_id,
        trajectory_id=name,
        reward=member.reward,
        baseline=taught.baselines.get(name),
        advantage=taught.advantages.get(name),
        completions=sum(bool(completion.token_ids) for completion in member.completions),
        rows=len(rows),
        read_tokens=sum(len(row.token_ids_T) for row in rows),
        sampled_tokens=sum(sum(row.sampled_T) for row in rows),
        versions=tuple(sorted({completion.version for completion in member.completions})),
        left_out=taught.left_out.get(name),
    )
