"""Turn a step's figures into columns of its row, and compute the probe's k3. Pure."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from trainer.domain.claims import Member
from trainer.domain.row_builder import StepRows
from whetstone.config.trainer import BY_EXAMPLE, TrainerSettings


@dataclass(frozen=True, slots=True)
class StepFigures:
    """Figures of a step, measured before its update. Means are over all sampled tokens of the step."""

    loss: float
    kl: float | None
    """Nats per token: k3 of the policy to the base model; None if it was not measured."""
    entropy: float
    """Nats per token, at the temperature that was used for sampling."""
    mismatch_k3: float | None
    """Nats per token: k3 of the server to the trainer, over tokens of version_in in the step's first update; None
    without such tokens."""
    fresh_share: float
    """Share of the tokens that version_in sampled."""
    masked_share: float
    """Share of the tokens whose policy term the loss masked out."""
    effective_share: float | None
    """Effective sample size of the tokens as a share of them: (Σ r)² / (n Σ r²) with r the probability of a token,
    trainer to server (Kish, Survey Sampling, 1965). None but in steps of the kind grpo."""
    grad_norm: float | None
    """Before clipping; the largest of the step's updates. None where a training service does not say it."""
    sampled_tokens: int
    read_tokens: int
    """Tokens of the forward passes: a shared prefix counts once, padding counts."""
    rows: int
    learning_rate: float
    """Of the optimizer, in the step's last update."""


@dataclass(frozen=True)
class EndedStep:
    """The figures of a step that is over."""

    policy: str
    number: int
    ended_at: datetime
    figures: Mapping[str, float]
    """Column -> figure, where there is one. Seconds of a phase are under `phases/<phase>`, groups that were discarded
    for a reason under `discarded/<reason>`.
    """


def step_columns(
    figures: StepFigures, members: Sequence[Member], taught: StepRows, kind: str, settings: TrainerSettings
) -> dict[str, Any]:
    """Return all figures of a step of that `kind` after its update, by column of `steps`."""
    rewards = [member.reward for member in members]
    # Rows of examples have no version and are never masked, so these shares would mean nothing.
    unsampled = dict.fromkeys(("fresh_share", "masked_share", "effective_share")) if kind in BY_EXAMPLE else {}
    return {
        **asdict(figures),
        **unsampled,
        "loss_function": {"grpo": settings.loss, "sft": "nll", "prefer": "dpo"}.get(
            kind, "divergence" if kind in BY_EXAMPLE else kind
        ),
        "reward_mean": _mean(rewards),
        "reward_spread": _spread(rewards),
        "advantage_spread": _spread(list(taught.advantages.values())),
        "completions": taught.answers,
        "state_share": taught.state_share,
    }


def timed(seconds: float, phases: Mapping[str, float], sampled_tokens: int = 0) -> dict[str, Any]:
    """Return how long a step took, by column of `steps`. Without trained tokens there is no rate."""
    rate = sampled_tokens / seconds if sampled_tokens else None
    return {"seconds": seconds, "phases": dict(phases), "tokens_per_s": rate}


def mean_k3(inference: Iterable[float], trainer: Iterable[float]) -> float:
    """Return the mean over tokens of k3(server, trainer), in nats, as `losses.k3`.

    k3 = exp(d) - 1 - d with d = trainer - inference. The mean is not finite if one of the values is not, or if there
    are no tokens.
    """
    estimates = [_k3(there, here) for there, here in zip(inference, trainer, strict=True)]
    return math.fsum(estimates) / len(estimates) if estimates else math.nan


def _k3(inference: float, trainer: float) -> float:
    d = trainer - inference
    try:
        return math.expm1(d) - d
    except OverflowError:
        return math.inf


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(value / len(values) for value in values) if values else None


def _spread(values: Sequence[float]) -> float | None:
    """Population standard deviation."""
    mean = _mean(values)
    if mean is None:
        return None
    # Unlike a sum of squares, hypot does not overflow.
    return math.hypot(*(value - mean for value in values)) / math.sqrt(len(values))
