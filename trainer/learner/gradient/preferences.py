"""Compute the losses of preferences, from the log probabilities of whole trajectories.

A trajectory's log ratio is z = log π(y) - log π_ref(y), both summed over its sampled tokens: π is the policy being
trained, π_ref the reference. β is `trainer.preference_beta`, σ the logistic function.

| objective | loss, a mean over the U trajectories or P pairs of an update |
|---|---|
| kto | λ_D · (1 - σ(β·(z - z₀))) if good, λ_U · (1 - σ(β·(z₀ - z))) if bad, z₀ = max(0, mean of z) |
| dpo | -log σ(β·(z of the better - z of the worse)) |

KTO is arXiv 2402.01306 (equations 7 and 8), DPO arXiv 2305.18290 (equation 7). z₀ estimates KL(π ‖ π_ref). The paper
takes it over answers to other prompts, since its answers are of other models. Ours were sampled by this policy, or by
one that is at most `trainer.max_staleness` updates older, so their own mean is that estimate. No gradient flows through
it, as there.

The loss depends on all rows of a trajectory, and for dpo on two trajectories. It is computed from one forward pass
without a gradient. What remains for the pass with a gradient is a sum: each token's log probability, weighted by the
derivative of the loss by its trajectory's z. So any split into micro-batches adds up to the same gradient.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from trainer.domain.rows import Row
from trainer.errors import RowError
from whetstone.config.trainer import Kind, TrainerSettings


@dataclass(frozen=True, slots=True)
class PreferenceLoss:
    """The loss of an update, and how it changes with each row's log probability."""

    loss: float
    slopes_R: tuple[float, ...]
    """Derivative of the loss by log π of each sampled token, by row."""


def kto(
    ratios_U: Tensor, desirable_U: Tensor, *, beta: float, desirable_weight: float, undesirable_weight: float
) -> Tensor:
    """Return KTO's loss of U trajectories (a scalar). `desirable_U`: bool, whether each is good."""
    kl = ratios_U.detach().mean().clamp(min=0)
    good_U = desirable_weight * (1 - torch.sigmoid(beta * (ratios_U - kl)))
    bad_U = undesirable_weight * (1 - torch.sigmoid(beta * (kl - ratios_U)))
    return torch.where(desirable_U, good_U, bad_U).mean()


def dpo(better_P: Tensor, worse_P: Tensor, *, beta: float) -> Tensor:
    """Return DPO's loss of P pairs (a scalar), from the log ratios of the better and the worse side."""
    return -logsigmoid(beta * (better_P - worse_P)).mean()


def preference_loss(
    rows: Sequence[Row], policy_R: Sequence[float], reference_R: Sequence[float], kind: Kind, settings: TrainerSettings
) -> PreferenceLoss:
    """Return the loss of an update. `policy_R`, `reference_R`: sums of log probabilities, nats, of each row's tokens.

    Raises:
        RowError: a pair lacks one of its two trajectories.
    """
    units = {name: place for place, name in enumerate(dict.fromkeys(row.trajectory_id for row in rows))}
    of_rows_R = torch.tensor([units[row.trajectory_id] for row in rows])
    gaps_R = torch.tensor(policy_R, dtype=torch.float64) - torch.tensor(reference_R, dtype=torch.float64)
    ratios_U = torch.zeros(len(units), dtype=torch.float64).index_add(0, of_rows_R, gaps_R).requires_grad_()
    good = {row.trajectory_id for row in rows if max(row.advantages_T) > 0}
    if kind == "kto":
        loss = kto(
            ratios_U,
            torch.tensor([name in good for name in units]),
            beta=settings.preference_beta,
            desirable_weight=settings.kto_desirable_weight,
            undesirable_weight=settings.kto_undesirable_weight,
        )
    else:
        better = {row.pair: units[row.trajectory_id] for row in rows if row.trajectory_id in good}
        worse = {row.pair: units[row.trajectory_id] for row in rows if row.trajectory_id not in good}
        if better.keys() != worse.keys():
            raise RowError("a pair of a preference has only one of its two trajectories")
        better_P, worse_P = ratios_U[list(better.values())], ratios_U[[worse[pair] for pair in better]]
        loss = dpo(better_P, worse_P, beta=settings.preference_beta)
    (slopes_U,) = torch.autograd.grad(loss, ratios_U)
    return PreferenceLoss(loss.item(), tuple(slopes_U[of_rows_R].tolist()))
