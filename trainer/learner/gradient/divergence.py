"""Compute the loss of a step that learns from a teacher: how far the policy is from it, token by token.

In a step of the kind hindsight the teacher is the same model after the prompt with a correction, with the weights of a
fixed version or of that which the step starts from; the student is the policy after the prompt as it was. In one of the
kind distill the teacher is another model, on a server of its own. Both read the answer that the student sampled. At
each of its tokens the teacher's K likeliest tokens are compared, and all others as one: without that last class the
probabilities would not add up to 1, and the number would be no divergence.

| alpha | loss of a token, q the teacher's probabilities, p the student's, over K + 1 classes |
|---|---|
| 0 | KL(q to p) = Σ q · log(q/p) |
| 1 | KL(p to q) = Σ p · log(p/q) |
| a between | (1 - a) · KL(p to m) + a · KL(q to m), m = (1 - a) · p + a · q |

The settings are `trainer.hindsight_alpha` and `trainer.distill_alpha`. The idea of hindsight is that of
self-distillation, SDPO (arXiv 2601.20802) and SDFT, and of hindsight from the next message (arXiv 2603.12273); with
another model as teacher it is on-policy distillation, GKD (arXiv 2306.13649). No gradient flows through the teacher.
Normalised by all answer tokens of the update.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.domain.rows import Row

LEAST_REST = 1e-7
"""Least mass of the tokens that are not among the K, so that its logarithm is finite in fp32."""


@dataclass(frozen=True, slots=True)
class Targets:
    """What the teacher says at the N answer tokens of a row."""

    ids_NK: Tensor
    """int64: its K likeliest tokens."""
    logprobs_NK: Tensor
    """Of these, in nats."""


def given_targets(row: Row) -> Targets:
    """Return what a teacher said of the row's answer; the row has it."""
    return Targets(torch.tensor(row.top_ids_N), torch.tensor(row.top_logprobs_N))


def divergence(student_SK: Tensor, teacher_SK: Tensor, alpha: float) -> Tensor:
    """Return the divergence at each of S tokens, from log probabilities of the same K tokens, in nats."""
    p_SC, q_SC = _with_rest(student_SK), _with_rest(teacher_SK)
    if alpha == 0:
        return _kl(q_SC, p_SC)
    if alpha == 1:
        return _kl(p_SC, q_SC)
    share = torch.tensor(alpha, dtype=p_SC.dtype, device=p_SC.device)
    mixed_SC = torch.logaddexp(p_SC + (1 - share).log(), q_SC + share.log())
    return (1 - alpha) * _kl(p_SC, mixed_SC) + alpha * _kl(q_SC, mixed_SC)


def _kl(p_SC: Tensor, q_SC: Tensor) -> Tensor:
    return (p_SC.exp() * (p_SC - q_SC)).sum(-1)


def _with_rest(logprobs_SK: Tensor) -> Tensor:
    """Return the log probabilities with that of all other tokens behind them."""
    mass_S1 = logprobs_SK.logsumexp(-1, keepdim=True).clamp(max=-LEAST_REST)
    return torch.cat([logprobs_SK, torch.log(-torch.expm1(mass_S1))], -1)
