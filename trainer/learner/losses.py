"""Compute losses and figures from log probabilities.

Every function works on S sampled tokens of any rows: prompts and padding are never among them. π is the policy being
trained, μ the one that sampled; both are probabilities of the sampled token, at the temperature it was sampled with.
r = π/μ is their ratio, A the token's advantage.

A loss of a step is L = Σ_t w_t · ℓ_t over all its sampled tokens. The functions below give ℓ_t; the weights w_t are the
paper's normaliser (`weight`). They are fixed before the first forward pass, so that micro-batches add up to the step's
loss for any split.

| loss | ℓ_t | w_t |
|---|---|---|
| dppo_tv | -m·r·A + λ(π-μ)² | 1 / tokens of the step |
| cispo | -sg(min(r, c))·A·log π | 1 / tokens of the step |
| dapo | -min(r·A, clip(r, 1-ε_low, 1+ε_high)·A) | 1 / tokens of the step |
| grpo | -min(r·A, clip(r, 1-ε, 1+ε)·A) | 1 / (trajectories · tokens of the trajectory) |
| dr_grpo | as grpo | 1 / (trajectories · longest answer allowed) |
| gspo | -min(s·A, clip(s, 1-ε_low, 1+ε_high)·A), s of its row | 1 / (trajectories · tokens of the trajectory) |
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from whetstone.config.trainer import LossName

CLIPS: dict[str, tuple[float, float]] = {
    "dppo_tv": (0.2, 0.2),
    "cispo": (1.0, 5.0),
    "dapo": (0.2, 0.28),
    "grpo": (0.2, 0.2),
    "dr_grpo": (0.2, 0.2),
    "gspo": (3e-4, 4e-4),
}
"""How far a token may move down and up: probabilities for dppo_tv (prime-rl's setting), the largest ratio itself for
cispo (which has no lower bound), 1 - ε_low and 1 + ε_high of the ratio for the others; each from its paper.
"""


@dataclass(frozen=True, slots=True)
class Tokens:
    """S sampled tokens of a micro-batch."""

    trainer_logprobs_S: Tensor
    """log π, nats; the gradient flows through it."""
    inference_logprobs_S: Tensor
    """log μ, nats."""
    advantages_S: Tensor
    sequences_S: Tensor
    """int64: index of the row in the micro-batch that each token belongs to, from 0."""

    def among(self, chosen_S: Tensor) -> "Tokens":
        """Return the tokens at which the bool is True."""
        return Tokens(
            self.trainer_logprobs_S[chosen_S],
            self.inference_logprobs_S[chosen_S],
            self.advantages_S[chosen_S],
            self.sequences_S[chosen_S],
        )


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """What each token adds to a loss, and which tokens add nothing."""

    losses_S: Tensor
    """ℓ_t, before its weight."""
    masked_S: Tensor
    """bool: tokens whose policy term has no gradient: clipped or masked."""


Loss = Callable[[Tokens], PolicyLoss]


def dppo_tv(tokens: Tokens, *, low: float, high: float, regulariser: float) -> PolicyLoss:
    """DPPO with the binary total-variation mask (arXiv 2602.04879), and a quadratic pull towards the sampler.

        ℓ_t = -m_t · r_t · A_t  +  λ · (π_t - μ_t)²
        r_t = π_t / μ_t      the gradient flows through it, unclipped
        m_t = 0 where A_t > 0 and π_t - μ_t > δ_high, or A_t < 0 and μ_t - π_t > δ_low; else 1

    Masked: the policy term of tokens whose probability has already moved by more than δ (`low`, `high`) in the
    direction of their advantage; |π - μ| is the total variation of "this token, or any other". A token that moved the
    other way keeps its gradient, which leads back. The regulariser (λ) covers every sampled token, also masked tokens.
    Normalised by all sampled tokens of the optimizer step: long answers weigh by their tokens.
    """
    advantages_S = tokens.advantages_S
    moved_S = tokens.trainer_logprobs_S.exp() - tokens.inference_logprobs_S.exp()
    with torch.no_grad():
        masked_S = ((advantages_S > 0) & (moved_S > high)) | ((advantages_S < 0) & (moved_S < -low))
    policy_S = -_ratio(_without(tokens, masked_S)) * advantages_S
    return PolicyLoss(torch.where(masked_S, 0.0, policy_S) + regulariser * moved_S.square(), masked_S)


def cispo(tokens: Tokens, *, high: float) -> PolicyLoss:
    """CISPO (MiniMax-M1, arXiv 2506.13585, equations 4 and 5): a clipped weight, and every token keeps its gradient.

        ℓ_t = -sg(min(r_t, c)) · A_t · log π_t

    The ratio is a constant (sg: no gradient), at most c (`high`: 1 + ε_high of the paper; no lower bound, as there).
    Nothing is masked. Normalised by all sampled tokens of the optimizer step.
    """
    with torch.no_grad():
        weight_S = _ratio(tokens).clamp(max=high)
    losses_S = -weight_S * tokens.advantages_S * tokens.trainer_logprobs_S
    return PolicyLoss(losses_S, torch.zeros_like(losses_S, dtype=torch.bool))


def clipped(tokens: Tokens, *, low: float, high: float) -> PolicyLoss:
    """PPO's clipped surrogate on token ratios: the policy term of GRPO, Dr. GRPO and DAPO.

        ℓ_t = -min(r_t · A_t, clip(r_t, 1 - ε_low, 1 + ε_high) · A_t)

    GRPO (arXiv 2402.03300, equation 3) and Dr. GRPO (arXiv 2503.20783) clip alike on both sides, DAPO
    (arXiv 2503.14476, equation 8) higher above. Masked: where the clipped branch is the smaller one, no gradient is
    left. The three differ in their normaliser, see `weight`.
    """
    return _clipped(_ratio(tokens), tokens.advantages_S, low, high)


def gspo(tokens: Tokens, *, low: float, high: float) -> PolicyLoss:
    """GSPO (arXiv 2507.18071, equations 5 to 7): the ratio of a whole sequence, by its length, clipped.

        s_i = exp(1/|o_i| · Σ_t (log π_t - log μ_t))
        ℓ_t = -min(s_i · A_i, clip(s_i, 1 - ε_low, 1 + ε_high) · A_i)    for every token t of sequence i

    A sequence is a row: the turns of a trajectory as long as they extend one another. The gradient flows through s_i
    to each of its tokens. Masked: all tokens of a sequence that was clipped. Normalised like GRPO. Where the advantages
    of a sequence differ, each of its tokens gets the gradient of their mean.
    """
    ratio_S = _mean_log_ratio(tokens).exp()[tokens.sequences_S]
    return _clipped(ratio_S, tokens.advantages_S, low, high)


def nll(trainer_logprobs_S: Tensor) -> PolicyLoss:
    """Supervised loss: the negative log likelihood of an answer to imitate.

    ℓ_t = -log π_t      normalised by all answer tokens of the optimizer step
    """
    return PolicyLoss(-trainer_logprobs_S, torch.zeros_like(trainer_logprobs_S, dtype=torch.bool))


def linear(trainer_logprobs_S: Tensor) -> PolicyLoss:
    """Return log π_t: what is left of a loss of preferences once its derivatives are the weights.

    See `trainer.learner.gradient.preferences`.
    """
    return PolicyLoss(trainer_logprobs_S, torch.zeros_like(trainer_logprobs_S, dtype=torch.bool))


def bounds(name: LossName, clip_low: float | None, clip_high: float | None) -> tuple[float, float]:
    """Return how far a token may move down and up. Bounds that are None are those of the loss's paper (`CLIPS`)."""
    low, high = CLIPS[name]
    return low if clip_low is None else clip_low, high if clip_high is None else clip_high


def policy_loss(name: LossName, clip_low: float | None, clip_high: float | None, tv_regulariser: float) -> Loss:
    """Return the loss of that name; `clip_low` and `clip_high` as in `bounds`."""
    low, high = bounds(name, clip_low, clip_high)
    match name:
        case "dppo_tv":
            return lambda tokens: dppo_tv(tokens, low=low, high=high, regulariser=tv_regulariser)
        case "cispo":
            return lambda tokens: cispo(tokens, high=high)
        case "gspo":
            return lambda tokens: gspo(tokens, low=low, high=high)
        case "dapo" | "grpo" | "dr_grpo":
            return lambda tokens: clipped(tokens, low=low, high=high)


def weight(
    name: LossName, *, trajectory_tokens: int, trajectories: int, step_tokens: int, max_answer_tokens: int
) -> float:
    """Return w_t of every sampled token of one trajectory: the paper's normaliser, over the whole optimizer step.

    `trajectory_tokens` are all its sampled tokens, over all its rows; `trajectories` and `step_tokens` count the step;
    `max_answer_tokens` is the constant that Dr. GRPO divides by instead of a length.
    """
    match name:
        case "dppo_tv" | "cispo" | "dapo":
            return 1 / step_tokens
        case "grpo" | "gspo":
            return 1 / (trajectories * trajectory_tokens)
        case "dr_grpo":
            return 1 / (trajectories * max_answer_tokens)


def guarded(tokens: Tokens, loss: Loss, max_ratio: float, max_sequence_ratio: float | None = None) -> PolicyLoss:
    """Apply `loss` without the tokens whose ratio is above `max_ratio`, and without rows that have moved too far.

    A row has if the geometric mean of its tokens' ratios, s_i of GSPO (arXiv 2507.18071), is above
    `max_sequence_ratio` or below its inverse. All tokens of such a row are left out: its samples say little about this
    policy, though no single token of it may stand out.

    They have no policy term and count as masked; in the ratio of a whole row they count as 1. Such a token weighs
    `max_ratio` times as much as one that the trainer samples itself, so a few would outweigh the rest of the step. In
    the other direction, a ratio near 0 weighs nothing by itself.

    The default, 8, is prime-rl's (`token_mask_high` of its `LossConfig`), which leaves such tokens out too. Others: 5,
    left out (IcePop, arXiv 2510.18855); 2, truncated (TIS, open-instruct's `truncated_importance_sampling_ratio_cap`).
    These two compare trainer and server at the same weights; here, as in prime-rl, up to `max_staleness` updates lie
    between the two as well.
    """
    with torch.no_grad():
        beyond_S = tokens.trainer_logprobs_S - tokens.inference_logprobs_S > math.log(max_ratio)
        if max_sequence_ratio is not None:
            beyond_S |= _mean_log_ratio(tokens)[tokens.sequences_S].abs() > math.log(max_sequence_ratio)
    inner = loss(_without(tokens, beyond_S))
    return PolicyLoss(torch.where(beyond_S, 0.0, inner.losses_S), inner.masked_S | beyond_S)


def k3(sampler_logprobs_S: Tensor, other_logprobs_S: Tensor) -> Tensor:
    """Return Schulman's k3 estimate of KL(sampler ‖ other), per token, in nats; never negative.

        d = other - sampler;  k3 = exp(d) - 1 - d

    Its mean is unbiased over tokens that the sampler drew. k3(inference, trainer) is the mismatch of server and
    trainer; k3(trainer, base) is the policy's distance from the base model. http://joschu.net/blog/kl-approx.html
    """
    d_S = other_logprobs_S - sampler_logprobs_S
    return torch.expm1(d_S) - d_S


def _mean_log_ratio(tokens: Tokens) -> Tensor:
    """Return the mean of log π - log μ over the tokens of each row, (Q,)."""
    count = int(tokens.sequences_S.max()) + 1 if len(tokens.sequences_S) else 0
    log_ratio_S = tokens.trainer_logprobs_S - tokens.inference_logprobs_S
    sums_Q = log_ratio_S.new_zeros(count).index_add(0, tokens.sequences_S, log_ratio_S)
    return sums_Q / torch.bincount(tokens.sequences_S, minlength=count).clamp(min=1)


def _ratio(tokens: Tokens) -> Tensor:
    return (tokens.trainer_logprobs_S - tokens.inference_logprobs_S).exp()


def _clipped(ratio_S: Tensor, advantages_S: Tensor, low: float, high: float) -> PolicyLoss:
    free_S = ratio_S * advantages_S
    bound_S = ratio_S.clamp(1 - low, 1 + high) * advantages_S
    return PolicyLoss(-torch.minimum(free_S, bound_S), (bound_S < free_S).detach())


def _without(tokens: Tokens, left_out_S: Tensor) -> Tokens:
    """Give left-out tokens ratio 1 and no gradient. `where` alone would pass 0 · inf = NaN back through an overflow."""
    at_S = torch.where(left_out_S, 0.0, tokens.trainer_logprobs_S)
    was_S = torch.where(left_out_S, 0.0, tokens.inference_logprobs_S)
    return Tokens(at_S, was_S, tokens.advantages_S, tokens.sequences_S)
