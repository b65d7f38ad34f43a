"""Turn rows and losses into what the Tinker API takes, and the logprobs that it returns into a step's sums."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from trainer.domain.rows import Row
from trainer.learner import losses
from trainer.learner.gradient.objective import LARGEST_RATIO, Sums, Terms
from trainer.learner.losses import Tokens, k3
from whetstone.config.trainer import Kind, TrainerSettings
from whetstone.config.training_service import Adds

MOST_ROWS, MOST_TOKENS = 128, 65_536
"""Of one request, which is a few megabytes of JSON then."""


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


def scale_of(sums: Adds, row: Row, rows: int) -> float:
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


def sums_of(terms: Terms, logprobs: Sequence[Sequence[float]], settings: TrainerSettings) -> Sums:
    """Return the sums over an update's tokens, by the service's logprobs of each row's targets.

    Their entropy is an estimate: the sum of -log π over the sampled tokens, whose mean is the entropy where the policy
    itself sampled them. The distance from the base model is not measured.
    """
    rows = terms.rows
    here_S = _sampled(rows, [(math.nan, *each) for each in logprobs])
    weights_S = _sampled(rows, [[weight] * len(row.sampled_T) for row, weight in zip(rows, terms.weights, strict=True)])
    sums = Sums(entropy=float(-here_S.sum()), read=sum(len(row.token_ids_T) for row in rows))
    if terms.kind == "sft":
        sums.loss = float(losses.nll(here_S).losses_S @ weights_S)
        return sums
    there_S = _sampled(rows, [row.inference_logprobs_T for row in rows])
    advantages_S = _sampled(rows, [row.advantages_T for row in rows])
    sequences_S = torch.cat([torch.full((sum(row.sampled_T),), place) for place, row in enumerate(rows)])
    loss = losses.policy_loss(settings.loss, settings.clip_low, settings.clip_high, settings.tv_regulariser)
    policy = loss(Tokens(here_S, there_S, advantages_S, sequences_S))
    bounded_S = torch.minimum(here_S, there_S + math.log(LARGEST_RATIO))
    fresh_S = _sampled(rows, [row.versions_T for row in rows]) == terms.version_in
    ratios_S = (bounded_S - there_S).exp()
    sums.loss = float(policy.losses_S @ weights_S)
    sums.mismatch = float(k3(there_S, bounded_S)[fresh_S].sum())
    sums.fresh = sums.compared = float(fresh_S.sum())
    sums.masked = float(policy.masked_S.sum())
    sums.ratios, sums.squares = float(ratios_S.sum()), float(ratios_S.square().sum())
    return sums


def _sampled(rows: Sequence[Row], values: Sequence[Sequence[float]]) -> Tensor:
    """Return the values at the S sampled tokens; `values` has one for each token of each row."""
    return torch.tensor(
        [
            value
            for row, each in zip(rows, values, strict=True)
            for value, sampled in zip(each, row.sampled_T, strict=True)
            if sampled
        ],
        dtype=torch.float64,
    )


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
