"""Decide whether a version has forgotten what the base model can do: both answer the same fixed prompts. Pure.

Each answer is right or wrong by an exact check. Of n prompts, `lost` are those that only the base model answers right,
`gained` those that only the candidate does; the others say nothing about a difference. If nothing is forgotten, a
prompt on which they differ is as likely gained as lost: the probability of so many lost ones is a tail of the binomial
distribution (McNemar, Psychometrika 12 (1947), 153, in its exact form). It is looked at LOOKS times on the way to all
prompts, and the allowed error is spread over the looks as in `trainer.domain.gate.verdict`. A candidate passes early
where a loss of `gate.retention_loss` is ruled out with probability `gate.power`: as a rule after 40 prompts.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from trainer.domain.gate.verdict import NORMAL, SPENT, Verdict
from whetstone.config.gate import GateSettings

LOOKS = (0.2, 0.4, 0.7, 1.0)
"""When the test looks, as shares of the prompts: of 200 after 40, 80, 140 and 200."""
LEAST_RIGHT = 0.2
"""A kind of prompts of which the base model answers a smaller share right is skipped: nothing there to forget."""
REFUSALS = ("can't", "cannot", "can not", "won't", "unable", "sorry", "not able", "not appropriate", "illegal")
"""One of these is in an answer that refuses."""

_WORD = re.compile(r"[^\W_]+(?:['’][^\W_]+)*")
_NUMBER = re.compile(r"-?\d+(?:[.,]\d+)*")


class Check(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What an answer must be; every field that is given must hold."""

    equals: tuple[str, ...] = ()
    """One of these, but for case and punctuation."""
    exactly: str | None = None
    """This, but for spaces and a full stop around it."""
    first: tuple[str, ...] = ()
    """Its first word is one of these."""
    contains: tuple[str, ...] = ()
    """One of these is in it, as whole words."""
    number: float | None = None
    """Its last number, which is where a worked answer ends."""
    object: dict[str, Any] | None = None
    """Its first JSON object."""
    refuses: bool | None = None
    """Whether it refuses."""

    def holds(self, answer: str) -> bool:
        """Return whether the answer is right."""
        words = [word.casefold() for word in _WORD.findall(answer)]
        return (
            (not self.equals or any(words == _words(one) for one in self.equals))
            and (self.exactly is None or answer.strip().rstrip(".") == self.exactly)
            and (not self.first or words[:1] in [_words(one) for one in self.first])
            and (not self.contains or any(_within(_words(one), words) for one in self.contains))
            and (self.number is None or _last_number(answer) == self.number)
            and (self.object is None or _first_object(answer) == self.object)
            and (self.refuses is None or any(mark in _plain(answer) for mark in REFUSALS) == self.refuses)
        )


class RetentionPrompt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One line of the suite."""

    kind: str
    prompt: str
    check: Check

    def __post_init__(self) -> None:
        if self.check == Check():
            raise ValueError("a check needs at least one of: " + ", ".join(Check.__struct_fields__))


@dataclass(frozen=True, slots=True)
class ChosenPrompts:
    """The prompts that a candidate is asked, in order."""

    places: tuple[int, ...]
    """Places in the suite."""
    skipped: Mapping[str, float]
    """Kinds that are skipped -> share that the base model answers right."""


def read_suite(lines: bytes) -> list[RetentionPrompt]:
    """Return the prompts of a file with a JSON object on each line.

    Raises:
        msgspec.ValidationError: a line is none.
    """
    return [msgspec.json.decode(line, type=RetentionPrompt) for line in lines.splitlines()]


def chosen(suite: Sequence[RetentionPrompt], base_right: Sequence[bool]) -> ChosenPrompts:
    """Return the prompts of the kinds of which the base model answers enough right."""
    shares = {kind: _share(suite, base_right, kind) for kind in dict.fromkeys(one.kind for one in suite)}
    skipped = {kind: share for kind, share in shares.items() if share < LEAST_RIGHT}
    return ChosenPrompts(tuple(place for place, one in enumerate(suite) if one.kind not in skipped), skipped)


def looks(prompts: int) -> tuple[int, ...]:
    """Return after how many of the prompts the test looks."""
    return tuple(math.ceil(share * prompts) for share in LOOKS)


def retained(base: Sequence[bool], candidate: Sequence[bool], prompts: int, gate: GateSettings) -> Verdict:
    """Compare the answers so far, at the look that is due.

    `base` and `candidate`: whether each answered right, prompt by prompt, up to a look. `prompts`: of the whole test.
    """
    n = len(candidate)
    pairs = list(zip(base, candidate, strict=True))
    lost, gained = pairs.count((True, False)), pairs.count((False, True))
    due = sum(n >= look for look in looks(prompts))
    loss = (lost - gained) / n
    error = math.sqrt(max(lost + gained - (lost - gained) ** 2 / n, 0.0)) / n
    figures = {
        "prompts": float(n),
        "base_right": sum(base) / n,
        "candidate_right": sum(candidate) / n,
        "lost": float(lost),
        "gained": float(gained),
        "chance": (chance := _tail(lost, lost + gained)),
        "largest_loss": (largest := loss + NORMAL.inv_cdf(gate.power) * error),
    }
    reads = f"{sum(candidate)} of {n} fixed prompts answered right, by the base model {sum(base)}"
    if chance < gate.error_rate * SPENT[due - 1]:
        return Verdict("reject", f"it has forgotten: {reads}", figures, due)
    if largest < gate.retention_loss or due == len(LOOKS):
        return Verdict("pass", reads, figures, due)
    return Verdict("testing", reads, figures, due)


def _tail(lost: int, differing: int) -> float:
    """Return the probability of at least `lost` heads of `differing` tosses."""
    return float(sum(math.comb(differing, heads) for heads in range(lost, differing + 1)) / 2**differing)


def _share(suite: Sequence[RetentionPrompt], right: Sequence[bool], kind: str) -> float:
    of_kind = [is_right for one, is_right in zip(suite, right, strict=True) if one.kind == kind]
    return sum(of_kind) / len(of_kind)


def _words(text: str) -> list[str]:
    return [word.casefold() for word in _WORD.findall(text)]


def _within(part: list[str], words: list[str]) -> bool:
    return any(words[start : start + len(part)] == part for start in range(len(words) - len(part) + 1))


def _plain(answer: str) -> str:
    return answer.casefold().replace("’", "'")


def _last_number(answer: str) -> float | None:
    numbers = _NUMBER.findall(answer)
    return float(numbers[-1].replace(",", "")) if numbers and numbers[-1].count(".") < 2 else None


def _first_object(answer: str) -> dict[str, Any] | None:
    start = answer.find("{")
    if start < 0:
        return None
    try:
        first, _ = json.JSONDecoder().raw_decode(answer, start)
    except (ValueError, RecursionError):
        return None
    return first if isinstance(first, dict) else None
