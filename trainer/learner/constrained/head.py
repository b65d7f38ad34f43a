"""Compute the log probabilities of constrained tokens from hidden states, in chunks, as `chunked_head` does of others.

Logits of a chunk are dropped after the forward pass and computed again in the backward pass.
"""

import math
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from trainer.learner import chunked_head
from trainer.learner.constrained import supports
from trainer.learner.constrained.bending import ConstrainedTokens, bend, chunks


def token_logprobs(
    hidden_SH: Tensor,
    head: torch.nn.Module,
    token_ids_S: Tensor,
    temperatures_S: Tensor,
    constrained: Sequence[ConstrainedTokens],
    *,
    chunk_logits: int = chunked_head.CHUNK_LOGITS,
) -> tuple[Tensor, Tensor]:
    """Return what `chunked_head.token_logprobs` returns, for the distribution that each token was sampled from.

        log π(token | S) = z_token - logsumexp over S of z;   H over S

    z are the bent logits at their temperature, S the support that was measured. Tokens without constraints are computed
    by `chunked_head`. The gradient of log π flows through the bending and is 0 outside of S: ∇z_token - Σ_S p · ∇z.
    """
    free_S = torch.ones(len(token_ids_S), dtype=torch.bool, device=token_ids_S.device)
    for tokens in constrained:
        free_S[tokens.at_C] = False
    order = [free_S.nonzero()[:, 0]]
    figures = [
        chunked_head.token_logprobs(
            hidden_SH[free_S], head, token_ids_S[free_S], temperatures_S[free_S], chunk_logits=chunk_logits
        )
    ]
    for chunk in chunks(constrained, chunk_rows(head, chunk_logits)):
        at_C = torch.cat([tokens.at_C for tokens in chunk])
        order.append(at_C)
        figures.append(
            cast(
                tuple[Tensor, Tensor],
                checkpoint(
                    _chunk, hidden_SH[at_C], head, token_ids_S[at_C], temperatures_S[at_C], chunk,
                    use_reentrant=False, preserve_rng_state=False,
                ),
            )
        )  # fmt: skip
    back_S = torch.cat(order).argsort()
    logprobs, entropies = zip(*figures, strict=True)
    return torch.cat(logprobs)[back_S], torch.cat(entropies)[back_S]


def chunk_rows(head: torch.nn.Module, chunk_logits: int = chunked_head.CHUNK_LOGITS) -> int:
    """Return how many tokens' logits are computed at once."""
    return max(1, chunk_logits // cast(Tensor, head.weight).shape[0])


def bent_logits(
    hidden_CH: Tensor,
    head: torch.nn.Module,
    temperatures_C: Tensor,
    chunk: Sequence[ConstrainedTokens],
    *,
    as_served: bool = False,
) -> Tensor:
    """Return the bent logits of the chunk's tokens at their temperatures, in at least fp32.

    `as_served`: with logits rounded to the precision of the model's head, as vLLM rounds them before it bends them. In
    16 bits many tokens then have the same logit.
    """
    weight_VH, bias_V = cast(Tensor, head.weight), cast(Tensor | None, getattr(head, "bias", None))
    logits_CV = chunked_head.wide_logits(hidden_CH, weight_VH, bias_V)
    if as_served:
        logits_CV = logits_CV.to(weight_VH.dtype).to(logits_CV.dtype)
    parts = logits_CV.split([len(tokens.at_C) for tokens in chunk])
    return torch.cat([bend(*pair) for pair in zip(parts, chunk, strict=True)]) / temperatures_C[:, None]


def _chunk(
    hidden_CH: Tensor,
    head: torch.nn.Module,
    token_ids_C: Tensor,
    temperatures_C: Tensor,
    chunk: Sequence[ConstrainedTokens],
) -> tuple[Tensor, Tensor]:
    z_CV = bent_logits(hidden_CH, head, temperatures_C, chunk)
    parts = z_CV.split([len(tokens.at_C) for tokens in chunk])
    allowed_CV = torch.cat([_allowed(*pair) for pair in zip(parts, chunk, strict=True)])
    logp_CV = z_CV.masked_fill(~allowed_CV, -math.inf).log_softmax(-1)
    # 0 · -inf would be NaN.
    entropy_C = -(logp_CV.exp() * logp_CV.masked_fill(~allowed_CV, 0.0)).sum(-1)
    return logp_CV.gather(-1, token_ids_C[:, None])[:, 0], entropy_C


def _allowed(z_CV: Tensor, tokens: ConstrainedTokens) -> Tensor:
    if tokens.supports_CB is None:
        return z_CV > -math.inf
    return supports.mask(tokens.supports_CB, z_CV.shape[1], z_CV.device)
