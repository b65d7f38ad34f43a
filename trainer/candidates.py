"""What a step may take: scored groups and their rewarded members. Values only; knows no table and no clock."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby
from operator import itemgetter


@dataclass(frozen=True)
class Standing:
    """A policy, as far as its next step depends on it."""

    state: str
    """recording, training or paused."""
    live_version: int
    unfinished: int | None
    """Number of the step that is under way."""


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

    @property
    def versions(self) -> set[int]:
        """That began or ended one of its members."""
        return {version for member in self.members for version in (member.first_version, member.last_version)}

    def fresh_tokens(self, live: int) -> int:
        """Sampled in those of its members that the live version spoke from beginning to end."""
        fresh = [member for member in self.members if member.first_version == member.last_version == live]
        return sum(member.sampled_tokens for member in fresh)

    def waited_s(self, now: datetime) -> float:
        """Since it closed."""
        return (now - self.closed_at).total_seconds()

    @staticmethod
    def grouped(
        rows: Iterable[tuple[str, datetime, str | None, str, float, int, int, int, str, str]],
    ) -> "list[Candidate]":
        """Groups from rows of group id, closed_at and compared_with, then the fields of CandidateMember, in order."""
        return [
            Candidate(group_id, closed_at, tuple(CandidateMember(*row[3:]) for row in members), compared == "baseline")
            for (group_id, closed_at, compared), members in groupby(rows, key=itemgetter(0, 1, 2))
        ]
