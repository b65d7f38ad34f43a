"""The values that a step chooses from: scored groups and their rewarded members."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby
from operator import itemgetter

from trainer.domain.advantages import uniform


@dataclass(frozen=True)
class Standing:
    """The state of a policy, as far as its next step depends on it."""

    state: str
    """recording, training or paused."""
    live_version: int
    unfinished: int | None
    """Number of the unfinished step; None if there is none."""


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
    """The end user it was for; empty if unknown."""
    prompt: str = ""
    """Hash of its first prompt; empty if unknown."""


@dataclass(frozen=True)
class Candidate:
    """One scored group."""

    group_id: str
    closed_at: datetime
    members: tuple[CandidateMember, ...]
    alone: bool = False
    """Each member is compared with a running mean, not with the other members."""
    differs_in_parts: bool = False
    """Parts of the rewards prefer some of its members, whatever the rewards do."""

    @property
    def uniform(self) -> bool:
        """Return whether all members have equal rewards (`advantages.uniform`), so that the group prefers none of them.

        Never true for a group whose members are compared with running means, or by parts of their rewards that differ.
        """
        if self.alone or self.differs_in_parts:
            return False
        return uniform([member.reward for member in self.members])

    @property
    def places(self) -> int:
        """Return its places in a step: one among the groups, or one among the singles for each member."""
        return len(self.members) if self.alone else 1

    @property
    def tokens(self) -> int:
        """Return the number of sampled tokens of all its members."""
        return sum(member.sampled_tokens for member in self.members)

    @property
    def versions(self) -> set[int]:
        """Return the versions that began or ended one of its members."""
        return {version for member in self.members for version in (member.first_version, member.last_version)}

    def fresh_tokens(self, live: int) -> int:
        """Return the number of sampled tokens in members that the live version answered from beginning to end."""
        fresh = [member for member in self.members if member.first_version == member.last_version == live]
        return sum(member.sampled_tokens for member in fresh)

    def waited_s(self, now: datetime) -> float:
        """Return the seconds since it closed."""
        return (now - self.closed_at).total_seconds()

    @staticmethod
    def grouped(
        rows: Iterable[tuple[str, datetime, str | None, str, float, int, int, int, str, str, str]],
    ) -> "list[Candidate]":
        """Build groups from rows of group id, closed_at, compared_with, and CandidateMember's fields, in order."""
        return [
            Candidate(group_id, closed_at, tuple(CandidateMember(*row[3:]) for row in members), compared == "baseline")
            for (group_id, closed_at, compared), members in groupby(rows, key=itemgetter(0, 1, 2))
        ]
