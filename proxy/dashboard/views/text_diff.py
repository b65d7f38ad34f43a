"""Compare two answers by words or lines, within bounds. Pure."""

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Literal

MOST_PIECES = 600
"""Most words, or lines, of a text that is compared: difflib's worst case grows quadratically or faster."""
_WORD = re.compile(r"\s*\S+|\s+$")


@dataclass(frozen=True, slots=True)
class Run:
    """A piece of text: in both texts, only in the best one, or only in this one."""

    kind: Literal["same", "missing", "own"]
    text: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """A text compared with the best one."""

    runs: tuple[Run, ...]
    by: Literal["words", "lines"]

    @property
    def alike(self) -> bool:
        """Return whether the texts are equal."""
        return all(run.kind == "same" for run in self.runs)


class Comparer:
    """Compares texts with the best one, within a total time: difflib takes long for some differences."""

    def __init__(self, best: str, most_s: float = 0.08) -> None:
        self._best = best
        self._until_s = time.perf_counter() + most_s

    def __call__(self, other: str) -> Comparison | None:
        """Return how `other` differs from the best text; None if the texts are too long, or the time is over."""
        if self._best == other:
            return Comparison((Run("same", other),) if other else (), "words")
        if time.perf_counter() > self._until_s:
            return None
        words = _WORD.findall(self._best), _WORD.findall(other)
        if max(map(len, words)) <= MOST_PIECES:
            return Comparison(_runs(*words), "words")
        lines = self._best.splitlines(keepends=True), other.splitlines(keepends=True)
        return Comparison(_runs(*lines), "lines") if max(map(len, lines)) <= MOST_PIECES else None


def _runs(best: Sequence[str], other: Sequence[str]) -> tuple[Run, ...]:
    """Return the runs; a piece only in the best text comes before the piece that replaces it."""
    runs: list[Run] = []
    for tag, start, end, at, until in SequenceMatcher(None, best, other).get_opcodes():
        if tag == "equal":
            runs.append(Run("same", "".join(other[at:until])))
            continue
        runs += [Run("missing", "".join(best[start:end]))] if end > start else []
        runs += [Run("own", "".join(other[at:until]))] if until > at else []
    return tuple(runs)
