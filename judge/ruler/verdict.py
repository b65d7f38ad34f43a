"""What several judgements of the same attempts come to: their scores, and how far the judges agree. Pure."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

SWEEPS = 500
SMALL = 1e-9
"""Offsets of overlapping sections are found by turns until none moves by more."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Of all attempts, in their order."""

    scores_G: tuple[float, ...]
    """0 to 1."""
    noise: float | None
    """By how much a judgement differs from the others beyond being stricter, as a standard deviation; None where
    attempts were judged once, or there is one attempt."""


def verdict(attempts: int, judged: Mapping[tuple[int, int], Mapping[int, float]]) -> Verdict:
    """The scores of `attempts` attempts. `judged`: by section and place, the scores of the attempts in that section.

    An attempt's score in a section is the median over the places. Sections that overlap are laid over one another by
    least squares: x_as = q_a + b_s, each section s being stricter or milder than others by b_s; Σ b_s = 0.
    """
    by_section: dict[int, list[Mapping[int, float]]] = {}
    for (section, _), scores in sorted(judged.items()):
        by_section.setdefault(section, []).append(scores)
    medians = {
        section: {one: statistics.median(scores[one] for scores in several) for one in several[0]}
        for section, several in by_section.items()
    }
    scores_G = _laid_over(attempts, list(medians.values()))
    return Verdict(tuple(min(1.0, max(0.0, score)) for score in scores_G), _noise(list(by_section.values())))


def _laid_over(attempts: int, sections: Sequence[Mapping[int, float]]) -> list[float]:
    if len(sections) == 1:
        return [sections[0][one] for one in range(attempts)]
    offsets = [0.0] * len(sections)
    for _ in range(SWEEPS):
        worth = [
            statistics.fmean(
                scores[one] - offset for scores, offset in zip(sections, offsets, strict=True) if one in scores
            )
            for one in range(attempts)
        ]
        new = [statistics.fmean(score - worth[one] for one, score in scores.items()) for scores in sections]
        middle = statistics.fmean(new)
        moved = max(abs(offset - middle - before) for offset, before in zip(new, offsets, strict=True))
        offsets = [offset - middle for offset in new]
        if moved < SMALL:
            break
    return worth


def _noise(sections: Sequence[Sequence[Mapping[int, float]]]) -> float | None:
    """Residual standard deviation of a two-way layout, attempts by judgements, over all sections.

    x_ak = q_a + b_k + e_ak; σ² = Σ e² / Σ (A - 1)(K - 1). A judgement that is stricter throughout (b_k) ranks alike.
    """
    squares, freedom = [], 0
    for several in sections:
        ids = list(several[0])
        freedom += (len(ids) - 1) * (len(several) - 1)
        means_k = [statistics.fmean(scores[one] for one in ids) for scores in several]
        whole = statistics.fmean(means_k)
        for one in ids:
            mean_a = statistics.fmean(scores[one] for scores in several)
            squares += [
                (scores[one] - mean_a - mean_k + whole) ** 2 for scores, mean_k in zip(several, means_k, strict=True)
            ]
    return math.sqrt(math.fsum(squares) / freedom) if freedom else None
