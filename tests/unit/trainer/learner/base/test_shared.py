"""All learners of a process stand on one base model, and none of them feels the others."""

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3ForCausalLM

from tests.unit.trainer.learner.test_forward import SMALL, save
from trainer.adapters import files as adapter
from trainer.domain.rows import Row
from trainer.learner.base.shared import shared_base
from trainer.learner.learner import Learner
from whetstone.config.trainer import TrainerSettings

SETTINGS = TrainerSettings(threads=1, device="cpu", learning_rate=1e-3)
CPU = torch.device("cpu")
MakeRows = Callable[..., list[Row]]


@pytest.fixture
def model(tmp_path: Path, tiny_model: Path) -> Path:
    """A base model of this test's own."""
    folder = tmp_path / "base"
    AutoModelForCausalLM.from_pretrained(tiny_model).save_pretrained(folder)
    return folder


def weights(learner: Learner) -> set[int]:
    """Where the base model's weights are."""
    trained = {id(weight) for weight in learner._trained.values()}
    return {weight.data_ptr() for weight in learner._model.parameters() if id(weight) not in trained}


def test_the_learners_of_two_policies_share_the_weights_and_not_the_lora(model: Path, make_rows: MakeRows) -> None:
    one, other = (Learner.fresh(model, SETTINGS, seed) for seed in (1, 2))
    assert weights(one) == weights(other)
    before = dict(other.files())
    one.step(make_rows(4), 0)
    assert other.files() == before


def test_two_that_take_turns_learn_what_each_learns_alone(model: Path, make_rows: MakeRows) -> None:
    alone = {}
    for seed in (1, 2):
        learner = Learner.fresh(model, SETTINGS, seed)
        for turn in range(3):
            learner.step(make_rows(4, seed=10 * seed + turn), turn)
        alone[seed] = dict(learner.files())
    together = {seed: Learner.fresh(model, SETTINGS, seed) for seed in (1, 2)}
    for turn in range(3):
        for seed, learner in together.items():
            learner.step(make_rows(4, seed=10 * seed + turn), turn)
    assert {seed: dict(learner.files()) for seed, learner in together.items()} == alone


def test_a_base_is_read_hashed_and_proven_once(model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = shared_base(model, SETTINGS, CPU)
    learner = Learner.fresh(model, SETTINGS, seed=1)
    adapter.write(tmp_path / "p@v1", learner, parent=0, step=1)
    assert first.proofs.ways == ["segments", "dense"]
    first.proofs.ways.remove("dense")  # what a second proof would find again
    resumed = Learner.resume(model, tmp_path / "p@v1", SETTINGS)
    assert shared_base(model, SETTINGS, CPU) is first and resumed._reading._ways == ["segments"]
    assert resumed._reading.trees and resumed.base is learner.base


def test_what_a_model_cannot_do_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = save(LlamaConfig(**SMALL), tmp_path / "base")
    settings = SETTINGS.model_copy(update={"attention": "flex"})  # has no way back on a CPU
    with caplog.at_level(logging.WARNING, logger="trainer.learner.forward"):
        learners = [Learner.fresh(folder, settings, seed) for seed in (1, 2)]
    assert not any(learner._reading.trees for learner in learners)
    assert caplog.text.count("side by side") == 1


def test_files_that_change_and_other_settings_make_another_base(model: Path) -> None:
    first = shared_base(model, SETTINGS, CPU)
    assert shared_base(model, SETTINGS.model_copy(update={"trees": False}), CPU) is not first
    changed = Qwen3ForCausalLM.from_pretrained(model)
    with torch.no_grad():
        changed.lm_head.weight[0, 0] += 1
    changed.save_pretrained(model)
    second = shared_base(model, SETTINGS, CPU)
    assert second.identity.weights_sha256 != first.identity.weights_sha256
    with torch.no_grad():
        assert not torch.equal(second.modules(CPU).lm_head.weight, first.modules(CPU).lm_head.weight)
