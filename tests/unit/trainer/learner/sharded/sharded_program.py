"""What `test_sharded` launches in several processes: they take the steps of a job on a base that they share.

python -m accelerate.commands.launch ... -m tests.unit.trainer.learner.sharded.sharded_program FOLDER RUN

`FOLDER/job.pickle` is a `Job`. RUN names what this launch writes: `RUN.json` and the folders `RUN-v1`, `RUN-v2` ...
"""

import json
import os
import pickle
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_pre_hook
from transformers.modeling_layers import GradientCheckpointingLayer

from trainer.adapters import files
from trainer.domain.rows import Row
from trainer.errors import TrainerError
from trainer.learner.learner import Learner
from trainer.learner.processes.remote import Leader, follow
from trainer.learner.processes.team import Team
from whetstone.config.trainer import Kind, TrainerSettings

PROMPT, ANSWER = (1, 2, 3), (4, 5, 6)
KILLED = "killed"
"""The run in which the last process dies in the middle of a pass of the third step."""


@dataclass(frozen=True)
class Job:
    """What a run does."""

    model: Path
    settings: TrainerSettings
    steps: list[tuple[Kind, list[Row]]]
    """Those of one policy, in order."""
    constrained: list[Row]
    """Rows of a base model's answers under constraints, which only the leader measures."""
    bad: list[Row]
    """Rows of which a follower refuses one."""
    begins_at: int = 0
    """The step that a resumed run begins with."""


def main(folder: Path, run: str) -> None:
    """Do what the job says."""
    job: Job = pickle.loads((folder / "job.pickle").read_bytes())
    team = Team(job.settings)
    if team.leads:
        leader = Leader(team)
        report = lead(leader, job, folder, run)
        leader.dismiss()
        (folder / f"{run}.json").write_text(json.dumps(report))
    else:
        learners: dict[int, Learner] = {}
        if run == KILLED and team.rank == team.size - 1:
            die_in_a_pass(folder / f"{KILLED}-v2")
        follow(team, learners)
        learner = learners[min(learners)]
        shares = bytes_of_base(learner)
        (folder / f"{run}-{team.rank}.json").write_text(json.dumps(shares))
        write(folder / f"{run}-follower-{team.rank}", learner)
    team.leave()


def lead(leader: Leader, job: Job, folder: Path, run: str) -> dict[str, Any]:
    """Take the job's steps, each version written, with readings of the leader alone between them."""
    if job.begins_at:
        learner = leader.resume(job.model, folder / f"{KILLED}-v{job.begins_at}", job.settings)
        report: dict[str, Any] = {}
    else:
        learner = leader.fresh(job.model, job.settings, 1)
        report = asdict(before(leader, learner, job))
    figures = []
    for number, (kind, rows) in enumerate(job.steps[job.begins_at :], job.begins_at):
        figures.append(asdict(learner.step(rows, number, kind=kind)))
        files.write(folder / f"{run}-v{number + 1}", learner, parent=number, step=number + 1)
    with learner.as_version(None):
        base = learner.logprobs(PROMPT, ANSWER)
    shares = bytes_of_base(learner)
    return report | {"figures": figures, "after": learner.logprobs(PROMPT, ANSWER), "base": base, "shares": shares}


@dataclass(frozen=True)
class Before:
    """What comes before the first step."""

    before: list[float]
    """Logprobs of the answer."""
    second: list[float]
    """The same of another policy's learner on the same shares."""
    decided: int
    failure: str
    are_same_shares: bool
    """Whether both learners are on the same memory, but for weights that are padded."""


def before(leader: Leader, learner: Learner, job: Job) -> Before:
    """Read, measure, make a second learner and take a step that fails in another process."""
    second = leader.fresh(job.model, job.settings, 2)
    second.step(job.steps[0][1], 0)
    failure = failing(lambda: learner.step(job.bad, 0))
    measured = learner.measure(job.constrained, 0, {})
    return Before(
        learner.logprobs(PROMPT, ANSWER),
        second.logprobs(PROMPT, ANSWER),
        sum(measured.decided.values()),
        failure,
        addresses(learner) == addresses(second),
    )


def addresses(learner: Learner) -> set[int]:
    """Return where the weights of the learner's layers are."""
    layers = learner._model.get_base_model().base_model.layers
    return {weight.to_local().data_ptr() for weight in layers.parameters() if isinstance(weight, DTensor)}


def failing(act: Callable[[], object]) -> str:
    """Return the name and the words of the error that `act` raises."""
    try:
        act()
    except TrainerError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def die_in_a_pass(version: Path) -> None:
    """Have this process killed in the second layer that it reads once the version is written."""
    layers = 0

    def before_forward(module: torch.nn.Module, _inputs: object) -> None:
        nonlocal layers
        layers += isinstance(module, GradientCheckpointingLayer) and version.exists()
        if layers == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    register_module_forward_pre_hook(before_forward)


def bytes_of_base(learner: Learner) -> dict[str, int]:
    """Return how many bytes of the base this process has between passes, and how many there are in all."""
    base = {weight for weight in learner._model.parameters() if not weight.requires_grad}
    own = sum((weight.to_local() if isinstance(weight, DTensor) else weight).nbytes for weight in base)
    return {"own": own, "all": sum(weight.nbytes for weight in base)}


def write(folder: Path, learner: Learner) -> None:
    folder.mkdir()
    for name, content in learner.files().items():
        (folder / name).write_bytes(content)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
