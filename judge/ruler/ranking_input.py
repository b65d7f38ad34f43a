"""The input of a ranking: a group's distinct attempts, the rubric, and which judgements they need by whom. Pure.

Attempts that look the same to a judge are shown once. Everything is named by hashes of its content: the same question
has the same name in every process, and an answer to it can be reused.
"""

import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from judge.ruler.conversation import Conversation
from judge.ruler.parse import AttemptScore
from whetstone.config.rewards import JudgeSettings, RulerSettings
from whetstone.domain.sampling_share import in_share

FORM = "1"
"""Part of every name: increase it when the prompt or the reading of answers changes."""
REWARD, DRIFT = "reward", "drift"
"""The purpose of a judgement: its scores become rewards, or are compared with those that do."""


@dataclass(frozen=True, slots=True)
class PlannedJudgement:
    """One judgement that is needed."""

    place: int
    """Index among the judgements of the same attempts, from 0."""
    section: int
    """Index of the section, from 0."""
    purpose: str
    judge: str
    """The judge that is called first."""


@dataclass(frozen=True, slots=True)
class RankingInput:
    """A group in the form that judges read."""

    group_id: str
    attempts: tuple[Conversation, ...]
    """Distinct attempts, by digest: an order that does not reveal which are good."""
    trajectories: tuple[tuple[str, ...], ...]
    """For each attempt, the ids of its trajectories."""
    sections: tuple[tuple[int, ...], ...]
    """The attempts that are judged together."""
    rubric: str
    parts: Mapping[str, float]
    """The weights above 0."""
    rubric_hash: str
    """Hash of the rubric and its parts."""
    attempts_hash: str
    """Hash of the rubric and all attempts."""
    by_turn: bool = False
    """Whether the answers of attempts are scored one by one as well."""

    def judgement_id(self, slot: PlannedJudgement, judge: JudgeSettings) -> str:
        """Return the id of this group's judgement by this model in this place."""
        place = (slot.purpose, slot.judge, str(slot.place), self.cache_key(slot.section, slot.place, judge))
        return _hash(self.group_id, self.attempts_hash, *place)

    def cache_key(self, section: int, place: int, judge: JudgeSettings) -> str:
        """Return a key that is equal where an answer may be reused: the same attempts, rubric, model and place."""
        numbers = (judge.temperature, judge.context_tokens - judge.max_output_tokens, place)
        settings = (judge.model, judge.url or "", *map(str, numbers))
        return _hash(FORM, self.rubric_hash, *settings, *(_name(self.attempts[one]) for one in self.sections[section]))

    def stored(self, section: int, scored: Sequence[AttemptScore], order: Sequence[int]) -> dict[str, Any]:
        """Return the value of column `scores`.

        `scored`: by place in the section; `order`: the places in the order shown.
        """
        position = {one: shown for shown, one in enumerate(order)}
        return {
            trajectory_id: {
                "score": scored[place].score,
                "explanation": scored[place].explanation,
                "parts": scored[place].parts,
                "position": position[place],
                "attempt": _name(self.attempts[one]),
                **({"turns": scored[place].turns} if self.by_turn else {}),
            }
            for place, one in enumerate(self.sections[section])
            for trajectory_id in self.trajectories[one]
        }

    def again(self, section: int, scores: Mapping[str, Any]) -> dict[str, Any]:
        """Return the scores that another judgement gave exactly these attempts, for the trajectories here."""
        by_attempt = {entry["attempt"]: entry for entry in scores.values()}
        return {
            trajectory_id: by_attempt[_name(self.attempts[one])]
            for one in self.sections[section]
            for trajectory_id in self.trajectories[one]
        }

    def read(self, section: int, scores: Mapping[str, Any]) -> dict[int, float]:
        """Return attempt -> score of a stored judgement."""
        by_attempt = {entry["attempt"]: entry["score"] for entry in scores.values()}
        return {one: by_attempt[_name(self.attempts[one])] for one in self.sections[section]}


def material(group_id: str, conversations: Sequence[Conversation], rubric: str, ruler: RulerSettings) -> RankingInput:
    """Build the input from the group's attempts, with equal attempts merged."""
    in_order = sorted(conversations, key=attrgetter("digest", "trajectory_id"))
    by_digest = [list(alike) for _, alike in itertools.groupby(in_order, key=attrgetter("digest"))]
    attempts = tuple(alike[0] for alike in by_digest)
    parts = {name: weight for name, weight in ruler.parts.items() if weight}
    # Attempts without an answer look the same either way, but are scored otherwise.
    rubric_hash = _hash(rubric, json.dumps(parts, sort_keys=True), *(["by turn"] if ruler.by_turn else []))
    return RankingInput(
        group_id=group_id,
        attempts=attempts,
        trajectories=tuple(tuple(one.trajectory_id for one in alike) for alike in by_digest),
        sections=tuple(sections(len(by_digest), ruler.attempts_per_call)),
        rubric=rubric,
        parts=parts,
        rubric_hash=rubric_hash,
        attempts_hash=_hash(rubric_hash, *map(_name, attempts)),
        by_turn=ruler.by_turn,
    )


def sections(attempts: int, most: int) -> list[tuple[int, ...]]:
    """Return the attempts that are judged together: all of them or, of more than `most`, sections that overlap by half.

    Each section has `most` attempts, and half of them are in the next one too, the last one's in the first: a chain
    through which every attempt is compared with every other. The caller's order must not reveal which attempts are
    good.
    """
    if attempts <= most:
        return [tuple(range(attempts))]
    step = max(most // 2, 1)
    return [tuple((start + one) % attempts for one in range(most)) for start in range(0, attempts, step)]


def slots(parts: int, ruler: RulerSettings, judges: Sequence[str], group_id: str) -> list[PlannedJudgement]:
    """Return the judgements of a group with `parts` sections, by these judges in turn; the strong judge's last."""
    needed = [
        PlannedJudgement(place, section, REWARD, judges[place % len(judges)])
        for place in range(ruler.judgements)
        for section in range(parts)
    ]
    if ruler.strong is not None and in_share(f"strong {group_id}", ruler.strong_share):
        needed += [PlannedJudgement(ruler.judgements, section, DRIFT, ruler.strong) for section in range(parts)]
    return needed


def _name(attempt: Conversation) -> str:
    """Return the attempt's name, the same in every group."""
    return attempt.digest.hex()


def _hash(*parts: str) -> str:
    return hashlib.blake2b("\x00".join(parts).encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
