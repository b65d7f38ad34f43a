"""What differs between two answers, in words or lines, within bounds. Pure; knows texts only."""

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Literal

MOST_PIECES = 600
"""Words, else lines, of a text that is compared: difflib's worst case grows with their square, or worse."""
_WORD = re.compile(r"\s*\S+|\s+$")


@dataclass(frozen=True, slots=True)
class Run:
    """A piece of text: in both, only in the best one, or only in this one."""

    kind: Literal["same", "missing", "own"]
    text: str


@dataclass(frozen=True, slots=True)
class Compared:
    """A text beside the best one."""

    runs: tuple[Run, ...]
    by: Literal["words", "lines"]

    @property
    def alike(self) -> bool:
        """They say the same."""
        return all(run.kind == "same" for run in self.runs)


class Comparing:
    """Compares texts with one, as long as there is time: some answers differ in ways that take difflib long."""

    def __init__(self, best: str, most_s: float = 0.08) -> None:
        self._best = best
        self._until_s = time.perf_counter() + most_s

    def __call__(self, other: str) -> Compared | None:
        """How `other` differs from the best; None where the texts are too long, or the time is over."""
        if self._best == other:
            return Compared((Run("same", other),) if other else (), "words")
        if time.perf_counter() > self._until_s:
            return None
        words = _WORD.findall(self._best), _WORD.findall(other)
        if max(map(len, words)) <= MOST_PIECES:
            return Compared(_runs(*words), "words")
        lines = self._best.splitlines(keepends=True), other.splitlines(keepends=True)
        return Compared(_runs(*lines), "lines") if max(map(len, lines)) <= MOST_PIECES else None


def _runs(best: Sequence[str], other: Sequence[str]) -> tuple[Run, ...]:
    """Pieces only in the best come before those that stand there instead."""
    runs: list[Run] = []
    for tag, start, end, at, until in SequenceMatcher(None, best, other).get_opcodes():
        if tag == "equal":
            runs.append(Run("same", "".join(other[at:until])))
            continue
        runs += [Run("missing", "".join(best[start:end]))] if end > start else []
        runs += [Run("own", "".join(other[at:until]))] if until > at else []
    return tuple(runs)
