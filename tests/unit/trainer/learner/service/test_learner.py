"""What a step sends to a service, and what it leaves out. The numbers are a real server's in test_skyrl."""

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.unit.trainer.learner.service.conftest import FakeService, archive_of
from trainer.adapters import files
from trainer.domain.constraints import Constraints
from trainer.domain.rows import Answer, Row, SampledCompletion, merge
from trainer.errors import AdapterMismatch, NotFinite, RowError, ServiceRefused
from trainer.learner.service import data
from trainer.learner.service.learner import STATE, ServiceLearner, Services
from whetstone.config.settings import STARTER
from whetstone.config.trainer import TrainerSettings
from whetstone.config.training_service import TrainingServiceSettings
from whetstone.registry.adapters import CONFIG, WEIGHTS

SETTINGS = TrainerSettings(loss="dapo", learning_rate=1e-3, lora_rank=4, updates_per_step=2, warmup_updates=4)


class Scoring(FakeService):
    """Gives each target the logprob -1, and an adapter of rank 4."""

    def __init__(self) -> None:
        super().__init__()
        self.logprob: float | None = -1.0
        self.rank = 4

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path.endswith("/archive"):
            return 200, archive_of({WEIGHTS: b"weights", CONFIG: json.dumps({"r": self.rank}).encode()})
        if path in ("forward", "forward_backward"):
            lengths = [len(one["loss_fn_inputs"]["target_tokens"]["data"]) for one in body[f"{path}_input"]["data"]]
            outputs = [{"logprobs": {"data": [self.logprob] * length}} for length in lengths]
            self.results[path] = {"loss_fn_outputs": outputs}
        return super().answer(path, body)


@pytest.fixture
def server() -> Iterator[Scoring]:
    with Scoring() as fake:
        yield fake


@pytest.fixture
def learner(server: Scoring) -> Iterator[ServiceLearner]:
    made = Services(TrainingServiceSettings(url=server.url)).fresh(str(STARTER), SETTINGS, seed=0)
    yield made
    made.close()


def rows(count: int = 4, **values: Any) -> list[Row]:
    completions = [SampledCompletion(str(n), (1, 2, 3), (4, 5), (-1.0, -1.0), 0, 1.0, **values) for n in range(count)]
    each = [merge(f"t{n}", [one], [1.0 if n % 2 else -1.0]) for n, one in enumerate(completions)]
    return [row for own in each for row in own]


def test_each_update_has_its_requests_and_its_learning_rate(
    server: Scoring, learner: ServiceLearner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data, "MOST_ROWS", 1)
    progress: list[tuple[int, int]] = []
    figures = learner.step(rows(), 0, lambda done, total: progress.append((done, total)))
    assert progress == [(1, 4), (2, 4), (3, 4), (4, 4)]
    order = [path for path, _, _ in server.requests if path in ("forward_backward", "optim_step")]
    assert order == ["forward_backward", "forward_backward", "optim_step"] * 2
    rates = [body["adam_params"]["learning_rate"] for body in server.sent("optim_step")]
    assert rates == pytest.approx([0.25e-3, 0.5e-3])
    assert (figures.sampled_tokens, figures.rows, figures.grad_norm, figures.mismatch_k3) == (8, 4, 2.5, 0.0)


def test_the_files_say_where_the_service_has_the_rest(server: Scoring, learner: ServiceLearner, tmp_path: Path) -> None:
    learner.step(rows(), 0)
    made = learner.files()
    assert made[WEIGHTS] == b"weights" and json.loads(made[CONFIG])["base_model_name_or_path"] == "starter"
    state = json.loads(made[STATE])
    assert state == {"saved": {"path": "tinker://m-1/weights/w"}, "url": server.url, "kind": "grpo", "updates": 2}
    files.write(tmp_path / "starter@v1", learner, parent=0, step=1)
    again = Services(TrainingServiceSettings(url=server.url)).resume(str(STARTER), tmp_path / "starter@v1", SETTINGS)
    again.step(rows(), 1)
    again.close()
    (loaded,) = server.sent("load_weights")
    assert (loaded["path"], loaded["optimizer"]) == ("tinker://m-1/weights/w", True)
    elsewhere = Services(TrainingServiceSettings(url="http://127.0.0.1:9"))
    with pytest.raises(AdapterMismatch, match="was trained by the service at"):
        elsewhere.resume(str(STARTER), tmp_path / "starter@v1", SETTINGS)


def test_another_kind_of_step_begins_with_new_moments(server: Scoring, learner: ServiceLearner) -> None:
    learner.step(rows(), 0, kind="sft")
    learner.step(rows(), 1)
    (loaded,) = server.sent("load_weights")
    assert loaded["optimizer"] is False
    assert server.sent("optim_step")[-1]["adam_params"]["learning_rate"] == pytest.approx(
        0.5e-3
    )  # the first of its kind


@pytest.mark.parametrize("bent", ["temperature", "penalty"])
def test_what_was_not_sampled_plainly_is_left_out(learner: ServiceLearner, bent: str) -> None:
    constrained = rows(1, constraints=Constraints(presence_penalty=0.5))
    tempered = [replace(row, temperatures_T=(1.0, 1.0, 1.0, 0.7, 0.7)) for row in rows(1)]
    both = [*(tempered if bent == "temperature" else constrained), *rows(3)[1:]]
    assert learner.must_measure(both) and not learner.must_measure(both[1:])
    with pytest.raises(RowError, match="not measured"):
        learner.step(both, 0)
    measured = learner.measure(both, 0, {})
    assert measured.left_out == {"t0"} and [row.trajectory_id for row in measured.rows] == ["t1", "t2"]
    assert learner.step(measured.rows, 0).rows == 2


def test_numbers_that_are_not_finite_end_the_step(server: Scoring, learner: ServiceLearner) -> None:
    server.logprob = None
    with pytest.raises(NotFinite):
        learner.step(rows(), 0)
    assert not server.sent("optim_step")
    server.logprob = -1.0
    server.results["optim_step"] = {"metrics": {"grad_norm": None}}
    with pytest.raises(NotFinite):
        learner.step(rows(), 0)
    assert not server.sent("save_weights")


def test_what_the_api_has_not_is_refused(server: Scoring, learner: ServiceLearner) -> None:
    with pytest.raises(ServiceRefused, match="kind dpo"):
        learner.step(rows(), 0, kind="dpo")
    server.rank = 8
    with pytest.raises(ServiceRefused, match="rank 8"):
        learner.step(rows(), 0)
    with pytest.raises(RowError, match="begins with a sampled token"):
        learner.step([replace(rows(1)[0], sampled_T=(True,) * 5)], 0)


def test_versions_are_read_with_models_of_their_own(server: Scoring, learner: ServiceLearner) -> None:
    answers = [Answer("", (1, 2, 3), (4, 5)), Answer("", (1,), (2,))]
    assert learner.logprobs_of(answers) == [[-1.0, -1.0], [-1.0]]
    with learner.as_version(None):
        learner.logprobs_of(answers)
    assert len(server.sent("create_model")) == 2
    assert len(server.sent("unload_model")) == 1
    assert not learner.can_double and math.isfinite(learner.logprobs_of(answers)[0][0])
