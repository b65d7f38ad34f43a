"""What a step tells of itself, as columns of its row; and the probe's one figure. Pure; knows no table and no torch."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from trainer.claims import Member
from trainer.lessons import Lessons
from whetstone.training import TrainerSettings

if TYPE_CHECKING:
    from trainer.learner.learner import StepFigures


@dataclass(frozen=True)
class EndedStep:
    """A step that is over, in numbers."""

    policy: str
    number: int
    ended_at: datetime
    figures: Mapping[str, float]
    """Column -> figure, as far as there are any; seconds of a phase under `phases/<phase>`, groups that were given up
    for a reason under `discarded/<reason>`."""


def told(
    figures: "StepFigures", members: Sequence[Member], taught: Lessons, kind: str, settings: TrainerSettings
) -> dict[str, Any]:
    """All that is known of a step of that `kind` (grpo | sft) once its update is made, by column of `steps`."""
    rewards = [member.reward for member in members]
    # Nobody sampled what is imitated, and nothing of it is masked: no share of it says anything.
    unsampled = {"fresh_share": None, "masked_share": None} if kind == "sft" else {}
    return {
        **asdict(figures),
        **unsampled,
        "loss_function": settings.loss if kind == "grpo" else "nll",
        "learning_rate": settings.learning_rate,
        "reward_mean": _mean(rewards),
        "reward_spread": _spread(rewards),
        "advantage_spread": _spread(list(taught.advantages.values())),
        "completions": taught.answers,
    }


def timed(seconds: float, phases: Mapping[str, float], sampled_tokens: int = 0) -> dict[str, Any]:
    """How long a step took, by column of `steps`. Without tokens to train on there is no rate of them."""
    rate = sampled_tokens / seconds if sampled_tokens else None
    return {"seconds": seconds, "phases": dict(phases), "tokens_per_s": rate}


def mean_k3(inference: Iterable[float], trainer: Iterable[float]) -> float:
    """Mean over tokens of k3(server, trainer) = exp(d) - 1 - d, d = trainer - inference; nats, as `losses.k3`.

    What is not finite, or no token at all, makes a mean that is not finite.
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
