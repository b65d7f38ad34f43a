"""Parse and check a judge's answer. Pure.

Nothing is guessed and nothing repaired: scores on the wrong attempts would be trained on.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from judge.errors import JudgeError

EXPLANATION_CHARS = 2_000
"""Longest explanation that is stored."""
QUOTED_CHARS = 40

_FENCED = re.compile(r"```json[ \t]*\r?\n(.*)```", re.DOTALL)
_SPACE = " \t\r\n"


class NotAnswered(JudgeError):
    """The answer cannot be used; the message gives the reason, also to the judge."""


@dataclass(frozen=True, slots=True)
class AttemptScore:
    """A judge's result for one attempt."""

    score: float
    """0 to 1."""
    explanation: str
    parts: dict[str, float] | None
    """0 to 1 each; None where the judge gives one score."""
    turns: tuple[float, ...] | None = None
    """0 to 1 for each answer of the attempt; None where answers are not scored one by one."""


def read(
    text: str, ids: Sequence[str], parts: Mapping[str, float], answers: Sequence[int] | None = None
) -> list[AttemptScore]:
    """Return the scores in `text`, in the order of `ids`.

    `text` is the requested JSON object, alone or in one ```json fence. `parts`: weights above 0 by name; where there
    are any, an attempt's score is Σ weight · part / Σ weight. `answers`: how many answers each attempt has, where they
    are scored one by one. Other fields are ignored.

    Raises:
        NotAnswered: it is anything else, or does not score each id exactly once by numbers from 0 to 1.
    """
    answer = _parsed(text)
    if not isinstance(answer, dict) or not isinstance(answer.get("scores"), list):
        raise NotAnswered('the answer is no object with a list "scores"')
    counts = None if answers is None else dict(zip(ids, answers, strict=True))
    scored = [_scored(item, ids, parts, counts) for item in answer["scores"]]
    if twice := [one for one, times in Counter(one for one, _ in scored).items() if times > 1]:
        raise NotAnswered(f"more than one score for {', '.join(twice)}")
    by_id = dict(scored)
    if missing := [one for one in ids if one not in by_id]:
        raise NotAnswered(f"no score for {', '.join(missing)}")
    return [by_id[one] for one in ids]


def _parsed(text: str) -> Any:
    stripped = text.strip(_SPACE)
    fenced = _FENCED.fullmatch(stripped)
    try:
        return json.loads(fenced[1] if fenced else stripped, object_pairs_hook=_object, parse_constant=_no_number)
    except RecursionError:
        raise NotAnswered("the answer is nested too deeply") from None
    except ValueError:
        raise NotAnswered("the answer is not one JSON object and nothing else") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build an object and refuse duplicate keys: it would be unclear which of two values counts."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        twice = next(key for key, times in Counter(key for key, _ in pairs).items() if times > 1)
        raise NotAnswered(f"an object has the key {_quoted(twice)} more than once")
    return fields


def _no_number(name: str) -> float:
    raise NotAnswered(f"{name} is no number from 0 to 1")


def _scored(
    item: Any, ids: Sequence[str], weights: Mapping[str, float], answers: Mapping[str, int] | None
) -> tuple[str, AttemptScore]:
    """Return the attempt's id and score."""
    if not isinstance(item, dict):
        raise NotAnswered('an item of "scores" is no object')
    attempt = item.get("id")
    if not isinstance(attempt, str):
        raise NotAnswered('an item of "scores" has no "id"')
    if attempt not in ids:
        raise NotAnswered(f"there is no attempt {_quoted(attempt)}")
    explanation = item.get("explanation")
    if not isinstance(explanation, str):
        raise NotAnswered(f"{attempt} has no explanation")
    # No database stores a lone surrogate, and PostgreSQL stores no NUL.
    stored = explanation[:EXPLANATION_CHARS].encode("utf-8", "replace").decode().replace("\x00", "\ufffd")
    turns = None if answers is None else _turns(item, attempt, answers[attempt])
    if not weights:
        return attempt, AttemptScore(_number(item, "score", attempt), stored, None, turns)
    values = item.get("parts")
    if not isinstance(values, dict):
        raise NotAnswered(f"{attempt} has no parts")
    if unknown := [name for name in values if name not in weights]:
        raise NotAnswered(f"{attempt} has a part {_quoted(unknown[0])}, which was not asked for")
    parts = {name: _number(values, name, attempt) for name in weights}
    total = math.fsum(weight * parts[name] for name, weight in weights.items()) / math.fsum(weights.values())
    return attempt, AttemptScore(total, stored, parts, turns)


def _turns(item: dict[str, Any], attempt: str, answers: int) -> tuple[float, ...]:
    values = item.get("turns")
    if not isinstance(values, list):
        raise NotAnswered(f"{attempt} has no list of turns")
    if len(values) != answers:
        raise NotAnswered(f"{attempt} has {len(values)} turns; its answers have the numbers 1 to {answers}")
    return tuple(_number({"a turn": value}, "a turn", attempt) for value in values)


def _number(fields: dict[str, Any], name: str, attempt: str) -> float:
    if name not in fields:
        raise NotAnswered(f"{attempt} has no {name}")
    number = fields[name]
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise NotAnswered(f"{attempt}: {name} is no number")
    if not 0 <= number <= 1:
        raise NotAnswered(f"{attempt}: {name} is {str(number)[:24]}, which is not from 0 to 1")
    return number + 0.0


def _quoted(text: str) -> str:
    return f"{text[:QUOTED_CHARS]!a}"
