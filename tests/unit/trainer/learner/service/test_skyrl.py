"""Steps on SkyRL's server of the Tinker API, which has another framework (JAX) and an optimizer of its own, beside
steps of this trainer: `make test-all PART=service`."""

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import safetensors.torch
import torch

from trainer.adapters import files
from trainer.domain.rows import Answer, Row, SampledCompletion, merge
from trainer.errors import AdapterMismatch, ServiceRefused
from trainer.learner.learner import Learner
from trainer.learner.service.learner import ServiceLearner, Services
from whetstone.config.settings import STARTER
from whetstone.config.trainer import Kind, TrainerSettings
from whetstone.config.training_service import TrainingServiceSettings
from whetstone.registry.adapters import WEIGHTS
from whetstone.stack.stack import free_ports

pytestmark = pytest.mark.long(part="service")
PYTHON = Path(os.environ.get("WHETSTONE_SKYRL_PYTHON", ".venv-service/bin/python"))
START_S = 240
SETTINGS = TrainerSettings(loss="dapo", learning_rate=1e-3, threads=1, device="cpu")
MODEL = str(STARTER)
LENGTHS = (5, 9, 3, 14, 7, 6)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainingServiceSettings]:
    folder = tmp_path_factory.mktemp("skyrl")
    (port,) = free_ports(1)
    program = Path(__file__).parent / "skyrl_server.py"
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [PYTHON, program, MODEL, str(port), str(folder)], stdout=log, stderr=log, start_new_session=True
        )
    settings = TrainingServiceSettings(url=f"http://127.0.0.1:{port}", sums="row_means")
    try:
        until = time.monotonic() + START_S
        while not _is_healthy(settings.url):
            assert process.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < until, (folder / "log").read_text()
            time.sleep(0.5)
        yield settings
    finally:
        process.terminate()
        process.wait(30)


def _is_healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/api/v1/healthz", trust_env=False).is_success
    except httpx.TransportError:
        return False


def answers(seed: int) -> list[Answer]:
    drawn = torch.Generator().manual_seed(seed)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(5, 250, (count,), generator=drawn).tolist())

    return [Answer("", ids(12), ids(length)) for length in LENGTHS]


def rows_of(learner: Learner, seed: int) -> list[Row]:
    """Rows of random answers, with the logprobs that the learner gives them and advantages of both signs."""
    rows: list[Row] = []
    for number, answer in enumerate(answers(seed)):
        logprobs = tuple(min(0.0, logprob) for logprob in learner.logprobs(answer.prompt_ids, answer.token_ids))
        sampled = SampledCompletion(str(number), answer.prompt_ids, answer.token_ids, logprobs, 0, 1.0)
        rows += merge(f"t{number}", [sampled], [1.0 if number % 2 else -0.5])
    return rows


def read(learner: Learner | ServiceLearner, seed: int = 9) -> torch.Tensor:
    return torch.tensor([logprob for each in learner.logprobs_of(answers(seed)) for logprob in each])


def weights(learner: Learner | ServiceLearner) -> dict[str, torch.Tensor]:
    return safetensors.torch.load(learner.files()[WEIGHTS])


def twins(service: TrainingServiceSettings) -> tuple[ServiceLearner, Learner]:
    """A learner on the service, and one here with the same initial LoRA."""
    there = Services(service).fresh(MODEL, SETTINGS, seed=0)
    here = Learner.fresh(MODEL, SETTINGS, seed=0)
    initial = safetensors.torch.load(there._service.adapter(there._model_id)[WEIGHTS])
    for name, weight in here._trained.items():
        weight.data.copy_(initial[name.replace(".default", "")])
    return there, here


@pytest.mark.parametrize("kind", ["grpo", "sft"])
def test_its_steps_are_ours(service: TrainingServiceSettings, kind: Kind) -> None:
    """The same rows and LoRA give the same loss and gradient, though rows have different lengths; and nearly the same
    adapter after three steps: AdamW divides gradients near 0, in which the programs differ, by their own size."""
    there, here = twins(service)
    # Without clipping, which this server does not know.
    here._settings = here._settings.model_copy(update={"clip_norm": 1e9})
    for version in range(3):
        rows = rows_of(here, seed=version)
        own, others = here.step(rows, version, kind=kind), there.step(rows, version, kind=kind)
        exact = 1e-5 if version == 0 else 3e-2
        assert others.loss == pytest.approx(own.loss, rel=exact)
        assert others.grad_norm == pytest.approx(own.grad_norm, rel=exact)
        assert others.sampled_tokens == own.sampled_tokens == sum(LENGTHS)
    mine, theirs = weights(here), weights(there)
    assert mine.keys() == theirs.keys()
    moved = torch.cat([mine[name].flatten() for name in sorted(mine) if "lora_B" in name])
    apart = torch.cat([(theirs[name] - mine[name]).flatten() for name in sorted(mine) if "lora_B" in name])
    assert apart.norm() < 3e-2 * moved.norm()
    assert (read(there) - read(here)).abs().max() < 0.1
    there.close()


def test_it_continues_where_it_stopped(service: TrainingServiceSettings, tmp_path: Path) -> None:
    there, here = twins(service)
    there.step(rows_of(here, 0), 0)
    folder = tmp_path / "starter@v1"
    files.write(folder, there, parent=0, step=1)
    again = Services(service).resume(MODEL, folder, SETTINGS)
    assert torch.allclose(read(again), read(there), atol=1e-5)
    rows = rows_of(here, 1)
    there.step(rows, 1)
    again.step(rows, 1)
    assert torch.allclose(read(again), read(there), atol=1e-5)  # the optimizer's state came with it
    with again.as_version(None):
        assert torch.allclose(read(again), read(here), atol=1e-4)
    with again.as_version(folder):
        first = read(again)
    assert (first - read(again)).abs().max() > 1e-3
    # What vLLM would load computes what the service does.
    with here.as_version(folder):
        assert torch.allclose(read(here), first, atol=1e-4)
    there.close()
    again.close()


def test_what_it_does_not_know_is_refused(service: TrainingServiceSettings, tmp_path: Path) -> None:
    folder = tmp_path / "starter@v1"
    here = Learner.fresh(MODEL, SETTINGS, seed=0)
    files.write(folder, here, parent=0, step=1)
    with pytest.raises(AdapterMismatch, match="not trained by a training service"):
        Services(service).resume(MODEL, folder, SETTINGS)
    there = Services(service).fresh(MODEL, SETTINGS, seed=0)
    with pytest.raises(ServiceRefused, match="kind dpo"):
        there.step(rows_of(here, 0), 0, kind="dpo")
    there.close()
