"""What `test_team` launches in two processes: one takes steps, good and bad ones, the other follows; both tell.

python -m accelerate.commands.launch ... -m tests.unit.trainer.learner.team_program FOLDER
"""

import gc
import json
import pickle
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.unit.trainer.learner.gradient.shortage import shortage
from trainer.adapters import files
from trainer.learner.learner import Learner
from trainer.learner.processes.remote import Leader, follow
from trainer.learner.processes.team import Team

HOLDS, TOO_LONG = 130, 260
"""Tokens of a micro-batch."""


def main(folder: Path) -> None:
    """Do what `folder/job.pickle` says; write `report.json` and each process's files."""
    job = pickle.loads((folder / "job.pickle").read_bytes())
    team = Team(job["settings"])
    report = {"sums": sums(team)}
    if not team.leads:
        held: dict[int, Learner] = {}
        with shortage(lambda way, tokens: bool(held) and runs_out(team, way, tokens)):  # not while a model is proven
            follow(team, held)
        write(folder / "follower", held[max(held)])
        (folder / "held.json").write_text(json.dumps(sorted(held)))
    else:
        leader = Leader(team)
        report |= lead(leader, team, job, folder)
        leader.dismiss()
        (folder / "report.json").write_text(json.dumps(report))
    team.leave()


def lead(leader: Leader, team: Team, job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Two good steps with every failure between them, and one more from the disk."""
    short = short_of_memory(leader, team, job, folder)
    told = between(leader, leader.fresh(job["model"], job["settings"], seed=1), job, folder)
    gc.collect()  # a failure's traceback has had hold of the learner
    resumed = leader.resume(job["model"], folder / "v2", job["settings"])
    told["figures"].append(asdict(resumed.step(job["first"], 2)))
    write(folder / "resumed", resumed)
    return told | {"short": short}


def between(leader: Leader, learner: Learner, job: dict[str, Any], folder: Path) -> dict[str, Any]:
    rounds: list[tuple[int, int]] = []
    figures = [asdict(learner.step(job["first"], 0, lambda done, total: rounds.append((done, total))))]
    failures = {name: failing(learner, partial(learner.step, rows, 0)) for name, rows in job["bad"].items()}
    failures["progress"] = failing(learner, lambda: learner.step(job["first"], 0, lose_the_lease))
    failures["resume"] = failing(learner, lambda: leader.resume(job["model"], folder / "nothing", job["settings"]))
    figures.append(asdict(learner.step(job["second"], 1)))
    write(folder / "leader", learner)
    files.write(folder / "v2", learner, parent=1, step=2)
    return {"rounds": rounds, "figures": figures, "failures": failures}


def failing(learner: Learner, act: Callable[[], object]) -> tuple[str, str, bool, float]:
    """Name and words of what `act` raises, whether the learner has moved, and how long it took."""
    before, began = learner.files(), time.monotonic()
    try:
        act()
    except Exception as error:
        return type(error).__name__, str(error), learner.files() != before, time.monotonic() - began
    return "nothing", "", learner.files() != before, 0.0


def lose_the_lease(done: int, _total: int) -> None:
    if done == 2:
        raise ConnectionAbortedError("the lease is lost")


def runs_out(team: Team, way: str, tokens: int) -> bool:
    """The follower's device has no memory for the way back of HOLDS tokens, and neither has any for TOO_LONG."""
    return tokens == TOO_LONG or (not team.leads and way == "backward" and tokens > HOLDS)


def short_of_memory(leader: Leader, team: Team, job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Steps whose micro-batches do not fit on the follower's device, and one with a row that fits nowhere."""
    learner = leader.fresh(job["model"], job["roomy"], seed=1)
    rounds: list[tuple[int, int]] = []
    with shortage(partial(runs_out, team)):
        figures = [asdict(learner.step(rows, 0, lambda *of: rounds.append(of))) for rows in job["many"]]
        failure = failing(learner, partial(learner.step, job["too long"], 0))
    write(folder / "short", learner)
    return {"figures": figures, "rounds": [total for done, total in rounds if done == 1], "failure": failure}


def sums(team: Team) -> list[Any]:
    """Gradients and figures, added up: both processes have the first, one of them the second, none the third."""
    weights = [torch.zeros(2, requires_grad=True) for _ in range(3)]
    weights[0].grad = torch.tensor([1.0, 10.0]) * (team.rank + 1)
    if team.rank == 1:
        weights[1].grad = torch.tensor([5.0, 7.0])
    figures = team.add_up(weights, [0.1 + team.rank, float("nan") if team.rank else 0.0])
    return [*(None if weight.grad is None else weight.grad.tolist() for weight in weights), figures[0], str(figures[1])]


def write(folder: Path, learner: Learner) -> None:
    folder.mkdir()
    for name, content in learner.files().items():
        (folder / name).write_bytes(content)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
