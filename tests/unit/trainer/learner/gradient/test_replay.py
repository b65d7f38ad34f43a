"""Rows of past attempts add the mean negative log-likelihood of their tokens to the loss, and to no other figure."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.unit.trainer.learner.gradient.test_echo import gradient, moved
from trainer.domain.rows import Row
from trainer.errors import RowError
from trainer.learner.learner import Learner
from trainer.learner.updates import of_step
from whetstone.config.trainer import LossName, TrainerSettings

MakeRows = Callable[..., list[Row]]

SETTINGS = TrainerSettings(
    threads=1, device="cpu", micro_batch_tokens=128, clip_norm=1e9, learning_rate=1e-3, replay_weight=0.3
)


def past(rows: list[Row], name: str = "past") -> list[Row]:
    """The rows as answers to imitate: no logprobs, no version, temperature 1."""
    return [
        replace(
            row,
            trajectory_id=f"{name}-{row.trajectory_id}",
            inference_logprobs_T=(math.nan,) * len(row.token_ids_T),
            versions_T=(-1,) * len(row.token_ids_T),
            temperatures_T=(1.0,) * len(row.token_ids_T),
            advantages_T=tuple(float(sampled) for sampled in row.sampled_T),
            replayed=True,
        )
        for row in rows
    ]


def nll_by_hand(learner: Learner, rows: list[Row]) -> Tensor:
    """The mean of -log π over the sampled tokens of the rows, by the model's own forward pass."""
    nats = []
    for row in rows:
        logprobs_TV = learner._model(input_ids=torch.tensor([row.token_ids_T])).logits[0].log_softmax(-1)
        nats += [
            -logprobs_TV[place - 1, row.token_ids_T[place]] for place, sampled in enumerate(row.sampled_T) if sampled
        ]
    return torch.stack(nats).mean()


@pytest.mark.parametrize("loss", ["dppo_tv", "grpo", "gspo", "cispo"])
@pytest.mark.parametrize("settings", [{}, {"kl_weight": 0.2, "entropy_weight": 0.1}, {"trees": False}])
def test_the_gradient_is_that_of_the_step_alone_and_of_the_mean_likelihood(
    tiny_model: Path, make_rows: MakeRows, loss: LossName, settings: dict[str, float]
) -> None:
    rows, replayed = make_rows(5), past(make_rows(3, seed=7))
    learner = moved(tiny_model, rows, SETTINGS.model_copy(update={"loss": loss, **settings}))
    alone, together = gradient(learner, rows), gradient(learner, [*rows, *replayed])
    (SETTINGS.replay_weight * nll_by_hand(learner, replayed)).backward()
    by_hand = {name: weight.grad for name, weight in learner._trained.items() if weight.grad is not None}
    assert max(value.abs().max() for value in by_hand.values()) > 1e-3
    for name, value in together.items():
        assert (value - alone[name] - by_hand[name]).abs().max() < 1e-6, name


def test_no_figure_but_the_loss_counts_them(tiny_model: Path, make_rows: MakeRows) -> None:
    rows, replayed = make_rows(5), past(make_rows(3, seed=7))
    one, other = (moved(tiny_model, rows, SETTINGS) for _ in range(2))
    nats = nll_by_hand(one, replayed).item()
    alone, together = one.step(rows, 0), other.step([*rows, *replayed], 0)
    assert together.loss == pytest.approx(alone.loss + 0.3 * nats, rel=1e-5)
    assert together.read_tokens == alone.read_tokens + sum(len(row.token_ids_T) for row in replayed)
    differ = {"loss", "grad_norm", "read_tokens"}
    for name in type(alone).__dataclass_fields__.keys() - differ:
        assert getattr(together, name) == pytest.approx(getattr(alone, name), rel=1e-5), name


def test_steps_make_them_likelier(tiny_model: Path, make_rows: MakeRows) -> None:
    rows, replayed = make_rows(4), past(make_rows(2, seed=7))
    alone, together = (moved(tiny_model, rows, SETTINGS) for _ in range(2))
    for _ in range(5):
        alone.step(rows, 0)
        together.step([*rows, *replayed], 0)
    assert nll_by_hand(together, replayed) < nll_by_hand(alone, replayed) - 0.05


def test_each_update_has_a_part_and_none_is_of_past_attempts_alone(make_rows: MakeRows) -> None:
    rows, replayed = make_rows(6), past(make_rows(3, seed=7))
    for updates in (1, 2, 3, 9):
        divided = of_step([*rows, *replayed], "grpo", SETTINGS.model_copy(update={"updates_per_step": updates}))
        assert sorted(row.trajectory_id for part in divided for row in part) == sorted(
            row.trajectory_id for row in (*rows, *replayed)
        )
        assert not any(part[0].replayed for part in divided)
        assert sum(any(row.replayed for row in part) for part in divided) == min(updates, 3)


def test_past_attempts_alone_are_no_step(tiny_model: Path, make_rows: MakeRows) -> None:
    with pytest.raises(RowError, match="nothing to learn from"):
        Learner.fresh(tiny_model, SETTINGS, seed=1).step(past(make_rows(2)), 0)
