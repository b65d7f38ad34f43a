"""What a step takes, and which groups it may take: fresh enough, enough of them, the oldest first. Pure; no table."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby
from operator import itemgetter
from pathlib import Path

from trainer.rows import Spoken
from whetstone.ids import step_id, version_id
from whetstone.settings import TrainerSettings


@dataclass(frozen=True)
class Member:
    """One trajectory of a step."""

    trajectory_id: str
    group_id: str
    reward: float
    spoken: tuple[Spoken, ...]
    """Its trainable completions of the step's policy, in turn order."""


@dataclass(frozen=True)
class Claim:
    """A step that is ours until its lease ends."""

    project: str
    policy: str
    number: int
    attempt: int
    version_in: int
    version_out: int
    adapter_in: Path | None
    """Folder of version_in's adapter; None for the base model."""
    created_at: datetime

    @property
    def id(self) -> str:
        """The step's id."""
        return step_id(self.policy, self.number)

    @property
    def name_out(self) -> str:
        """The name of the version it makes; also the adapter's in vLLM."""
        return version_id(self.policy, self.version_out)


@dataclass(frozen=True)
class Probe:
    """What vLLM said with a new version, against the trainer's own reading of it."""

    k3: float | None
    """Mean over its tokens, in nats; None where it was not measured."""
    tokens: int
    """How many vLLM sampled for it."""


@dataclass(frozen=True)
class CandidateMember:
    """One rewarded trajectory of a scored group."""

    trajectory_id: str
    reward: float
    first_version: int
    last_version: int
    sampled_tokens: int


@dataclass(frozen=True)
class Candidate:
    """One scored group."""

    group_id: str
    closed_at: datetime
    members: tuple[CandidateMember, ...]

    @property
    def uniform(self) -> bool:
        """All its members have the same reward: it prefers nothing."""
        return len({member.reward for member in self.members}) < 2

    @property
    def tokens(self) -> int:
        """Sampled in all its members."""
        return sum(member.sampled_tokens for member in self.members)

    def fresh_tokens(self, live: int) -> int:
        """Sampled in those of its members that the live version spoke from beginning to end."""
        fresh = [member for member in self.members if member.first_version == member.last_version == live]
        return sum(member.sampled_tokens for member in fresh)

    @staticmethod
    def grouped(rows: Iterable[tuple[str, datetime, str, float, int, int, int]]) -> "list[Candidate]":
        """Groups from rows of group id and closed_at, then the fields of CandidateMember, in order."""
        return [
            Candidate(group_id, closed_at, tuple(CandidateMember(*row[2:]) for row in members))
            for (group_id, closed_at), members in groupby(rows, key=itemgetter(0, 1))
        ]


@dataclass(frozen=True)
class Choice:
    """What to do with the candidates."""

    claimed: tuple[Candidate, ...]
    """Empty while no step is due."""
    discarded: Mapping[str, tuple[str, ...]]
    """Reason -> group ids that can never be trained on any more."""
    staleness: Mapping[int, int]
    """Version -> updates between it and the live one, along the lineage."""


def lineage_of(live: int, parents: Mapping[int, int | None]) -> list[int]:
    """The live version, its parent, and so on to the base model."""
    lineage = []
    version: int | None = live
    while version is not None:
        lineage.append(version)
        version = parents[version]
    return lineage


def choose(candidates: Sequence[Candidate], lineage: Sequence[int], now: datetime, settings: TrainerSettings) -> Choice:
    """Choose the groups of the next step.

    Uniform groups are dropped before the batch (as DAPO's dynamic sampling does, arXiv 2503.14476): the better the
    policy, the more of them there are, and a step of a few groups that differ would be as large as one of many.
    A step is due with `groups_per_step` others, if `min_fresh_share` of their sampled tokens lie in trajectories that
    the live version spoke from beginning to end, or if the oldest group has waited for `fresh_waits_s`. Of more than
    `max_groups_per_step` the oldest are taken, but for the places that fresh ones need.
    """
    staleness = {version: updates for updates, version in enumerate(lineage)}
    discarded: dict[str, list[str]] = {}
    uniform: list[Candidate] = []
    usable: list[Candidate] = []
    for group in candidates:
        versions = {version for member in group.members for version in (member.first_version, member.last_version)}
        if any(version not in staleness for version in versions):
            discarded.setdefault("off_lineage", []).append(group.group_id)
        elif max(staleness[version] for version in versions) > settings.max_staleness:
            discarded.setdefault("stale", []).append(group.group_id)
        else:
            (uniform if group.uniform else usable).append(group)
    taken = _within_limit(usable, lineage[0], settings)
    if len(taken) < settings.groups_per_step or not _fresh_enough(taken, lineage[0], now, settings):
        taken = []
    # Until a step is taken a revised reward may still tell their members apart.
    over = [group.group_id for group in uniform if taken or _waited_s(group, now) >= settings.fresh_waits_s]
    if over:
        discarded["group_uniform"] = over
    return Choice(tuple(taken), {reason: tuple(ids) for reason, ids in discarded.items()}, staleness)


def _within_limit(groups: Sequence[Candidate], live: int, settings: TrainerSettings) -> list[Candidate]:
    limit = settings.max_groups_per_step
    if len(groups) <= limit:
        return list(groups)
    fresh = [group for group in groups if group.fresh_tokens(live) == group.tokens]
    reserved = fresh[: math.ceil(settings.min_fresh_share * limit)]
    older = [group for group in groups if group not in reserved][: limit - len(reserved)]
    return older + reserved


def _fresh_enough(groups: Sequence[Candidate], live: int, now: datetime, settings: TrainerSettings) -> bool:
    fresh = sum(group.fresh_tokens(live) for group in groups)
    needed = settings.min_fresh_share * sum(group.tokens for group in groups)
    return fresh >= needed or max(_waited_s(group, now) for group in groups) >= settings.fresh_waits_s


def _waited_s(group: Candidate, now: datetime) -> float:
    return (now - group.closed_at).total_seconds()
