"""Rows as the Tinker API takes them, and figures from its logprobs."""

import math
from typing import Any

import pytest

from trainer.domain.rows import Row
from trainer.learner.gradient.objective import Terms, figures_of, row_weights
from trainer.learner.service import data
from whetstone.config.trainer import LossName, TrainerSettings


def row(name: str = "a", advantage: float = 2.0, length: int = 5) -> Row:
    """Three tokens that are read, and then sampled ones."""
    sampled = tuple(place >= 3 for place in range(length))
    return Row(
        trajectory_id=name,
        token_ids_T=tuple(range(10, 10 + length)),
        sampled_T=sampled,
        inference_logprobs_T=tuple(-0.5 if here else math.nan for here in sampled),
        versions_T=tuple(4 if here else -1 for here in sampled),
        temperatures_T=(1.0,) * length,
        advantages_T=tuple(advantage if here else 0.0 for here in sampled),
    )


def numbers(datum: dict[str, Any]) -> dict[str, list[float]]:
    return {name: tensor["data"] for name, tensor in datum["loss_fn_inputs"].items()}


def test_each_token_predicts_the_next() -> None:
    made = data.datum(row(), 0.25)
    assert made["model_input"]["chunks"] == [{"type": "encoded_text", "tokens": [10, 11, 12, 13]}]
    assert numbers(made) == {
        "target_tokens": [11, 12, 13, 14],
        "logprobs": [0.0, 0.0, -0.5, -0.5],
        "advantages": [0.0, 0.0, 0.5, 0.5],
    }


def test_what_is_imitated_weighs_alike() -> None:
    assert numbers(data.datum_to_imitate(row(advantage=9.0), 0.25))["advantages"] == [0.0, 0.0, 0.25, 0.25]


@pytest.mark.parametrize(
    ("loss", "name", "low", "high"),
    [("grpo", "ppo", 0.8, 1.2), ("dapo", "ppo", 0.8, 1.28), ("cispo", "cispo", 0.0, 5.0)],
)
def test_bounds_are_ratios(loss: LossName, name: str, low: float, high: float) -> None:
    made = data.loss_of(TrainerSettings(loss=loss), "grpo")
    assert made.name == name
    assert made.config == pytest.approx({"clip_low_threshold": low, "clip_high_threshold": high})


def test_row_means_add_up_to_all_tokens() -> None:
    """The mean over rows of each row's mean over its targets, with scaled weights, is the plain sum."""
    rows = [row("a", 1.0, 5), row("b", -1.0, 9)]
    settings = TrainerSettings(loss="dapo")
    weights = row_weights(rows, 2 + 6, "grpo", settings)
    losses = [[0.1 * place for place in range(len(one.token_ids_T) - 1)] for one in rows]
    plain = sum(weight * sum(each) for weight, each in zip(weights, losses, strict=True))
    scaled = [weight * data.scale_of("row_means", one, 2) for weight, one in zip(weights, rows, strict=True)]
    means = [weight * sum(each) / len(each) for weight, each in zip(scaled, losses, strict=True)]
    assert sum(means) / 2 == pytest.approx(plain)
    assert data.scale_of("tokens", rows[0], 2) == 1.0


def test_requests_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "MOST_ROWS", 3)
    monkeypatch.setattr(data, "MOST_TOKENS", 100)
    assert list(data.requests([40, 40, 40, 10, 10, 10, 500])) == [range(2), range(2, 5), range(5, 6), range(6, 7)]
    assert list(data.requests([])) == []


def test_figures_by_hand() -> None:
    """Two tokens of version 4 each moved from -0.5 to -0.5 + ln 2 and stayed, with ratios 2 and 1."""
    settings = TrainerSettings(loss="dapo")
    terms = Terms([row(advantage=1.0)], [0.5], frozenset(), tokens=2, version_in=4, kind="grpo")
    sums = data.sums_of(terms, [[0.0, 0.0, -0.5 + math.log(2), -0.5]], settings)
    figures = figures_of([terms], [sums], 3.0, 1e-4)
    assert figures.loss == pytest.approx(-0.5 * (1.28 + 1.0))  # the first is clipped
    assert figures.masked_share == 0.5 and figures.fresh_share == 1.0
    assert figures.entropy == pytest.approx((0.5 - math.log(2) + 0.5) / 2)
    assert figures.mismatch_k3 == pytest.approx((2 - 1 - math.log(2)) / 2)
    assert figures.effective_share == pytest.approx(9 / 5 / 2)
    assert (figures.kl, figures.grad_norm, figures.sampled_tokens, figures.rows) == (None, 3.0, 2, 1)
