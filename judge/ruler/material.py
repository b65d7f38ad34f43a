"""What there is to rank of a group: its distinct attempts, what to go by, and the judgements they need. Pure.

Attempts that a judge could not tell apart are shown to it once. Everything is named by hashes of what it is about: the
same question has the same name, whoever works it out, and an answer to it can be used again.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from judge.ruler import panel
from judge.ruler.answer import Scored
from judge.ruler.conversation import Conversation
from judge.ruler.panel import Slot
from whetstone.worth import JudgeSettings, RulerSettings

FORM = "1"
"""Part of every name: another prompt or another reading of answers makes other names."""


@dataclass(frozen=True, slots=True)
class Material:
    """A group as judges read it."""

    group_id: str
    attempts: tuple[Conversation, ...]
    """Distinct ones, by digest: an order that says nothing of who is good."""
    trajectories: tuple[tuple[str, ...], ...]
    """Of each attempt, whose it is."""
    sections: tuple[tuple[int, ...], ...]
    """The attempts that are read together."""
    rubric: str
    parts: Mapping[str, float]
    """The weights above 0."""
    rubric_hash: str
    """Of what judges are told to go by."""
    attempts_hash: str
    """Of all there is to judge, and by what."""

    def judgement_id(self, slot: Slot, judge: JudgeSettings) -> str:
        """The one judgement of this group, by this model, in this place."""
        place = (slot.purpose, slot.judge, str(slot.place), self.cache_key(slot.section, slot.place, judge))
        return _hash(self.group_id, self.attempts_hash, *place)

    def cache_key(self, section: int, place: int, judge: JudgeSettings) -> str:
        """Equal where an answer may be used again: the same attempts, rubric, model and place."""
        room = str(judge.context_tokens - judge.max_output_tokens)
        asked = (judge.model, judge.url or "", str(judge.temperature), room, str(place))
        attempts = (_name(self.attempts[one]) for one in self.sections[section])
        return _hash(FORM, self.rubric_hash, *asked, *attempts)

    def stored(self, section: int, scored: Sequence[Scored], order: Sequence[int]) -> dict[str, Any]:
        """What column `scores` holds. `scored`: by place in the section; `order`: the places as they were shown."""
        position = {one: shown for shown, one in enumerate(order)}
        return {
            trajectory_id: {
                "score": scored[place].score,
                "explanation": scored[place].explanation,
                "parts": scored[place].parts,
                "position": position[place],
                "attempt": _name(self.attempts[one]),
            }
            for place, one in enumerate(self.sections[section])
            for trajectory_id in self.trajectories[one]
        }

    def again(self, section: int, scores: Mapping[str, Any]) -> dict[str, Any]:
        """The scores that another judgement gave these very attempts, for the trajectories here."""
        by_attempt = {said["attempt"]: said for said in scores.values()}
        return {
            trajectory_id: by_attempt[_name(self.attempts[one])]
            for one in self.sections[section]
            for trajectory_id in self.trajectories[one]
        }

    def read(self, section: int, scores: Mapping[str, Any]) -> dict[int, float]:
        """Attempt to score, of a stored judgement."""
        by_attempt = {said["attempt"]: said["score"] for said in scores.values()}
        return {one: by_attempt[_name(self.attempts[one])] for one in self.sections[section]}


def material(group_id: str, conversations: Sequence[Conversation], rubric: str, ruler: RulerSettings) -> Material:
    """The group's attempts, those that are alike taken together."""
    by_digest: dict[bytes, list[Conversation]] = {}
    for one in sorted(conversations, key=lambda one: (one.digest, one.trajectory_id)):
        by_digest.setdefault(one.digest, []).append(one)
    attempts = tuple(alike[0] for alike in by_digest.values())
    parts = {name: weight for name, weight in ruler.parts.items() if weight}
    rubric_hash = _hash(rubric, json.dumps(parts, sort_keys=True))
    return Material(
        group_id=group_id,
        attempts=attempts,
        trajectories=tuple(tuple(one.trajectory_id for one in alike) for alike in by_digest.values()),
        sections=tuple(panel.sections(len(by_digest), ruler.attempts_per_call)),
        rubric=rubric,
        parts=parts,
        rubric_hash=rubric_hash,
        attempts_hash=_hash(rubric_hash, *map(_name, attempts)),
    )


def _name(attempt: Conversation) -> str:
    """What it is called wherever it occurs."""
    return attempt.digest.hex()


def _hash(*parts: str) -> str:
    return hashlib.blake2b("\x00".join(parts).encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
