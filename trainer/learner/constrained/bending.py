"""Replay on logits what vLLM does to them before it samples: from allowed ids to the temperature.

The order is that of vLLM 0.32 (`v1/sample/sampler.py`, `Sampler.forward`): allowed ids, `min_tokens`, logit bias,
repetition, frequency and presence penalty, temperature. Truncations come after it (`supports`), a grammar before it.
"""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trainer.domain.constraints import Constraints


@dataclass(frozen=True, slots=True)
class ConstrainedTokens:
    """C sampled tokens of one constrained completion in a micro-batch, in the order they were sampled."""

    constraints: Constraints
    at_C: Tensor
    """int64: which of the micro-batch's S sampled tokens each of them is."""
    offsets_C: Tensor
    """int64: which of the completion's tokens each of them is, from 0."""
    prompt_ids_P: Tensor
    output_ids_N: Tensor
    """All tokens of the completion."""
    barred_ids: tuple[int, ...]
    """Ids that are not allowed before `min_tokens`."""
    supports_CB: npt.NDArray[np.uint8] | None
    """The support of each token, eight ids a byte; None where the whole vocabulary is its support."""

    def part(self, part: slice) -> Self:
        """Return some of the tokens."""
        supports = None if self.supports_CB is None else self.supports_CB[part]
        return replace(self, at_C=self.at_C[part], offsets_C=self.offsets_C[part], supports_CB=supports)


def bend(logits_CV: Tensor, tokens: ConstrainedTokens) -> Tensor:
    """Return the logits as the completion's constraints leave them, before the temperature. Differentiable.

        z = g - frequency · count - presence · [count > 0];   g = l / r where l > 0, else l · r, for tokens that were
        seen; l = logit + bias, -inf where it is not allowed

    Presence and frequency count the completion's own tokens before each one, repetition also those of its prompt.
    """
    c = tokens.constraints
    vocabulary = logits_CV.shape[1]
    if c.allowed_token_ids is not None:
        logits_CV = logits_CV.masked_fill(~_marks(c.allowed_token_ids, logits_CV), -math.inf)
    if c.min_tokens and tokens.barred_ids:
        early_C1 = (tokens.offsets_C < c.min_tokens)[:, None]
        logits_CV = logits_CV.masked_fill(early_C1 & _marks(tokens.barred_ids, logits_CV), -math.inf)
    if c.logit_bias:
        ids, biases = zip(*c.logit_bias, strict=True)
        bias_V = logits_CV.new_zeros(vocabulary)
        bias_V[torch.tensor(ids, device=logits_CV.device)] = logits_CV.new_tensor(biases)
        logits_CV = logits_CV + bias_V
    if not c.penalizes:
        return logits_CV
    counts_CV = _counts(tokens, logits_CV)
    if c.repetition_penalty != 1:
        seen_CV = (counts_CV > 0) | _marks(tokens.prompt_ids_P, logits_CV)
        scaled_CV = torch.where(logits_CV > 0, logits_CV / c.repetition_penalty, logits_CV * c.repetition_penalty)
        logits_CV = torch.where(seen_CV, scaled_CV, logits_CV)
    return logits_CV - c.frequency_penalty * counts_CV - c.presence_penalty * (counts_CV > 0)


def chunks(tokens: Sequence[ConstrainedTokens], rows: int) -> Iterator[list[ConstrainedTokens]]:
    """Yield all the tokens in lists of at most `rows` tokens."""
    chunk: list[ConstrainedTokens] = []
    room = rows
    for each in tokens:
        start, count = 0, len(each.at_C)
        while start < count:
            taken = each.part(slice(start, start + room))
            chunk.append(taken)
            start += len(taken.at_C)
            room -= len(taken.at_C)
            if not room:
                yield chunk
                chunk, room = [], rows
    if chunk:
        yield chunk


def _marks(ids: Collection[int] | Tensor, like_CV: Tensor) -> Tensor:
    """Return a bool for each token of the vocabulary: whether it is one of `ids`."""
    marks_V = torch.zeros(like_CV.shape[1], dtype=torch.bool, device=like_CV.device)
    marks_V[ids if isinstance(ids, Tensor) else torch.tensor(list(ids), device=like_CV.device)] = True
    return marks_V


def _counts(tokens: ConstrainedTokens, like_CV: Tensor) -> Tensor:
    """Return how often the completion had each token of the vocabulary before each of its C tokens."""
    outputs_N = tokens.output_ids_N
    # Each output counts from the first of the C tokens that comes after it.
    places_N = torch.arange(len(outputs_N), device=outputs_N.device)
    first_N = torch.searchsorted(tokens.offsets_C, places_N, right=True)
    counted_N = first_N < len(tokens.offsets_C)
    counts_CV = torch.zeros_like(like_CV)
    index = (first_N[counted_N], outputs_N[counted_N])
    counts_CV.index_put_(index, counts_CV.new_ones(()), accumulate=True)
    return counts_CV.cumsum(0)
