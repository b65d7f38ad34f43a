"""Two real processes that take a step together, against one that takes it alone. On the CPU, over gloo."""

import json
import pickle
import subprocess
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch

from tests.unit.trainer.learner.team_program import TOO_LONG
from trainer.domain.constraints import ConstrainedSpan, Constraints
from trainer.domain.figures import StepFigures
from trainer.domain.rows import Row
from trainer.errors import PeersMissing
from trainer.learner.learner import Learner
from trainer.learner.processes import team
from whetstone.config.trainer import TrainerSettings
from whetstone.stack.stack import trainer_program

pytestmark = [pytest.mark.slow]
MakeRows = Callable[..., list[Row]]

ROOT = Path(__file__).resolve().parents[4]
SETTINGS = TrainerSettings(processes=2, threads=1, device="cpu", micro_batch_tokens=64, learning_rate=1e-4)
"""Rows of more than 32 tokens: each is a micro-batch of its own."""
ROOMY = SETTINGS.model_copy(update={"micro_batch_tokens": 256})
LENGTHS = (60, 55, 50, 45, 40)
"""Of the bad rows: the first process reads the first, the third and the last of them."""


@dataclass(frozen=True)
class Told:
    """What the two processes left behind."""

    folder: Path
    sums: list[Any]
    rounds: list[list[int]]
    figures: list[dict[str, Any]]
    failures: dict[str, tuple[str, str, bool, float]]
    short: dict[str, Any]

    def files(self, name: str) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in (self.folder / name).iterdir()}


@dataclass(frozen=True)
class Alone:
    """One process's steps, with its files before and after."""

    before: dict[str, bytes]
    figures: list[StepFigures]
    after: dict[str, bytes]


def spoilt(rows: list[Row], place: int) -> list[Row]:
    """One of the rows begins with a sampled token, which whoever reads it refuses."""
    bad = rows[place]
    return [*rows[:place], replace(bad, sampled_T=(True, *bad.sampled_T[1:])), *rows[place + 1 :]]


def penalized(row: Row) -> Row:
    """The row, all but its first tokens sampled under penalties."""
    constraints = Constraints(frequency_penalty=0.4, repetition_penalty=1.3)
    span = ConstrainedSpan(row.trajectory_id, 5, len(row.token_ids_T), constraints, measured=True)
    return replace(row, constrained=(span,))


@pytest.fixture(scope="module")
def job(tiny_model: Path, make_rows: MakeRows) -> dict[str, Any]:
    rows = [make_rows(1, seed=n, shortest=length, longest=length)[0] for n, length in enumerate(LENGTHS)]
    too_much = [rows[0], replace(rows[1], advantages_T=(3e38,) * LENGTHS[1]), *rows[2:]]
    return {
        "model": tiny_model,
        "settings": SETTINGS,
        "first": [penalized(row) if place % 2 else row for place, row in enumerate(make_rows(7, seed=1))],
        "second": make_rows(8, seed=2),
        "bad": {
            "leader": spoilt(rows, 0),
            "follower": spoilt(rows, 1),
            "follower later": spoilt(rows, 3),
            "leader last": spoilt(rows, 4),
            "not finite": too_much,
            "no row": [],
        },
        "roomy": ROOMY,
        "many": [make_rows(20, seed=3), make_rows(20, seed=4)],
        "too long": make_rows(6, seed=5) + make_rows(1, seed=6, shortest=TOO_LONG, longest=TOO_LONG),
    }


@pytest.fixture(scope="module")
def told(job: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Told:
    folder = tmp_path_factory.mktemp("team")
    (folder / "job.pickle").write_bytes(pickle.dumps(job))
    command = [*trainer_program(SETTINGS)[:-1], "tests.unit.trainer.learner.team_program", str(folder)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stderr[-4000:]
    return Told(folder, **json.loads((folder / "report.json").read_text()))


@pytest.fixture(scope="module")
def alone(job: dict[str, Any]) -> Alone:
    """The same good steps in one process."""
    learner = Learner.fresh(job["model"], SETTINGS, seed=1)
    before = learner.files()
    figures = [learner.step(job["first"], 0), learner.step(job["second"], 1)]
    return Alone(before, figures, learner.files())


def apart(one: bytes, other: bytes) -> float:
    """The largest difference of two files' numbers."""
    ours, theirs = safetensors.torch.load(one), safetensors.torch.load(other)
    assert ours.keys() == theirs.keys()
    return max(float((ours[name].double() - theirs[name].double()).abs().max()) for name in ours)


@pytest.mark.long(part="exact")
def test_two_processes_make_the_adapter_that_one_makes(told: Told, alone: Alone) -> None:
    team = told.files("leader")
    for name in ("adapter_model.safetensors", "optimizer.safetensors"):
        assert apart(team[name], alone.after[name]) < 1e-6, name
    assert apart(alone.before["adapter_model.safetensors"], alone.after["adapter_model.safetensors"]) > 1e-4
    assert team["rng.safetensors"] == alone.after["rng.safetensors"]


@pytest.mark.long(part="exact")
def test_the_figures_are_those_of_all_rows(told: Told, alone: Alone) -> None:
    for ours, theirs in zip(told.figures, alone.figures, strict=False):
        assert ours == pytest.approx(asdict(theirs), rel=1e-5, abs=1e-9)


@pytest.mark.long(part="exact")
def test_after_failures_and_steps_both_hold_the_same_bits(told: Told) -> None:
    assert told.files("follower") == told.files("resumed")
    figures = told.figures[-1]
    assert figures["grad_norm"] > 0 and figures["kl"] > 0


@pytest.mark.long(part="exact")
def test_seven_micro_batches_are_four_rounds(told: Told) -> None:
    assert told.rounds == [[done, 4] for done in (1, 2, 3, 4)]


@pytest.mark.long(part="exact")
def test_whichever_process_fails_the_step_fails_and_nothing_moves(told: Told) -> None:
    met = {name: (kind, moved) for name, (kind, _, moved, _) in told.failures.items()}
    assert met == {
        "leader": ("RowError", False),
        "follower": ("PeerFailed", False),
        "follower later": ("PeerFailed", False),
        "leader last": ("RowError", False),
        "not finite": ("NotFinite", False),
        "no row": ("RowError", False),
        "progress": ("ConnectionAbortedError", False),
        "resume": ("AdapterDamaged", False),
    }
    assert "process 1: RowError" in told.failures["follower"][1]
    assert max(seconds for _, _, _, seconds in told.failures.values()) < 30


@pytest.mark.long(part="exact")
def test_gradients_that_no_process_has_stay_none(told: Told) -> None:
    both, one, none, figure, not_a_number = told.sums
    assert (both, one, none) == ([3.0, 30.0], [5.0, 7.0], None)
    assert figure == pytest.approx(1.2) and not_a_number == "nan"


@pytest.mark.long(part="exact")
def test_a_follower_keeps_no_learner_that_the_leader_has_dropped(told: Told) -> None:
    assert len(json.loads((told.folder / "held.json").read_text())) == 1


@pytest.mark.long(part="exact")
def test_a_process_that_is_short_of_memory_changes_nothing_but_the_split(told: Told, job: dict[str, Any]) -> None:
    learner = Learner.fresh(job["model"], ROOMY, seed=1)
    for rows, ours in zip(job["many"], told.short["figures"], strict=True):
        assert ours == pytest.approx(asdict(learner.step(rows, 0)), rel=1e-5, abs=1e-9)
    alone, team = learner.files(), told.files("short")
    for name in ("adapter_model.safetensors", "optimizer.safetensors"):
        assert apart(team[name], alone[name]) < 1e-6, name
    # The leader, whose device would hold 256 tokens, keeps to the follower's budget from the second step on.
    first, second = told.short["rounds"]
    assert second > first


@pytest.mark.long(part="exact")
def test_all_processes_know_of_a_row_that_fits_nowhere(told: Told) -> None:
    kind, message, moved, seconds = told.short["failure"]
    assert (kind, moved) == ("RowsDoNotFit", False)
    assert "1 trajectories" in message and seconds < 30


def test_shares_are_equal_but_for_one_micro_batch() -> None:
    costs = [8192, 100, 4000, 8192, 90, 8000, 7000]
    shares = []
    for rank in range(3):
        one = object.__new__(team.Team)
        one.rank, one.size = rank, 3
        shares.append(one.share([[place] for place in range(len(costs))], lambda places: costs[places[0]]))
    assert sorted(places[0] for share in shares for places in share if places) == list(range(len(costs)))
    assert {len(share) for share in shares} == {3}
    read = [sum(costs[places[0]] for places in share if places) for share in shares]
    assert max(read) - min(read) <= max(costs)


def test_a_worker_that_was_started_alone_says_how_to_start_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(PeersMissing, match="launched as 1: .*--num_processes 2 .*-m trainer.team worker"):
        team.require(SETTINGS)
    team.require(TrainerSettings())


@pytest.mark.parametrize(
    ("wrong", "remedy"),
    [({"device": "mps"}, "set device to cuda or cpu"), ({"backend": "unsloth"}, "set processes to 1")],
)
def test_settings_that_several_processes_cannot_have_are_refused(wrong: dict[str, str], remedy: str) -> None:
    with pytest.raises(ValueError, match=remedy):
        TrainerSettings(processes=2, **wrong)
