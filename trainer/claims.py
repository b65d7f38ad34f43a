"""What a step takes, and which groups it may take: fresh enough, enough of them, the oldest first. Pure; no table."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import accumulate, groupby
from operator import itemgetter
from pathlib import Path

from trainer.rows import Spoken
from whetstone.ids import step_id, version_id
from whetstone.reasons import WhyNotTrained
from whetstone.settings import TrainerSettings

SINGLES_LIMIT = 4
"""A step takes at most so many times the singles that make one due: enough to catch up, and a bound on its length."""


@dataclass(frozen=True)
class Member:
    """One trajectory of a step."""

    trajectory_id: str
    group_id: str
    reward: float
    spoken: tuple[Spoken, ...]
    """Its trainable completions of the step's policy, in turn order."""
    silent: str | None = None
    """Why none of its completions can be trained on; None where one can."""
    seed: tuple[int, int] | None = None
    """Seed that the first of `spoken` was asked with, and which of the call's choices it is; None without a seed."""
    alone: bool = False
    """It is compared with its baseline, not with its group."""
    baseline: float | None = None
    """None where nothing was there to make one of, and where it is not alone."""


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
    baselined: int
    """Of its trajectories, those compared with a running mean."""

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
    task: str = ""
    """The app's label; empty without one."""
    end_user: str = ""
    """Whom it was for; empty where nobody said."""


@dataclass(frozen=True)
class Candidate:
    """One scored group."""

    group_id: str
    closed_at: datetime
    members: tuple[CandidateMember, ...]
    alone: bool = False
    """Its members are compared with running means, each for itself, not with one another."""

    @property
    def uniform(self) -> bool:
        """All its members, compared with one another, have the same reward: it prefers nothing."""
        return not self.alone and len({member.reward for member in self.members}) < 2

    @property
    def places(self) -> int:
        """How much of a step it takes: a place among the groups, or one among the singles for each member."""
        return len(self.members) if self.alone else 1

    @property
    def tokens(self) -> int:
        """Sampled in all its members."""
        return sum(member.sampled_tokens for member in self.members)

    def fresh_tokens(self, live: int) -> int:
        """Sampled in those of its members that the live version spoke from beginning to end."""
        fresh = [member for member in self.members if member.first_version == member.last_version == live]
        return sum(member.sampled_tokens for member in fresh)

    @staticmethod
    def grouped(
        rows: Iterable[tuple[str, datetime, str | None, str, float, int, int, int, str, str]],
    ) -> "list[Candidate]":
        """Groups from rows of group id, closed_at and compared_with, then the fields of CandidateMember, in order."""
        return [
            Candidate(group_id, closed_at, tuple(CandidateMember(*row[3:]) for row in members), compared == "baseline")
            for (group_id, closed_at, compared), members in groupby(rows, key=itemgetter(0, 1, 2))
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


def why_silent(policy: str, completions: Iterable[tuple[str, str | None]]) -> str:
    """Why a trajectory of which no completion can be trained on is not: what most of them say, of equals the first.

    `completions` are policy and own reason of each, in turn order. One without a reason of its own lacks its token ids
    (rows of other programs and earlier versions). What other policies said counts only where this one said nothing.
    """
    told = list(completions)
    own = [reason or WhyNotTrained.NO_TOKEN_IDS for name, reason in told if name == policy]
    if own:
        return str(Counter(own).most_common(1)[0][0])
    return WhyNotTrained.OTHER_POLICY if told else WhyNotTrained.EMPTY


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
    A step is due with `groups_per_step` others, or `singles_per_step` trajectories that are alone, or parts of both
    that make a whole, if `min_fresh_share` of their sampled tokens lie in trajectories that the live version spoke
    from beginning to end, or if the oldest group has waited for `fresh_waits_s`. Of more than `max_groups_per_step`
    groups, or SINGLES_LIMIT times `singles_per_step` singles, the oldest are taken, but for the places that fresh ones
    need.
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
    taken = _within_limits(usable, lineage[0], settings)
    if not _enough(taken, settings) or not _fresh_enough(taken, lineage[0], now, settings):
        taken = []
    # Until a step is taken a revised reward may still tell their members apart.
    over = [group.group_id for group in uniform if taken or _waited_s(group, now) >= settings.fresh_waits_s]
    if over:
        discarded["group_uniform"] = over
    return Choice(tuple(taken), {reason: tuple(ids) for reason, ids in discarded.items()}, staleness)


def _within_limits(candidates: Sequence[Candidate], live: int, settings: TrainerSettings) -> list[Candidate]:
    groups = [candidate for candidate in candidates if not candidate.alone]
    singles = [candidate for candidate in candidates if candidate.alone]
    share = settings.min_fresh_share
    return [
        *_within(groups, settings.max_groups_per_step, live, share),
        *_within(singles, SINGLES_LIMIT * settings.singles_per_step, live, share),
    ]


def _within(candidates: Sequence[Candidate], limit: int, live: int, fresh_share: float) -> list[Candidate]:
    """As many as `limit` places hold: the oldest, but for the share of places kept for fresh ones."""
    if sum(candidate.places for candidate in candidates) <= limit:
        return list(candidates)
    fresh = [candidate for candidate in candidates if candidate.fresh_tokens(live) == candidate.tokens]
    reserved = _first(fresh, math.ceil(fresh_share * limit))
    names = {candidate.group_id for candidate in reserved}
    left = limit - sum(candidate.places for candidate in reserved)
    return _first([candidate for candidate in candidates if candidate.group_id not in names], left) + reserved


def _first(candidates: Sequence[Candidate], places: int) -> list[Candidate]:
    ends = accumulate(candidate.places for candidate in candidates)
    return [candidate for candidate, end in zip(candidates, ends, strict=True) if end <= places]


def _enough(taken: Sequence[Candidate], settings: TrainerSettings) -> bool:
    """Whether groups / groups_per_step + singles / singles_per_step reaches 1; in whole numbers, so that it can."""
    groups = sum(candidate.places for candidate in taken if not candidate.alone)
    singles = sum(candidate.places for candidate in taken if candidate.alone)
    whole = settings.groups_per_step * settings.singles_per_step
    return groups * settings.singles_per_step + singles * settings.groups_per_step >= whole


def _fresh_enough(groups: Sequence[Candidate], live: int, now: datetime, settings: TrainerSettings) -> bool:
    fresh = sum(group.fresh_tokens(live) for group in groups)
    needed = settings.min_fresh_share * sum(group.tokens for group in groups)
    return fresh >= needed or max(_waited_s(group, now) for group in groups) >= settings.fresh_waits_s


def _waited_s(group: Candidate, now: datetime) -> float:
    return (now - group.closed_at).total_seconds()
