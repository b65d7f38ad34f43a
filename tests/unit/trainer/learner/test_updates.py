import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch

from trainer.adapters import files as adapter
from trainer.domain.rows import Row
from trainer.errors import NotFinite
from trainer.learner.learner import Learner
from trainer.learner.updates import FLOOR, learning_rate, of_step, parts
from whetstone.config.trainer import TrainerSettings

MakeRows = Callable[..., list[Row]]

SETTINGS = TrainerSettings(threads=1, device="cpu", learning_rate=1e-3, measure_kl=False)
TWICE = SETTINGS.model_copy(update={"updates_per_step": 2})


def row(trajectory_id: str, sampled: int) -> Row:
    length = sampled + 1
    return Row(
        trajectory_id=trajectory_id,
        token_ids_T=(1,) * length,
        sampled_T=(False, *(True,) * sampled),
        inference_logprobs_T=(math.nan, *(-1.0,) * sampled),
        versions_T=(-1, *(0,) * sampled),
        temperatures_T=(1.0,) * length,
        advantages_T=(1.0,) * length,
    )


def names(divided: list[list[Row]]) -> list[str]:
    return ["".join(row.trajectory_id for row in part) for part in divided]


def test_parts_have_about_as_many_tokens_each_and_keep_the_order() -> None:
    rows = [row(name, sampled) for name, sampled in zip("abcdef", (2, 2, 2, 2, 2, 2), strict=True)]
    assert names(parts(rows, 1)) == ["abcdef"]
    assert names(parts(rows, 2)) == ["abc", "def"]
    assert names(parts(rows, 4)) == ["ab", "c", "de", "f"]
    assert names(parts([row("a", 9), row("b", 1), row("c", 1)], 2)) == ["a", "bc"]


def test_rows_of_a_trajectory_stay_in_one_part_and_no_part_is_empty() -> None:
    assert names(parts([row("a", 1), row("a", 1), row("b", 1), row("b", 1)], 3)) == ["aa", "bb"]
    assert names(parts([row("a", 1), row("b", 1)], 5)) == ["a", "b"]


def test_a_supervised_step_takes_epochs_of_small_updates_each_in_another_order() -> None:
    rows = [row(name, 2) for name in "aabcdefgh"]
    settings = SETTINGS.model_copy(update={"sft_epochs": 3, "sft_rows_per_update": 3})
    divided = of_step(rows, "sft", settings)
    assert len(divided) == 9
    epochs = ["".join(names(divided[start : start + 3])) for start in (0, 3, 6)]
    assert epochs[0] == "aabcdefgh"
    assert len(set(epochs)) == 3
    assert all(sorted(epoch) == list("aabcdefgh") and "aa" in epoch for epoch in epochs)
    assert of_step(rows, "sft", settings) == divided
    assert of_step(rows, "grpo", settings) == [rows]


def test_without_settings_of_its_own_a_supervised_step_is_divided_like_others() -> None:
    rows = [row(name, 2) for name in "abcd"]
    assert of_step(rows, "sft", TWICE) == parts(rows, 2)


def test_epochs_bring_answers_nearer_than_one_reading(tiny_model: Path, make_rows: MakeRows) -> None:
    rows = make_rows(6)
    often = SETTINGS.model_copy(update={"sft_epochs": 4, "sft_rows_per_update": 2})
    losses = []
    for settings in (SETTINGS, often):
        learner = Learner.fresh(tiny_model, settings, seed=1)
        learner.step(rows, 0, kind="sft")
        losses.append(learner.step(rows, 0, kind="sft").loss)
    assert losses[1] < losses[0]


def test_the_learning_rate_warms_up_falls_and_stays() -> None:
    settings = SETTINGS.model_copy(update={"warmup_updates": 4, "decay_updates": 10})
    rates = [learning_rate(settings, 1e-3, "grpo", updates) for updates in (0, 1, 3, 4, 9, 14, 99)]
    half = FLOOR + (1 - FLOOR) / 2
    assert rates == pytest.approx([2.5e-4, 5e-4, 1e-3, 1e-3, half * 1e-3, FLOOR * 1e-3, FLOOR * 1e-3])


def test_without_a_schedule_the_learning_rate_is_constant_and_supervised_steps_may_have_their_own() -> None:
    assert {learning_rate(SETTINGS, 1e-3, kind, 7) for kind in ("grpo", "sft")} == {1e-3}
    own = SETTINGS.model_copy(update={"sft_learning_rate": 2e-3})
    assert [learning_rate(own, 1e-3, kind, 7) for kind in ("grpo", "sft")] == [1e-3, 2e-3]


def test_a_step_of_two_updates_is_two_steps_on_its_halves(tiny_model: Path, make_rows: MakeRows) -> None:
    rows = make_rows(8)
    one, two = Learner.fresh(tiny_model, SETTINGS, seed=1), Learner.fresh(tiny_model, TWICE, seed=1)
    figures = [one.step(part, 0) for part in parts(rows, 2)]
    both = two.step(rows, 0)
    assert two.files() == one.files()
    assert both.mismatch_k3 == figures[0].mismatch_k3 != figures[1].mismatch_k3
    assert both.grad_norm == max(part.grad_norm for part in figures)
    tokens = [part.sampled_tokens for part in figures]
    assert both.sampled_tokens == sum(tokens)
    loss = sum(part.loss * count for part, count in zip(figures, tokens, strict=True)) / sum(tokens)
    assert both.loss == pytest.approx(loss)


def test_if_the_second_update_fails_the_first_is_undone(tmp_path: Path, tiny_model: Path, make_rows: MakeRows) -> None:
    learner = Learner.fresh(tiny_model, TWICE, seed=1)
    fresh = learner.files()
    rows = make_rows(8)
    *others, last = rows
    broken = [*others, replace(last, inference_logprobs_T=(math.nan,) * len(last.token_ids_T))]
    with pytest.raises(NotFinite):
        learner.step(broken, 0)
    assert learner.files() == fresh
    learner.step(rows, 0)
    moved = learner.files()
    with pytest.raises(NotFinite):
        learner.step(broken, 1)
    assert learner.files() == moved


def test_the_schedule_goes_on_where_a_resumed_learner_stopped(
    tmp_path: Path, tiny_model: Path, make_rows: MakeRows
) -> None:
    settings = TWICE.model_copy(update={"warmup_updates": 8, "weight_decay": 0.1})
    undisturbed = Learner.fresh(tiny_model, settings, seed=3)
    assert undisturbed.step(make_rows(8), 0).learning_rate == pytest.approx(2.5e-4)
    adapter.write(tmp_path / "p@v1", undisturbed, parent=0, step=1)
    resumed = Learner.resume(tiny_model, tmp_path / "p@v1", settings)
    figures = [learner.step(make_rows(8, seed=2), 1) for learner in (undisturbed, resumed)]
    assert figures[0] == figures[1]
    assert figures[0].learning_rate == pytest.approx(5e-4)
    assert resumed.files() == undisturbed.files()


def test_moments_of_supervised_steps_do_not_scale_policy_gradients(
    tmp_path: Path, tiny_model: Path, make_rows: MakeRows
) -> None:
    """The first update of a kind moves each weight by the whole learning rate, as AdamW's first ever does."""
    rows = make_rows(8)
    learner = Learner.fresh(tiny_model, SETTINGS, seed=4)
    taught = [replace(one, advantages_T=(1.0,) * len(one.token_ids_T)) for one in rows]
    for version in range(3):
        learner.step(taught, version, kind="sft")
    adapter.write(tmp_path / "p@v3", learner, parent=2, step=3)
    before = moments(learner)
    resumed = Learner.resume(tiny_model, tmp_path / "p@v3", SETTINGS)
    assert moments(resumed) == before and {updates for updates, _ in before.values()} == {3}
    for one in (learner, resumed):
        one.step(rows, 3)
    assert resumed.files() == learner.files()
    assert set(moments(learner).values()) == {(1, False)}
    learner.step(rows, 4)
    assert set(moments(learner).values()) == {(2, False)}


def moments(learner: Learner) -> dict[str, tuple[int, bool]]:
    """Return weight -> updates that its moments are of, and whether by supervised steps."""
    state = safetensors.torch.load(learner.files()["optimizer.safetensors"])
    names = [key.removeprefix("step.") for key in state if key.startswith("step.")]
    return {name: (int(state[f"step.{name}"]), bool(state[f"supervised.{name}"])) for name in names}
