"""Run either side on the same task, and return its points: ours on a running stack, TRL's in a process of its own."""

import os
import subprocess
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from sqlalchemy import Engine, func, select

from benchmarks.beside_trl.run import Point, Run
from benchmarks.gpu.cards import Peaks
from benchmarks.kit.process import ROOT
from benchmarks.learning.policy import LearningPolicy
from benchmarks.real.task import MICRO_BATCH_TOKENS
from benchmarks.real.tasks import TASKS
from benchmarks.real.training import line_of
from migrations.schema import completions, policy_versions, steps, trajectories
from whetstone.config.settings import load
from whetstone.database.engine import connect
from whetstone.errors import WhetstoneError
from whetstone.stack.stack import running

TRL_PYTHON = ROOT / ".venv-trl" / "bin" / "python"
TASK = TASKS["routing-groups"]
EVERY = "all processes"


class SideFailed(WhetstoneError):
    """A side ended without a step."""


class Result(msgspec.Struct, frozen=True):
    """What a side did."""

    points: list[Point]
    peak_mib: int
    """Most resident memory of all its processes together, and of this one. What several share counts for each."""


def ours(run: Run, count: int, console: Console) -> Result:
    """Run the stack and the app until the policy has taken `count` steps.

    Raises:
        StartFailed: a part of the stack does not start.
        AppFailed: the app ended early.
        SideFailed: no step was promoted.
    """
    given: dict[str, Any] = {
        "data": Path(run.folder),
        "model": run.model,
        "seed": run.seed,
        "proxy__port": 0,
        "trainer__learning_rate": run.learning_rate,
        "trainer__lora_rank": run.lora_rank,
        "trainer__lora_alpha": run.lora_alpha,
        "trainer__groups_per_step": run.groups,
        "trainer__max_groups_per_step": run.groups,
        "trainer__micro_batch_tokens": MICRO_BATCH_TOKENS,  # TRL's micro-batch of eight answers has about as many
        "trainer__keep_adapters": 1000,
    }
    settings, peaks = load(environment={}, **given, **TASK.settings), _peaks()
    with running(settings, lambda text: console.print(f"[dim]{text}[/dim]"), console) as stack, peaks.during():
        policy = LearningPolicy(stack, TASK.app, line_of, console)
        began = datetime.now().astimezone()
        policy.learn(count, "--questions", "0", *TASK.training_options(False))
        points = _points(connect(settings.database_url), settings.project, began)
        if not points:
            raise SideFailed(f"no step was promoted: {settings.data / 'logs'}")
    return Result(points, peaks.of[EVERY].host_mib)


def _points(engine: Engine, project: str, began: datetime) -> list[Point]:
    """Return a point for each promoted version."""
    of_step = (
        select(func.count(), func.sum(completions.c.prompt_tokens + completions.c.completion_tokens))
        .join_from(trajectories, completions, trajectories.c.id == completions.c.trajectory_id)
        .where(trajectories.c.project == project, completions.c.project == project)
    )
    promoted = (
        select(steps.c.number, steps.c.ended_at, policy_versions.c.adapter_path)
        .join_from(steps, policy_versions, steps.c.version_out == policy_versions.c.version)
        .where(steps.c.project == project, policy_versions.c.project == project, steps.c.state == "promoted")
        .order_by(steps.c.number)
    )
    points, trained, tokens = list[Point](), 0, 0
    with engine.connect() as connection:
        for number, ended_at, adapter in connection.execute(promoted).all():
            until = select(func.count()).where(completions.c.project == project, completions.c.created_at <= ended_at)
            attempts = connection.execute(until).scalar_one()
            count, length = connection.execute(of_step.where(trajectories.c.trained_in_step == number)).one()
            trained, tokens = trained + count, tokens + (length or 0)
            points.append(Point(adapter, (ended_at - began).total_seconds(), attempts, trained, tokens))
    return points


def trl(run: Run, console: Console) -> Result:
    """Run TRL until `run.seconds` after its training began.

    Raises:
        SideFailed: it ended without a step, or with an error; its log is in the run's folder.
    """
    folder = Path(run.folder)
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "trl.log"
    command = [str(TRL_PYTHON), "-m", "benchmarks.beside_trl.trl_side", msgspec.json.encode(run).decode()]
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
    }
    points, peaks = list[Point](), _peaks()
    with (
        log.open("wb") as errors,
        subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=errors) as process,
        peaks.during(),
    ):
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith(b'{"adapter"'):
                    points.append(msgspec.json.decode(line, type=Point))
                    console.print(f"step {len(points)}  {points[-1].seconds:.0f} s", highlight=False)
                else:
                    errors.write(line)
            process.wait()
        finally:
            process.kill()
    if process.returncode or not points:
        raise SideFailed(f"TRL ended with {process.returncode} after {len(points)} steps: {log}")
    return Result(points, peaks.of[EVERY].host_mib)


def _peaks() -> Peaks:
    """Return what watches the memory of this process and of all that it starts."""
    return Peaks(lambda: {EVERY: os.getpid()})
