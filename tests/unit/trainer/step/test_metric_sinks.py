"""Figures besides SQL: TensorBoard's own reader finds them; a sink that is missing or fails says so and no more."""

import logging
import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util import tensor_util

from migrations import schema
from trainer.domain.figures import EndedStep
from trainer.errors import SinkMissing
from trainer.step.metric_sinks import Sinks, require
from trainer.store.unit_of_work import Store
from whetstone.config.settings import Settings, as_environment

AT = datetime(2026, 1, 1, 12, tzinfo=UTC)


def step(number: int, policy: str = "starter", **figures: float) -> EndedStep:
    return EndedStep(policy, number, AT, {"loss": 0.5, "phases/train": 2.0} | figures)


def read(folder: Path) -> dict[str, list[tuple[int, float, float]]]:
    """Tag -> (step, seconds since 1970, figure), as TensorBoard reads them."""
    events = EventAccumulator(str(folder))
    events.Reload()
    assert {events.SummaryMetadata(tag).plugin_data.plugin_name for tag in events.Tags()["tensors"]} == {"scalars"}
    return {
        tag: [
            (one.step, one.wall_time, float(tensor_util.make_ndarray(one.tensor_proto))) for one in events.Tensors(tag)
        ]
        for tag in events.Tags()["tensors"]
    }


def test_tensorboard_reads_each_steps_figures_policy_by_policy(tmp_path: Path) -> None:
    sinks = Sinks(("tensorboard",), tmp_path)
    sinks.tell(step(1))
    sinks.tell(step(2, loss=0.25))
    sinks.tell(step(1, "second", loss=-1.0))
    at = AT.timestamp()
    told = read(tmp_path / "tensorboard" / "starter")
    assert told == {"loss": [(1, at, 0.5), (2, at, 0.25)], "phases/train": [(1, at, 2.0), (2, at, 2.0)]}
    assert read(tmp_path / "tensorboard" / "second")["loss"] == [(1, at, -1.0)]


def test_without_sinks_nothing_is_written_and_nothing_imported(tmp_path: Path) -> None:
    Sinks((), tmp_path).tell(step(1))
    assert list(tmp_path.iterdir()) == []
    look = (
        "import sys, trainer.step.metric_sinks; sys.exit(bool({'tensorboard', 'wandb', 'torch'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", look], cwd=Path(__file__).parents[4], check=False).returncode == 0


def test_a_sink_that_fails_is_told_of_once_and_nothing_more(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "tensorboard").write_text("a file where the folder belongs")
    sinks = Sinks(("tensorboard",), tmp_path)
    with caplog.at_level(logging.ERROR):
        for number in range(1, 4):
            sinks.tell(step(number))
    (message,) = caplog.messages
    assert message.startswith("sink tensorboard gets no more metrics until the next start: ")


def test_a_sink_that_is_not_installed_is_one_sentence_with_its_remedy() -> None:
    require(("tensorboard",))
    with pytest.raises(SinkMissing, match="pip install wandb"):
        require(("tensorboard", "wandb"))


@pytest.mark.slow
@pytest.mark.long(part="stacks")
def test_a_worker_whose_sink_is_not_installed_does_not_start(tmp_path: Path) -> None:
    settings = Settings(data=tmp_path, broker="memory://", trainer={"sinks": ("wandb",)})
    command = [sys.executable, "-m", "celery", "-A", "trainer.tasks", "worker", "--pool", "solo"]
    environment = {**os.environ, **as_environment(settings)}
    worker = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert worker.returncode != 0
    assert "pip install wandb" in worker.stderr and "Traceback" not in worker.stderr


@pytest.mark.slow
@pytest.mark.long(part="stacks")
def test_a_worker_without_a_vllm_does_not_start(tmp_path: Path) -> None:
    settings = Settings(data=tmp_path, broker="memory://")
    command = [sys.executable, "-m", "celery", "-A", "trainer.tasks", "worker", "--pool", "solo"]
    environment = {**os.environ, **as_environment(settings)}
    worker = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert worker.returncode != 0
    assert "vllm.urls names no server" in worker.stderr and "Traceback" not in worker.stderr


def test_what_sinks_are_told_is_the_last_step_that_is_over(engine: Engine, seed: Any) -> None:
    store = Store(engine, "default")
    assert store.ended("starter") is None
    row = {"project": "default", "policy": "starter", "version_in": 0, "groups": 1, "trajectories": 2, "config": {}}
    row |= {"attempt": 1, "created_at": AT}
    for number, state, ended_at in ((1, "promoted", AT), (2, "rejected", AT), (3, "claimed", None)):
        seed.insert(
            schema.steps, id=f"starter#{number}", number=number, state=state, ended_at=ended_at, loss=0.0, kl=None,
            phases={"train": 2.5}, discarded={"stale": 3}, **row,
        )  # fmt: skip
    ended = store.ended("starter")
    assert ended is not None and (ended.number, ended.ended_at) == (2, AT)
    assert ended.figures == {
        "version_in": 0, "groups": 1, "trajectories": 2, "loss": 0.0, "phases/train": 2.5, "discarded/stale": 3,
    }  # fmt: skip
