"""Combine several judgements of the same attempts: their scores, and how far the judges agree. Pure."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Verdict:
    """The combined result for all attempts, in their order."""

    scores_G: tuple[float, ...]
    """0 to 1."""
    noise: float | None
    """How much a judgement differs from the others, not counting that it is stricter overall, as a standard deviation;
    None where attempts were judged once, or there is one attempt.
    """


def verdict(attempts: int, judged: Mapping[tuple[int, int], Mapping[int, float]]) -> Verdict:
    """Return the scores of `attempts` attempts.

    `judged`: by section and place, the scores of the attempts in that section.

    An attempt's score in a section is the median over the places. Overlapping sections are aligned by least squares:
    x_as = q_a + b_s, where b_s is how strict or mild section s is; Σ b_s = 0. Every section must be connected to every
    other through attempts that both have. Scores that this moves out of 0 to 1 are moved back, all attempts together:
    only their differences matter.
    """
    by_section: dict[int, list[Mapping[int, float]]] = {}
    for (section, _), scores in sorted(judged.items()):
        by_section.setdefault(section, []).append(scores)
    medians = [
        {one: statistics.median(scores[one] for scores in several) for one in several[0]}
        for several in by_section.values()
    ]
    return Verdict(_within(_laid_over(attempts, medians)), _noise(list(by_section.values())))


def _within(scores_G: Sequence[float]) -> tuple[float, ...]:
    """Move the scores into 0 to 1 by the same amount, and scale them where their range is longer. No ties arise."""
    low, high = min(scores_G, default=0.0), max(scores_G, default=1.0)
    scale = max(high - low, 1.0)
    by = -low if low < 0.0 or scale > 1.0 else min(1.0 - high, 0.0)
    # The bounds only correct rounding.
    return tuple(min(1.0, max(0.0, (score + by) / scale)) for score in scores_G)


def _laid_over(attempts: int, sections: Sequence[Mapping[int, float]]) -> list[float]:
    read_in = [[section for section, scores in enumerate(sections) if one in scores] for one in range(attempts)]
    offsets = _offsets(sections, read_in)
    return [
        statistics.fmean(sections[section][one] - offsets[section] for section in read_in[one])
        for one in range(attempts)
    ]


def _offsets(sections: Sequence[Mapping[int, float]], read_in: Sequence[Sequence[int]]) -> list[float]:
    """Return b_s. `read_in`: for each attempt a, its n_a sections.

    With q_a eliminated, Σ_{a in s} (b_s - Σ_{r with a} b_r / n_a) = Σ_{a in s} (x_as - Σ_{r with a} x_ar / n_a). These
    leave Σ b free; Σ b = 0 is added to each of them, which makes their matrix positive definite.
    """
    matrix = [[1.0] * len(sections) for _ in sections]
    right = [0.0] * len(sections)
    for one, among in enumerate(read_in):
        mean = statistics.fmean(sections[section][one] for section in among)
        for section in among:
            matrix[section][section] += 1
            right[section] += sections[section][one] - mean
            for other in among:
                matrix[section][other] -= 1 / len(among)
    return _solved(matrix, right)


def _solved(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Solve matrix·x = right by elimination, in place; the matrix is positive definite, so no rows are exchanged."""
    for pivot, row in enumerate(matrix):
        for below in range(pivot + 1, len(matrix)):
            if times := matrix[below][pivot] / row[pivot]:
                matrix[below] = [ours - times * theirs for ours, theirs in zip(matrix[below], row, strict=True)]
                right[below] -= times * right[pivot]
    solved = [0.0] * len(right)
    for place in reversed(range(len(right))):
        known = math.fsum(matrix[place][later] * solved[later] for later in range(place + 1, len(right)))
        solved[place] = (right[place] - known) / matrix[place][place]
    return solved


def _noise(sections: Sequence[Sequence[Mapping[int, float]]]) -> float | None:
    """Return the residual standard deviation of a two-way layout, attempts by judgements, over all sections.

    x_ak = q_a + b_k + e_ak; σ² = Σ e² / Σ (A - 1)(K - 1). A judgement that is stricter overall (b_k) ranks alike.
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
