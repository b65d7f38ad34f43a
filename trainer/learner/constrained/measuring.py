"""Measure, with the weights that sampled them, what was allowed at tokens that a truncation or a grammar constrained.

One forward pass without gradient over the rows that have such tokens.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trainer.domain.constraints import ConstrainedSpan, Constraints
from trainer.domain.measured import LEAST_LOG_MASS, SpanKey, SpanMeasure, decided_by_ids
from trainer.domain.rows import Row
from trainer.learner.constrained import supports
from trainer.learner.constrained.bending import chunks
from trainer.learner.constrained.head import bent_logits, chunk_rows
from trainer.learner.forward import Reading
from trainer.learner.micro_batches import MicroBatch


@dataclass(frozen=True, slots=True)
class _Part:
    """Figures of some tokens of one completion, in order."""

    decided_C: npt.NDArray[np.bool_]
    logprobs_C: npt.NDArray[np.float32]
    supports_CB: npt.NDArray[np.uint8] | None
    disagreements: int


@torch.no_grad()
def measure(
    reading: Reading,
    rows: Sequence[Row],
    spans: Sequence[tuple[int, ConstrainedSpan]],
    on_progress: Callable[[int, int], None] | None = None,
) -> dict[SpanKey, SpanMeasure]:
    """Return what was allowed at each token of `spans`: (position of the row, completion), in the order of rows.

    All of them were sampled by the version whose weights `reading` holds. `on_progress` is called with (micro-batches
    done, micro-batches in all) after each.
    """
    of_row: defaultdict[int, list[ConstrainedSpan]] = defaultdict(list)
    for place, span in spans:
        of_row[place].append(span)
    places = list(of_row)
    to_read = [_only(rows[place], of_row[place]) for place in places]
    measures: dict[SpanKey, SpanMeasure] = {}
    rounds = cast(Tensor, reading.head.weight).dtype.itemsize < torch.float32.itemsize
    plan = reading.plan(to_read)
    for done, positions in enumerate(plan, 1):
        batch = reading.batch([to_read[at] for at in positions], [0.0] * len(positions))
        keys = [(places[at], span) for at in positions for span in of_row[places[at]]]
        parts = reading.through_head(batch, partial(_parts, batch=batch, rounds=rounds))
        for (place, span), own in zip(keys, parts, strict=True):
            measures[place, span.start] = _joined(own, decided_by_ids(rows[place], span, reading.ends))
        if on_progress:
            on_progress(done, len(plan))
    return measures


def _parts(hidden_SH: Tensor, head: torch.nn.Module, *, batch: MicroBatch, rounds: bool) -> list[list[_Part]]:
    """Measure the tokens of each completion. `rounds`: whether the server rounds its logits."""
    parts: list[list[_Part]] = [[] for _ in batch.constrained]
    owner = 0
    for chunk in chunks(batch.constrained, chunk_rows(head)):
        at_C = torch.cat([tokens.at_C for tokens in chunk])
        sampled = (hidden_SH[at_C], head, batch.temperatures_S[at_C], chunk)
        counts = [len(tokens.at_C) for tokens in chunk]
        z_CV = bent_logits(*sampled)
        served_z_CV = bent_logits(*sampled, as_served=True) if rounds else z_CV
        for tokens, own_CV, served_CV in zip(chunk, z_CV.split(counts), served_z_CV.split(counts), strict=True):
            ids_C, served_C = batch.token_ids_S[tokens.at_C], batch.inference_logprobs_S[tokens.at_C]
            parts[owner].append(_part(own_CV, served_CV, tokens.constraints, ids_C, served_C))
            # Chunks keep the order of completions, and may cut one of them.
            if tokens.at_C[-1] == batch.constrained[owner].at_C[-1]:
                owner += 1
    return parts


def _only(row: Row, spans: Sequence[ConstrainedSpan]) -> Row:
    """Return the row with only the tokens of `spans` as sampled tokens."""
    sampled_T = np.zeros(len(row.token_ids_T), dtype=bool)
    for span in spans:
        sampled_T[span.start : span.end] = True
    return replace(row, sampled_T=tuple(sampled_T.tolist()), constrained=tuple(spans))


def _part(z_CV: Tensor, served_z_CV: Tensor, constraints: Constraints, ids_C: Tensor, served_C: Tensor) -> _Part:
    """Measure some tokens of a completion, from their logits and these as they were served.

    `served_C`: the logprobs that the server returned.
    """
    at_C1 = ids_C[:, None]
    if constraints.grammar is not None:
        # What it allowed is not known, but its mass is: μ without the grammar over μ with it, the same for all tokens
        # that it allowed. A truncation beside it acts on what the grammar left; the mass is then that of both.
        log_mass_C = served_z_CV.log_softmax(-1).gather(-1, at_C1)[:, 0] - served_C
        logprobs_C = z_CV.log_softmax(-1).gather(-1, at_C1)[:, 0]
        return _Part((log_mass_C < LEAST_LOG_MASS).cpu().numpy(), logprobs_C.float().cpu().numpy(), None, 0)
    support_CV = supports.support(served_z_CV, constraints)
    outside = int((~support_CV.gather(-1, at_C1)).sum().item())
    support_CV.scatter_(-1, at_C1, True)
    decided_C = support_CV.sum(-1) <= 1
    return _Part(decided_C.cpu().numpy(), np.empty(0, np.float32), supports.bits(support_CV), outside)


def _joined(parts: Sequence[_Part], decided_by_ids: Sequence[bool]) -> SpanMeasure:
    decided_N = np.concatenate([part.decided_C for part in parts]) | np.asarray(decided_by_ids)
    bits = [part.supports_CB for part in parts if part.supports_CB is not None]
    return SpanMeasure(
        decided_N=tuple(decided_N.tolist()),
        logprobs_N=tuple(np.concatenate([part.logprobs_C for part in parts]).tolist()),
        supports=supports.pack(np.concatenate(bits)[~decided_N]) if bits else b"",
        disagreements=sum(part.disagreements for part in parts),
    )
