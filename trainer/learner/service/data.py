"""Turn rows and losses into what the Tinker API takes, and the logprobs that it returns into a step's figures."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from trainer.domain.figures import StepFigures
from trainer.domain.rows import Row
from trainer.learner import losses
from trainer.learner.gradient.objective import LARGEST_RATIO
from trainer.learner.losses import PolicyLoss, Tokens, k3
from whetstone.config.trainer import Kind, TrainerSettings

MOST_ROWS, MOST_TOKENS = 128, 65_536
"""Of one request, which is a few megabytes of JSON then."""


Sums = Literal["tokens", "row_means"]
"""As `training_service.sums`."""


@dataclass(frozen=True, slots=True)
class ServiceLoss:
    """A loss by its name in the API, with its bounds."""

    name: Literal["ppo", "cispo"]
    config: Mapping[str, float]


def loss_of(settings: TrainerSettings, kind: Kind) -> ServiceLoss:
    """Return the loss of a step.

    The API's bounds are ratios themselves. A supervised step takes `cispo` with both bounds at 1: its weight is 1 then,
    and what is left is -A · log π. That adds up as the other losses do, which the API's `cross_entropy` does not
    everywhere.
    """
    if kind == "sft":
        return ServiceLoss("cispo", {"clip_low_threshold": 1.0, "clip_high_threshold": 1.0})
    low, high = losses.bounds(settings.loss, settings.clip_low, settings.clip_high)
    if settings.loss == "cispo":
        return ServiceLoss("cispo", {"clip_low_threshold": 0.0, "clip_high_threshold": high})
    return ServiceLoss("ppo", {"clip_low_threshold": 1 - low, "clip_high_threshold": 1 + high})


def weights_of(rows: Sequence[Row], settings: TrainerSettings, kind: Kind) -> list[float]:
    """Return, for each row, the weight of its tokens in the loss: `losses.weight`."""
    tokens: Counter[str] = Counter()
    for row in rows:
        tokens[row.trajectory_id] += sum(row.sampled_T)
    step_tokens = sum(tokens.values())
    if kind == "sft":
        return [1 / step_tokens] * len(rows)
    return [
        losses.weight(
            settings.loss,
            trajectory_tokens=tokens[row.trajectory_id],
            trajectories=len(tokens),
            step_tokens=step_tokens,
            max_answer_tokens=settings.max_answer_tokens,
        )
        for row in rows
    ]


def datum(row: Row, weight: float) -> dict[str, Any]:
    """Return a row as the API has it: each token but the last, and for each the next one as target.

    `weight` multiplies its advantages. Targets that are only read have an advantage of 0.
    """
    return _datum(
        row.token_ids_T,
        logprobs=[0.0 if math.isnan(logprob) else logprob for logprob in row.inference_logprobs_T[1:]],
        advantages=[weight * advantage for advantage in row.advantages_T[1:]],
    )


def datum_to_imitate(row: Row, weight: float) -> dict[str, Any]:
    """Return a row of a supervised step. Its logprobs count for nothing: see `loss_of`."""
    zeros = [0.0] * (len(row.token_ids_T) - 1)
    return _datum(
        row.token_ids_T, logprobs=zeros, advantages=[weight * float(sampled) for sampled in row.sampled_T[1:]]
    )


def datum_to_read(token_ids: Sequence[int]) -> dict[str, Any]:
    """Return a sequence of which only the logprobs are wanted."""
    zeros = [0.0] * (len(token_ids) - 1)
    return _datum(token_ids, zeros, zeros)


def scale_of(sums: Sums, row: Row, rows: int) -> float:
    """Return what a row's weight is multiplied by, so that the server's sum is the sum over all tokens."""
    return 1.0 if sums == "tokens" else float((len(row.token_ids_T) - 1) * rows)


def requests(lengths: Sequence[int]) -> Iterator[range]:
    """Yield the places of each request's rows, in order."""
    start = tokens = 0
    for place, length in enumerate(lengths):
        if place > start and (place - start == MOST_ROWS or tokens + length > MOST_TOKENS):
            yield range(start, place)
            start, tokens = place, 0
        tokens += length
    if start < len(lengths):
        yield range(start, len(lengths))


@dataclass(frozen=True, slots=True)
class Update:
    """What is known of an update before the optimizer ran."""

    rows: Sequence[Row]
    weights: Sequence[float]
    logprobs: Sequence[Sequence[float]]
    """For each row, those of all its targets."""


def figures(
    updates: Sequence[Update],
    version_in: int,
    settings: TrainerSettings,
    kind: Kind,
    grad_norm: float | None,
    learning_rate: float,
) -> StepFigures:
    """Return the figures of a step.

    Its entropy is an estimate: the mean of -log π over the sampled tokens, which is the entropy where the policy itself
    sampled them. The distance from the base model is not measured.
    """
    loss = losses.policy_loss(settings.loss, settings.clip_low, settings.clip_high, settings.tv_regulariser)
    parts = [_summed(update, version_in, kind, loss) for update in updates]
    tokens = sum(part.tokens for part in parts)
    first = parts[0]
    squares = sum(part.squares for part in parts)
    return StepFigures(
        loss=sum(part.loss * part.tokens for part in parts) / tokens,
        kl=None,
        entropy=sum(part.surprise for part in parts) / tokens,
        mismatch_k3=first.mismatch / first.fresh if first.fresh else None,
        fresh_share=sum(part.fresh for part in parts) / tokens,
        masked_share=sum(part.masked for part in parts) / tokens,
        effective_share=sum(part.ratios for part in parts) ** 2 / squares / tokens if squares else None,
        grad_norm=grad_norm,
        sampled_tokens=tokens,
        read_tokens=sum(len(row.token_ids_T) for update in updates for row in update.rows),
        rows=sum(len(update.rows) for update in updates),
        learning_rate=learning_rate,
    )


@dataclass(frozen=True, slots=True)
class _UpdateSums:
    loss: float
    surprise: float
    mismatch: float
    fresh: int
    masked: int
    ratios: float
    squares: float
    tokens: int


def _summed(update: Update, version_in: int, kind: Kind, loss: losses.Loss) -> _UpdateSums:
    here_S, weights_S, there_S = _of(update, update.logprobs), _of(update, None), _of(update, "inference_logprobs_T")
    sequences_S = torch.cat([torch.full((sum(row.sampled_T),), place) for place, row in enumerate(update.rows)])
    if kind == "sft":
        policy: PolicyLoss = losses.nll(here_S)
        return _UpdateSums(float(policy.losses_S @ weights_S), float(-here_S.sum()), 0.0, 0, 0, 0.0, 0.0, len(here_S))
    policy = loss(Tokens(here_S, there_S, _of(update, "advantages_T"), sequences_S))
    bounded_S = torch.minimum(here_S, there_S + math.log(LARGEST_RATIO))
    fresh_S = _of(update, "versions_T") == version_in
    ratios_S = (bounded_S - there_S).exp()
    return _UpdateSums(
        loss=float(policy.losses_S @ weights_S),
        surprise=float(-here_S.sum()),
        mismatch=float(k3(there_S, bounded_S)[fresh_S].sum()),
        fresh=int(fresh_S.sum()),
        masked=int(policy.masked_S.sum()),
        ratios=float(ratios_S.sum()),
        squares=float(ratios_S.square().sum()),
        tokens=len(here_S),
    )


def _of(update: Update, what: str | Sequence[Sequence[float]] | None) -> Tensor:
    """Return a field of the rows, the logprobs of their targets, or the rows' weights, at the S sampled tokens."""
    found: list[float] = []
    for place, row in enumerate(update.rows):
        if isinstance(what, str):
            values: Sequence[float] = getattr(row, what)
        elif what is None:
            values = [update.weights[place]] * len(row.sampled_T)
        else:
            values = (math.nan, *what[place])
        found += [value for value, sampled in zip(values, row.sampled_T, strict=True) if sampled]
    return torch.tensor(found, dtype=torch.float64)


def _datum(token_ids: Sequence[int], logprobs: Sequence[float], advantages: Sequence[float]) -> dict[str, Any]:
    return {
        "model_input": {"chunks": [{"type": "encoded_text", "tokens": list(token_ids[:-1])}]},
        "loss_fn_inputs": {
            "target_tokens": _tensor(token_ids[1:], "int64"),
            "logprobs": _tensor(logprobs, "float32"),
            "advantages": _tensor(advantages, "float32"),
        },
    }


def _tensor(values: Sequence[float], dtype: str) -> dict[str, Any]:
    return {"data": list(values), "dtype": dtype, "shape": [len(values)]}
