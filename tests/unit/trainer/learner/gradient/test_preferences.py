"""Losses of preferences: by their papers' formulas, and through a whole model in any number of micro-batches."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import safetensors.torch
import torch

from trainer.adapters import files
from trainer.domain.rows import Answer, Row
from trainer.errors import RowError
from trainer.learner.gradient.preferences import dpo, kto, preference_loss
from trainer.learner.learner import Learner
from trainer.learner.updates import parts
from whetstone.config.trainer import TrainerSettings

MakeRows = Callable[..., list[Row]]
Kind = Literal["kto", "dpo"]

SETTINGS = TrainerSettings(threads=1, device="cpu", learning_rate=1e-3, measure_kl=False, preference_beta=0.3)


def paired(rows: list[Row]) -> list[Row]:
    """The rows as pairs of neighbours: the first of each is the better one."""
    return [
        replace(
            row,
            trajectory_id=f"t{place}",
            pair=f"p{place // 2}",
            advantages_T=tuple((1.0 - 2 * (place % 2)) if here else 0.0 for here in row.sampled_T),
            temperatures_T=(1.0,) * len(row.token_ids_T),
        )
        for place, row in enumerate(rows)
    ]


def test_kto_by_hand() -> None:
    ratios, good = torch.tensor([2.0, -1.0, 0.5]), torch.tensor([True, False, True])
    kl = 0.5
    by_hand = [
        1.5 * (1 - 1 / (1 + math.exp(-0.2 * (2.0 - kl)))),
        0.5 * (1 - 1 / (1 + math.exp(-0.2 * (kl + 1.0)))),
        1.5 * 0.5,
    ]
    loss = kto(ratios, good, beta=0.2, desirable_weight=1.5, undesirable_weight=0.5)
    assert loss.item() == pytest.approx(sum(by_hand) / 3)
    below = kto(torch.tensor([-2.0]), torch.tensor([True]), beta=0.2, desirable_weight=1, undesirable_weight=1)
    assert below.item() == pytest.approx(1 - 1 / (1 + math.exp(0.4)))  # the KL of the mean is -2: it counts as 0


def test_dpo_by_hand() -> None:
    loss = dpo(torch.tensor([1.0, 0.0]), torch.tensor([-1.0, 0.5]), beta=0.5)
    by_hand = [math.log(1 + math.exp(-0.5 * 2.0)), math.log(1 + math.exp(0.5 * 0.5))]
    assert loss.item() == pytest.approx(sum(by_hand) / 2)


def test_a_trajectory_counts_as_the_sum_of_its_rows(make_rows: MakeRows) -> None:
    one, other, *pair = paired(make_rows(4))
    rows = [one, replace(other, trajectory_id="t0", advantages_T=one.advantages_T[: len(other.advantages_T)]), *pair]
    rows[1] = replace(rows[1], advantages_T=tuple(1.0 if here else 0.0 for here in other.sampled_T))
    whole = preference_loss(rows, [-3.0, -4.0, -2.0, -5.0], [-4.0, -4.5, -2.0, -4.0], "kto", SETTINGS)
    joined = preference_loss([rows[0], *pair], [-7.0, -2.0, -5.0], [-8.5, -2.0, -4.0], "kto", SETTINGS)
    assert whole.loss == joined.loss
    assert whole.slopes_R == (joined.slopes_R[0], *joined.slopes_R)
    assert joined.slopes_R[0] < 0 < joined.slopes_R[2]  # good rows become likelier


def test_half_a_pair_is_an_error(make_rows: MakeRows) -> None:
    with pytest.raises(RowError, match="only one of its two"):
        preference_loss(paired(make_rows(4))[:3], [-1.0] * 3, [-1.0] * 3, "dpo", SETTINGS)


@pytest.mark.parametrize("kind", ["kto", "dpo"])
def test_the_gradient_is_that_of_the_whole_loss_in_any_number_of_micro_batches(
    tmp_path: Path, tiny_model: Path, make_rows: MakeRows, kind: Kind
) -> None:
    rows, before = paired(make_rows(8, seed=2)), make_rows(6, seed=1)
    settings = SETTINGS.model_copy(update={"clip_norm": 1e9})
    learner = Learner.fresh(tiny_model, settings, seed=1)
    learner.step(before, 0)  # without a B that is not zero, A has no gradient
    files.write(tmp_path / "v1", learner, parent=0, step=1)
    resumed = Learner.resume(tiny_model, tmp_path / "v1", settings)
    policy_R = [logprobs_of(resumed, row) for row in rows]
    with resumed.as_version(None), torch.no_grad():
        reference_R = [logprobs_of(resumed, row).item() for row in rows]
    ratios = torch.stack(policy_R) - torch.tensor(reference_R)
    good = torch.arange(8) % 2 == 0
    if kind == "kto":
        loss = kto(ratios, good, beta=0.3, desirable_weight=1, undesirable_weight=1)
    else:
        loss = dpo(ratios[good], ratios[~good], beta=0.3)
    loss.backward()
    whole = {name: weight.grad for name, weight in resumed._trained.items()}
    for tokens in (100_000, 64):
        parted = settings.model_copy(update={"micro_batch_tokens": tokens})
        stepping = Learner.resume(tiny_model, tmp_path / "v1", parted)
        moments = {name: stepping._optimizer.state[weight].get("exp_avg") for name, weight in stepping._trained.items()}
        assert all(moment is not None for moment in moments.values())
        figures = stepping.step(rows, 1, kind=kind)
        assert figures.loss == pytest.approx(loss.item(), rel=1e-5)
        assert figures.masked_share == 0
        assert figures.effective_share is None
        # The moments of the other kind of step are dropped, so these are 0.1 of the gradient.
        mine = {name: stepping._optimizer.state[weight]["exp_avg"] / 0.1 for name, weight in stepping._trained.items()}
        flat = [torch.cat([one[name].flatten() for name in sorted(mine)]) for one in (mine, whole)]
        assert torch.nn.functional.cosine_similarity(*flat, dim=0) > 0.99999
        assert flat[0].norm() == pytest.approx(flat[1].norm().item(), rel=1e-3)


def logprobs_of(learner: Learner, row: Row) -> torch.Tensor:
    """The sum of the log probabilities of the row's sampled tokens, by the model's own forward pass."""
    ids = torch.tensor([row.token_ids_T])
    logits = learner._model(input_ids=ids).logits[0, :-1].log_softmax(-1)
    each = logits.gather(1, ids[0, 1:, None])[:, 0]
    return each[torch.tensor(row.sampled_T[1:])].sum()


@pytest.mark.parametrize("kind", ["kto", "dpo"])
def test_steps_make_good_rows_likelier_than_bad_rows(tiny_model: Path, make_rows: MakeRows, kind: Kind) -> None:
    rows = paired(make_rows(8, seed=3))
    learner = Learner.fresh(tiny_model, SETTINGS, seed=1)

    def margin() -> float:
        sums = [sum(learner.logprobs_of([Answer("", row.token_ids_T[:1], row.token_ids_T[1:])])[0]) for row in rows]
        return sum(sums[::2]) - sum(sums[1::2])

    before = margin()
    losses = [learner.step(rows, 0, kind=kind).loss for _ in range(6)]
    assert margin() > before
    assert losses[-1] < losses[0]


def test_the_reference_may_be_another_version(tmp_path: Path, tiny_model: Path, make_rows: MakeRows) -> None:
    rows = paired(make_rows(6, seed=4))
    learner = Learner.fresh(tiny_model, SETTINGS, seed=1)
    learner.step(make_rows(6, seed=1), 0)
    files.write(tmp_path / "v1", learner, parent=0, step=1)
    at_itself = learner.step(rows, 1, kind="dpo", reference=tmp_path / "v1")
    assert at_itself.loss == pytest.approx(math.log(2), abs=1e-6)  # every log ratio is 0
    other = Learner.resume(tiny_model, tmp_path / "v1", SETTINGS).step(rows, 1, kind="dpo")
    assert abs(other.loss - math.log(2)) > 1e-4


def test_pairs_stay_together_over_several_updates(tiny_model: Path, make_rows: MakeRows) -> None:
    rows = paired(make_rows(6, seed=5))
    of_parts = [[row.pair for row in part] for part in parts(rows, 3)]
    assert [pair for part in of_parts for pair in part] == ["p0", "p0", "p1", "p1", "p2", "p2"]
    assert len(of_parts) > 1
    assert all(len(part) % 2 == 0 for part in of_parts)
    learner = Learner.fresh(tiny_model, SETTINGS.model_copy(update={"updates_per_step": 3}), seed=1)
    one = Learner.fresh(tiny_model, SETTINGS, seed=1)
    figures = learner.step(rows, 0, kind="dpo")
    alone = [one.step(part, 0, kind="dpo").loss for part in parts(rows, 3)]
    assert learner.files() == one.files()
    tokens = [sum(sum(row.sampled_T) for row in part) for part in parts(rows, 3)]
    assert figures.loss == pytest.approx(sum(a * t for a, t in zip(alone, tokens, strict=True)) / sum(tokens))


def test_moments_of_another_kind_of_step_are_dropped(tmp_path: Path, tiny_model: Path, make_rows: MakeRows) -> None:
    learner = Learner.fresh(tiny_model, SETTINGS, seed=1)
    learner.step(make_rows(4), 0)
    learner.step(paired(make_rows(4)), 0, kind="kto")
    state = safetensors.torch.load(learner.files()["optimizer.safetensors"])
    assert {value.item() for name, value in state.items() if name.startswith("step.")} == {1.0}
