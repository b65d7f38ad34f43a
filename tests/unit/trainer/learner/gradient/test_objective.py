"""The distance from the base model is measured on a part of a step's rows, and is that of those rows."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from trainer.domain.rows import Row
from trainer.learner.gradient import objective
from trainer.learner.learner import Learner
from trainer.learner.losses import k3
from whetstone.config.trainer import TrainerSettings

MakeRows = Callable[..., list[Row]]

SETTINGS = TrainerSettings(threads=1, device="cpu", micro_batch_tokens=128)


def moved(model: Path, rows: list[Row], **settings: float) -> Learner:
    """A learner whose LoRA does something, and does not move any more."""
    learner = Learner.fresh(model, SETTINGS.model_copy(update=settings), seed=1)
    for weight in learner._trained.values():
        drawn = torch.randn(weight.shape, generator=torch.Generator().manual_seed(weight.numel()))
        weight.data.copy_(0.05 * drawn)
    return learner


@torch.no_grad()
def distances(learner: Learner, row: Row) -> list[float]:
    """k3 to the base model of each sampled token, by the model's own forward pass."""

    def logprobs() -> torch.Tensor:
        logits_TV = learner._model(input_ids=torch.tensor([row.token_ids_T])).logits[0, :-1]
        temperatures_T1 = torch.tensor(row.temperatures_T[1:])[:, None]
        return (logits_TV / temperatures_T1).log_softmax(-1).gather(-1, torch.tensor(row.token_ids_T[1:])[:, None])

    own_T1 = logprobs()
    with learner._model.disable_adapter():
        base_T1 = logprobs()
    return k3(own_T1, base_T1)[torch.tensor(row.sampled_T[1:])][:, 0].tolist()


def mean_distance(learner: Learner, rows: list[Row]) -> float:
    nats = [one for row in rows for one in distances(learner, row)]
    return sum(nats) / len(nats)


@pytest.fixture
def by_share_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """However few tokens that measures."""
    monkeypatch.setattr(objective, "LEAST_MEASURED_TOKENS", 1)


@pytest.mark.usefixtures("by_share_alone")
@pytest.mark.parametrize("trees", [True, False])
def test_it_is_the_mean_over_the_tokens_of_the_rows_that_were_drawn(
    tiny_model: Path, make_rows: MakeRows, trees: bool
) -> None:
    rows = make_rows(12)
    learner = moved(tiny_model, rows, kl_share=0.2, trees=trees)
    drawn = learner._objective.terms(rows, 4, "grpo").measured
    assert len(drawn) == 3
    expected = mean_distance(learner, [rows[place] for place in sorted(drawn)])
    assert expected != pytest.approx(mean_distance(learner, rows), rel=1e-3)
    assert learner.step(rows, version_in=4).kl == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("settings", [{"kl_share": 1.0}, {"kl_weight": 0.1}])
def test_it_is_that_of_all_rows_where_that_is_asked_for_or_needed(
    tiny_model: Path, make_rows: MakeRows, settings: dict[str, float]
) -> None:
    rows = make_rows(6)
    learner = moved(tiny_model, rows, **settings)
    expected = mean_distance(learner, rows)
    assert learner.step(rows, version_in=4).kl == pytest.approx(expected, rel=1e-4)


def test_a_small_share_is_of_at_least_as_many_tokens_as_make_a_mean(tiny_model: Path, make_rows: MakeRows) -> None:
    rows = make_rows(400)
    learner = moved(tiny_model, rows[:4], kl_share=0.001)
    drawn = learner._objective.terms(rows, 4, "grpo").measured
    tokens = [sum(rows[place].sampled_T) for place in drawn]
    assert sum(tokens) >= objective.LEAST_MEASURED_TOKENS > sum(tokens) - max(tokens)
    few = rows[:3]
    assert sum(sum(row.sampled_T) for row in few) < objective.LEAST_MEASURED_TOKENS
    assert learner._objective.terms(few, 4, "grpo").measured == {0, 1, 2}


@pytest.mark.usefixtures("by_share_alone")
def test_the_rows_change_from_step_to_step_and_are_the_same_for_a_step_taken_again(
    tiny_model: Path, make_rows: MakeRows
) -> None:
    rows = make_rows(100)
    of_learner = moved(tiny_model, rows)._objective

    def measured(step: int, version_in: int) -> frozenset[int]:
        of_step = [replace(row, trajectory_id=f"{step}-{row.trajectory_id}") for row in rows]
        return of_learner.terms(of_step, version_in, "grpo").measured

    drawn = [measured(step, step) for step in range(200)]
    assert drawn[7] == measured(7, version_in=9)  # a version number is used up by each attempt
    assert {len(measured) for measured in drawn} == {5}
    times = [sum(place in measured for measured in drawn) for place in range(100)]
    assert min(times) > 0 and max(times) < 30  # 10 on average


@pytest.mark.usefixtures("by_share_alone")
def test_the_others_cost_no_pass_through_the_base(tiny_model: Path, make_rows: MakeRows) -> None:
    rows = make_rows(20)
    read: dict[bool, int] = {True: 0, False: 0}
    learner = moved(tiny_model, rows, kl_share=0.1)
    layer = learner._model.get_base_model().model.layers[0].self_attn.q_proj

    def count(_module: torch.nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
        read[layer.disable_adapters] += arguments[0].shape[:-1].numel()

    layer.register_forward_pre_hook(count)
    assert learner.step(rows, version_in=0).kl is not None
    drawn = learner._objective.terms(rows, 0, "grpo").measured
    assert read[True] == sum(len(rows[place].token_ids_T) for place in drawn)
    assert read[False] == sum(len(row.token_ids_T) for row in rows)
    without = moved(tiny_model, rows, measure_kl=False)
    assert without.step(rows, version_in=0).kl is None
