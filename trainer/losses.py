"""Log probabilities in, losses and figures out. Knows formulas; nothing of models, rows or optimizers.

Every function works on S sampled tokens, whatever rows they came from: prompts and padding never get here. π is the
policy being trained, μ the one that sampled; both are of the token that was sampled, at the temperature it was
sampled with.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """A loss to differentiate, and what it left out."""

    loss: Tensor
    """Scalar: this micro-batch's share of the step's loss. Shares add up."""
    masked_S: Tensor
    """bool: tokens whose policy term was masked out."""


def dppo_tv(
    trainer_logprobs_S: Tensor,
    inference_logprobs_S: Tensor,
    advantages_S: Tensor,
    *,
    threshold: float,
    regulariser: float,
    step_tokens: int,
) -> PolicyLoss:
    """DPPO with the binary total-variation mask (arXiv 2602.04879), and a quadratic pull towards the sampler.

        L = 1/N · Σ_t [ -m_t · r_t · A_t  +  λ · (π_t - μ_t)² ]

        r_t = π_t / μ_t      the gradient flows through it, unclipped
        m_t = 0 where A_t > 0 and π_t - μ_t > δ, or A_t < 0 and μ_t - π_t > δ; else 1

    Masked: the policy term of tokens whose probability has already moved by more than δ (`threshold`) the way their
    advantage pushes; |π - μ| is the total variation of "this token, or any other". A token that moved the other way
    keeps its gradient: it leads back. The regulariser (λ, `regulariser`) covers every sampled token, masked ones too.

    Normalised by N (`step_tokens`): all sampled tokens of the optimizer step, one number for all its micro-batches,
    so that their gradients add up to the step's however it is split and long answers weigh by their tokens.
    """
    ratio_S = torch.exp(trainer_logprobs_S - inference_logprobs_S)
    moved_S = torch.exp(trainer_logprobs_S) - torch.exp(inference_logprobs_S)
    with torch.no_grad():
        masked_S = ((advantages_S > 0) & (moved_S > threshold)) | ((advantages_S < 0) & (moved_S < -threshold))
    # where, not a product: a masked token whose ratio overflowed would give 0 * inf = NaN.
    policy_S = torch.where(masked_S, 0.0, -ratio_S * advantages_S)
    return PolicyLoss((policy_S + regulariser * moved_S.square()).sum() / step_tokens, masked_S)


def k3(sampler_logprobs_S: Tensor, other_logprobs_S: Tensor) -> Tensor:
    """Schulman's k3 estimate of KL(sampler ‖ other), per token, in nats; never negative.

        d = other - sampler;  k3 = exp(d) - 1 - d

    Its mean is unbiased over tokens that the sampler drew. k3(inference, trainer) is the mismatch of server and
    trainer; k3(trainer, base) the policy's distance from the base model. http://joschu.net/blog/kl-approx.html
    """
    d_S = other_logprobs_S - sampler_logprobs_S
    return torch.expm1(d_S) - d_S


def token_logprobs(logits_SV: Tensor, token_ids_S: Tensor) -> Tensor:
    """log softmax at the given ids, in nats: logits - logsumexp. No (S, V) table of logprobs is kept for backward."""
    return logits_SV.gather(-1, token_ids_S[:, None])[:, 0] - logits_SV.logsumexp(-1)


@torch.no_grad()
def entropy(logits_SV: Tensor) -> Tensor:
    """Entropy of each distribution over V tokens, in nats: -Σ p log p. A figure, not a loss: no gradient."""
    logprobs_SV = logits_SV.log_softmax(-1)
    return -(logprobs_SV.exp() * logprobs_SV).sum(-1)
