"""Unsloth's backend in the training worker, on a CPU, against the other backend: the same groups, five steps each."""

import math
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from benchmarks.faults.killed.__main__ import Run, settings_of
from benchmarks.faults.killed.records import FIGURES, GROUPS_PER_STEP, Ledger, Step, freeze, ledger, wrong_with
from benchmarks.kit.process import ROOT, running_adapter_vllm, running_broker
from migrations.run import upgrade
from trainer.learner.learner import Learner
from whetstone.config.settings import Settings
from whetstone.database.engine import connect

PYTHON = ROOT / ".venv-unsloth" / "bin" / "python"
STEPS = 5
STILL_S = 1500.0
"""Longest run of one worker: this model's steps take a hundred times the starter's."""
TOLERANCE = 1e-4
"""Largest difference relative to the norm: of a figure, and of all of an adapter's weights."""

pytestmark = [pytest.mark.stack, pytest.mark.long(part="unsloth"), pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def runs(smollm2_fp32: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ledger]:
    """What the worker left with each backend, on copies of one database."""
    data = tmp_path_factory.mktemp("unsloth")
    of_killed = settings_of(data, seed=0)
    trainer = of_killed.trainer.model_copy(update={"learning_rate": 5e-5, "lease_s": 300.0})
    common = of_killed.model_copy(update={"model": str(smollm2_fp32), "trainer": trainer})
    template = data / "frozen.db"
    upgrade(f"sqlite:///{template}")
    engine = connect(f"sqlite:///{template}")
    freeze(engine, common, STEPS, Learner.fresh(common.model, common.trainer, common.seed).logprobs)
    engine.dispose()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UNSLOTH_FORCE_CPU", "1")
        patch.setenv("UNSLOTH_COMPILE_LOCATION", str(data / "compiled"))
        return {backend: _trained(common, backend, template) for backend in ("hf", "unsloth")}


def _trained(common: Settings, backend: str, template: Path) -> Ledger:
    python = PYTHON if backend == "unsloth" else None
    with running_broker() as messages, running_adapter_vllm(common) as url:
        settings = common.model_copy(
            update={
                "data": common.data / backend,
                "broker": messages,
                "vllm": common.vllm.model_copy(update={"urls": (url,)}),
                "trainer": common.trainer.model_copy(update={"backend": backend, "python": python}),
            }
        )
        settings.data.mkdir()
        (settings.data / "whetstone.db").write_bytes(template.read_bytes())
        engine = connect(settings.database_url)
        try:
            Run(settings, engine, still_s=STILL_S).to_its_end()
            return ledger(engine)
        finally:
            engine.dispose()


def weights(step: Step) -> np.ndarray:
    """All weights of the step's adapter, one after the other."""
    tensors = safetensors.numpy.load(step.files["adapter_model.safetensors"])
    return np.concatenate([tensors[name].ravel() for name in sorted(tensors)])


@pytest.mark.parametrize("backend", ["hf", "unsloth"])
def test_every_group_is_trained_on_once(runs: dict[str, Ledger], backend: str) -> None:
    assert wrong_with(runs[backend], STEPS) == []
    assert runs[backend].groups == {"trained": STEPS * GROUPS_PER_STEP}


def test_figures_are_those_of_the_other_backend(runs: dict[str, Ledger]) -> None:
    for ours, theirs in zip(runs["hf"].steps, runs["unsloth"].steps, strict=True):
        for name, one, other in zip(FIGURES, ours.figures, theirs.figures, strict=True):
            assert math.isclose(one, other, rel_tol=TOLERANCE, abs_tol=1e-9), (ours.number, name, one, other)
        assert ours.taught == theirs.taught


def test_adapters_are_those_of_the_other_backend(runs: dict[str, Ledger]) -> None:
    before = np.zeros(1)
    for ours, theirs in zip(runs["hf"].steps, runs["unsloth"].steps, strict=True):
        one, other = weights(ours), weights(theirs)
        assert np.linalg.norm(one - other) <= TOLERANCE * np.linalg.norm(one), ours.number
        assert np.linalg.norm(one - before) > 0, "it trains"
        before = one
