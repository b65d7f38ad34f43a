"""Leave out of a step's rows what constraints decided, once it is known what they allowed at each token. Pure."""

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from trainer.domain.constraints import ConstrainedSpan
from trainer.domain.rows import Row

LEAST_MASS = 0.9
"""A grammar decides a token where it allowed less than this share of the probability.

Above it, the error of the gradient that comes from not knowing the support is at most 2 (1 - 0.9) |A| per token, in the
L1 norm over logits: docs/training.md.
"""
LEAST_LOG_MASS = math.log(LEAST_MASS)

SpanKey = tuple[int, int]
"""Position of a row among the step's rows, and where the constrained completion begins in it."""


@dataclass(frozen=True, slots=True)
class SpanMeasure:
    """What was allowed at each of the N tokens of a constrained completion."""

    decided_N: tuple[bool, ...]
    logprobs_N: tuple[float, ...] = ()
    """Nats, of the trainer with the version that sampled them, without a grammar; empty if there is no grammar."""
    supports: bytes = b""
    """Of the tokens that are not decided."""
    disagreements: int = 0
    """Tokens that were sampled, but lie outside of the support as the trainer computes it."""


@dataclass(frozen=True, slots=True)
class MeasuredRows:
    """The rows of a step without what constraints decided."""

    rows: tuple[Row, ...]
    decided: Mapping[str, int]
    """Number of decided tokens by completion, of all constrained completions that could be measured."""
    left_out: frozenset[str]
    """Trajectories of which no token is left, or that cannot be measured."""
    tokens: int = 0
    """Constrained tokens that were measured."""
    disagreements: int = 0
    """See `SpanMeasure`."""

    @property
    def decided_share(self) -> float | None:
        """Share of the sampled tokens that constraints decided, of all that could be measured or needed not; None
        without any."""
        decided = sum(self.decided.values())
        sampled = decided + sum(sum(row.sampled_T) for row in self.rows)
        return decided / sampled if sampled else None


def static_measures(rows: Sequence[Row], model_ends: Collection[int]) -> dict[SpanKey, SpanMeasure]:
    """Return the measures of the completions that were constrained by nothing but penalties, biases and lists of ids.

    `model_ends`: the ids that end an answer of the model.
    """
    return {
        (place, span.start): SpanMeasure(decided_by_ids(row, span, model_ends))
        for place, row in enumerate(rows)
        for span in row.constrained
        if not span.constraints.needs_weights
    }


def decided_by_ids(row: Row, span: ConstrainedSpan, model_ends: Collection[int]) -> tuple[bool, ...]:
    """Return for each token of the completion whether lists of ids alone decided it."""
    return span.constraints.decided_by_ids(row.token_ids_T[span.start : span.end], model_ends)


def without_decided(rows: Sequence[Row], measures: Mapping[SpanKey, SpanMeasure]) -> MeasuredRows:
    """Return the rows with their decided tokens turned into prompt.

    So these count nowhere: not in a loss, a mask, a ratio of a whole row, a figure or a normaliser. A trajectory is
    left out if one of its constrained completions has no measure, or if none of its tokens is left: leaving it out
    because *few* are left would be a choice by what was sampled, and would bias the step.
    """
    unmeasured = {
        row.trajectory_id
        for place, row in enumerate(rows)
        if any((place, span.start) not in measures for span in row.constrained)
    }
    left: list[Row] = []
    decided: Counter[str] = Counter()
    tokens = disagreements = 0
    for place, row in enumerate(rows):
        if row.trajectory_id in unmeasured:
            continue
        for span in row.constrained:
            measure = measures[place, span.start]
            decided[span.completion_id] += sum(measure.decided_N)
            tokens += len(measure.decided_N)
            disagreements += measure.disagreements
        left.append(_measured(row, [measures[place, span.start] for span in row.constrained]))
    weighed = {row.trajectory_id for row in left if any(row.sampled_T)}
    return MeasuredRows(
        rows=tuple(row for row in left if any(row.sampled_T)),
        decided=dict(decided),
        left_out=frozenset(row.trajectory_id for row in rows) - weighed,
        tokens=tokens,
        disagreements=disagreements,
    )


def versions_to_measure(rows: Sequence[Row]) -> frozenset[int]:
    """Return the versions whose weights are needed to know what constraints allowed."""
    return frozenset(version for _, _, version in spans_to_measure(rows))


def spans_to_measure(rows: Sequence[Row]) -> Iterator[tuple[int, ConstrainedSpan, int]]:
    """Yield position of the row, completion, and version that sampled it, where only its weights tell."""
    for place, row in enumerate(rows):
        for span in row.constrained:
            if span.constraints.needs_weights:
                yield place, span, row.versions_T[span.start]


def _measured(row: Row, measures: Sequence[SpanMeasure]) -> Row:
    if not row.constrained:
        return row
    sampled, logprobs, advantages = list(row.sampled_T), list(row.inference_logprobs_T), list(row.advantages_T)
    spans = []
    for span, measure in zip(row.constrained, measures, strict=True):
        sampled[span.start : span.end] = [not decided for decided in measure.decided_N]
        for place, decided in enumerate(measure.decided_N, span.start):
            if decided:
                advantages[place] = 0.0
        if measure.logprobs_N:
            logprobs[span.start : span.end] = measure.logprobs_N
        spans.append(replace(span, measured=True, supports=measure.supports))
    return replace(
        row,
        sampled_T=tuple(sampled),
        inference_logprobs_T=tuple(logprobs),
        advantages_T=tuple(advantages),
        constrained=tuple(spans),
    )
