"""Tokens that tools gave add their mean cross-entropy to the loss (ECHO, arXiv 2605.24517), and nothing else."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from trainer.domain.constraints import ConstrainedSpan, Constraints
from trainer.domain.rows import Row
from trainer.learner.learner import Learner
from whetstone.config.trainer import TrainerSettings

MakeRows = Callable[..., list[Row]]

SETTINGS = TrainerSettings(threads=1, device="cpu", micro_batch_tokens=128, clip_norm=1e9, learning_rate=1e-3)
WEIGHTED = SETTINGS.model_copy(update={"echo_weight": 0.25})


def with_tools(rows: list[Row]) -> list[Row]:
    """Rows in which two stretches are a tool's, at any temperatures of the others; the last row has none."""

    def spans(row: Row) -> Row:
        sampled = list(row.sampled_T)
        sampled[4], sampled[10:16], sampled[20:23] = True, [False] * 6, [False] * 3
        logprobs, versions, advantages = (
            list(row.inference_logprobs_T), list(row.versions_T), list(row.advantages_T),
        )  # fmt: skip
        logprobs[4], versions[4], advantages[4] = -4.0, 0, 0.5
        return replace(
            row,
            sampled_T=tuple(sampled),
            inference_logprobs_T=tuple(logprobs),
            versions_T=tuple(versions),
            advantages_T=tuple(advantages),
            tool_spans=((10, 16), (20, 23)),
        )

    return [*(spans(row) for row in rows[:-1]), rows[-1]]


def moved(model: Path, rows: list[Row], settings: TrainerSettings) -> Learner:
    """A learner whose LoRA does something, by rewards alone: B is zero at first."""
    learner = Learner.fresh(model, settings, seed=1)
    learner.step([replace(row, tool_spans=()) for row in rows], 0)
    return learner


def gradient(learner: Learner, rows: list[Row]) -> dict[str, Tensor]:
    """The gradient of the next step, by parameter."""
    terms = learner._objective.terms(rows, 0, "grpo")
    for places in learner._reading.plan(rows):
        learner._objective.backward(terms, places)
    own = {name: weight.grad for name, weight in learner._trained.items() if weight.grad is not None}
    learner._optimizer.zero_grad(set_to_none=True)
    return own


def cross_entropy_by_hand(learner: Learner, rows: list[Row]) -> Tensor:
    """The mean over the tools' tokens of -log p, at temperature 1, by the model's own forward pass."""
    nats = []
    for row in rows:
        logprobs_TV = learner._model(input_ids=torch.tensor([row.token_ids_T])).logits[0].log_softmax(-1)
        nats += [
            -logprobs_TV[place - 1, row.token_ids_T[place]]
            for start, end in row.tool_spans
            for place in range(start, end)
        ]
    return torch.stack(nats).mean()


def constrained(rows: list[Row]) -> list[Row]:
    """The rows, the first of which has a completion with a penalty."""
    span = ConstrainedSpan("c", 4, 5, Constraints(presence_penalty=0.5), measured=True)
    return [replace(rows[0], constrained=(span,)), *rows[1:]]


@pytest.mark.parametrize("trees", [True, False])
@pytest.mark.parametrize("change", [list, constrained])
def test_the_gradient_is_that_of_the_step_alone_and_of_the_mean_cross_entropy(
    tiny_model: Path, make_rows: MakeRows, trees: bool, change: Callable[[list[Row]], list[Row]]
) -> None:
    rows = change(with_tools(make_rows(6)))
    settings = WEIGHTED.model_copy(update={"trees": trees})
    learner = moved(tiny_model, rows, settings)
    together = gradient(learner, rows)
    alone = gradient(learner, [replace(row, tool_spans=()) for row in rows])
    (0.25 * cross_entropy_by_hand(learner, rows)).backward()
    by_hand = {name: weight.grad for name, weight in learner._trained.items() if weight.grad is not None}
    assert max(value.abs().max() for value in by_hand.values()) > 1e-3
    for name, value in together.items():
        assert (value - alone[name] - by_hand[name]).abs().max() < 1e-6, name


def test_no_figure_but_the_loss_counts_them(tiny_model: Path, make_rows: MakeRows) -> None:
    rows = with_tools(make_rows(6))
    one, other = moved(tiny_model, rows, SETTINGS), moved(tiny_model, rows, WEIGHTED)
    nats = cross_entropy_by_hand(one, rows).item()
    alone, together = one.step(rows, 0), other.step(rows, 0)
    assert together.loss == pytest.approx(alone.loss + 0.25 * nats, rel=1e-5)
    for name in type(alone).__dataclass_fields__.keys() - {"loss", "grad_norm"}:
        assert getattr(together, name) == pytest.approx(getattr(alone, name), rel=1e-6), name


def test_without_a_weight_the_step_is_the_same_bit_for_bit(tiny_model: Path, make_rows: MakeRows) -> None:
    rows = with_tools(make_rows(6))
    marked, plain = (Learner.fresh(tiny_model, SETTINGS, seed=1) for _ in range(2))
    marked.step(rows, 0)
    plain.step([replace(row, tool_spans=()) for row in rows], 0)
    assert marked.files() == plain.files()


def test_steps_teach_what_tools_return(tiny_model: Path, make_rows: MakeRows) -> None:
    rows = with_tools(make_rows(4))
    alone, together = moved(tiny_model, rows, SETTINGS), moved(tiny_model, rows, WEIGHTED)
    for _ in range(5):
        alone.step(rows, 0)
        together.step(rows, 0)
    assert cross_entropy_by_hand(together, rows) < cross_entropy_by_hand(alone, rows) - 0.05
