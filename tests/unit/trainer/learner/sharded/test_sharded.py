"""Real processes that share a base model, against one that has all of it. On the CPU, over gloo."""

import json
import pickle
import subprocess
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.unit.trainer.learner.constrained.test_measuring import some_rows
from tests.unit.trainer.learner.sharded.sharded_program import ANSWER, KILLED, PROMPT, Job
from trainer.domain.constraints import ConstrainedSpan, Constraints
from trainer.domain.rows import Row
from trainer.errors import PeersMissing
from trainer.learner.learner import Learner
from whetstone.config.trainer import Kind, TrainerSettings
from whetstone.stack.stack import trainer_program

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]
MakeRows = Callable[..., list[Row]]

ROOT = Path(__file__).resolve().parents[5]
ADAPTER, OPTIMIZER = "adapter_model.safetensors", "optimizer.safetensors"
SETTINGS = TrainerSettings(
    sharding="fsdp", processes=2, threads=1, device="cpu", micro_batch_tokens=64, learning_rate=1e-4
)
"""Rows of more than 32 tokens: each is a micro-batch of its own."""
ALONE = SETTINGS.model_copy(update={"sharding": "none", "processes": 1})
CASES = [
    pytest.param((2, True), id="2 processes, tied"),
    pytest.param((4, False), id="4 processes, untied", marks=pytest.mark.long(part="exact")),
]
"""Processes, and whether the head is the embedding."""
CLOSE = 1e-5
"""Largest distance from one process's files, relative to their norm."""
CLOSE_IN_DPO = 1e-4
"""The same after a step of dpo, whose gradients are small: AdamW divides by their size, and by that of their rounding.
"""


@dataclass(frozen=True)
class Run:
    """What the processes of a run left."""

    job: Job
    folder: Path
    report: dict[str, Any]
    shares: list[dict[str, int]]
    """Of the base model, by process."""

    def file(self, version: int, name: str) -> bytes:
        return (self.folder / f"shared-v{version}" / name).read_bytes()


@dataclass(frozen=True)
class OneProcess:
    """The same steps in one process."""

    before: list[float]
    second: list[float]
    decided: int
    figures: list[dict[str, Any]]
    files: list[dict[str, bytes]]
    """Of each version."""
    after: list[float]
    base: list[float]


def base_model(folder: Path, tied: bool) -> Path:
    """A random Llama of three layers; without a tied head four processes do not divide its vocabulary evenly."""
    config = LlamaConfig(
        vocab_size=64 if tied else 66,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.1,
        tie_word_embeddings=tied,
        eos_token_id=2,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def steps(make_rows: MakeRows) -> list[tuple[Kind, list[Row]]]:
    """Six steps, of five or six micro-batches: in the last round some processes have none."""
    first = [penalized(row) if place % 2 else row for place, row in enumerate(make_rows(5, seed=1))]
    answers = [replace(row, versions_T=(-1,) * len(row.versions_T)) for row in make_rows(5, seed=2)]
    preferred = [
        replace(row, pair=f"p{place // 2}", advantages_T=tuple(float(here) * (-1) ** place for here in row.sampled_T))
        for place, row in enumerate(make_rows(6, seed=3))
    ]
    corrected = [
        replace(row, teacher_ids=(7, *row.token_ids_T[: row.sampled_T.index(True)])) for row in make_rows(5, seed=4)
    ]
    return [
        ("grpo", first),
        ("sft", answers),
        ("grpo", make_rows(5, seed=5)),
        ("hindsight", corrected),
        ("grpo", make_rows(5, seed=6)),
        ("dpo", preferred),
    ]


def penalized(row: Row) -> Row:
    """The row, all but its first tokens sampled under penalties."""
    constraints = Constraints(frequency_penalty=0.4, repetition_penalty=1.3)
    span = ConstrainedSpan(row.trajectory_id, 5, len(row.token_ids_T), constraints, measured=True)
    return replace(row, constrained=(span,))


def launch(folder: Path, job: Job, run: str) -> subprocess.CompletedProcess[str]:
    (folder / "job.pickle").write_bytes(pickle.dumps(job))
    program = "tests.unit.trainer.learner.sharded.sharded_program"
    command = [*trainer_program(job.settings)[:-1], program, str(folder), run]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)


@pytest.fixture(scope="module", params=CASES)
def shared(request: pytest.FixtureRequest, make_rows: MakeRows, tmp_path_factory: pytest.TempPathFactory) -> Run:
    processes, tied = request.param
    folder = tmp_path_factory.mktemp("sharded")
    model = base_model(folder / "base", tied)
    bad = [make_rows(1, seed=n, shortest=length, longest=length)[0] for n, length in enumerate((60, 55, 50, 45, 40))]
    bad[1] = replace(bad[1], sampled_T=(True, *bad[1].sampled_T[1:]))  # the second process reads it
    constrained = some_rows(Learner.fresh(model, ALONE, 1), 0)
    settings = SETTINGS.model_copy(update={"processes": processes})
    job = Job(model, settings, steps(make_rows), constrained, bad)
    ended = launch(folder, job, "shared")
    assert ended.returncode == 0, ended.stderr[-4000:]
    report = json.loads((folder / "shared.json").read_text())
    others = [json.loads((folder / f"shared-{rank}.json").read_text()) for rank in range(1, processes)]
    return Run(job, folder, report, [report["shares"], *others])


@pytest.fixture(scope="module")
def alone(shared: Run) -> OneProcess:
    job, versions, figures = shared.job, [], []
    learner, second = (Learner.fresh(job.model, ALONE, seed) for seed in (1, 2))
    second.step(job.steps[0][1], 0)
    decided = learner.measure(job.constrained, 0, {}).decided
    before = learner.logprobs(PROMPT, ANSWER)
    for number, (kind, rows) in enumerate(job.steps):
        figures.append(asdict(learner.step(rows, number, kind=kind)))
        versions.append(dict(learner.files()))
    with learner.as_version(None):
        base = learner.logprobs(PROMPT, ANSWER)
    after = learner.logprobs(PROMPT, ANSWER)
    return OneProcess(before, second.logprobs(PROMPT, ANSWER), sum(decided.values()), figures, versions, after, base)


def distance(one: bytes, other: bytes, part: str = "") -> float:
    """The distance of all tensors of the files whose names begin with `part`, relative to their norm."""
    ours, theirs = safetensors.torch.load(one), safetensors.torch.load(other)
    assert ours.keys() == theirs.keys()
    flat = [
        torch.cat([each[name].double().flatten() for name in ours if name.startswith(part)]) for each in (ours, theirs)
    ]
    return float((flat[0] - flat[1]).norm() / flat[1].norm())


def test_each_process_has_its_share_of_the_base_and_no_more(shared: Run) -> None:
    size = shared.job.settings.processes
    for share in shared.shares:
        assert share["own"] == pytest.approx(share["all"] / size, rel=0.01)


def test_learners_of_two_policies_are_on_the_same_shares(shared: Run) -> None:
    assert shared.report["are_same_shares"]


def test_every_version_is_that_of_one_process(shared: Run, alone: OneProcess) -> None:
    for version, (files, (kind, _)) in enumerate(zip(alone.files, shared.job.steps, strict=True), 1):
        close = CLOSE_IN_DPO if kind == "dpo" else CLOSE
        assert distance(shared.file(version, ADAPTER), files[ADAPTER]) < close, version
        # After the first step of a kind AdamW's first moment is a tenth of the gradient.
        for moment in ("exp_avg.", "exp_avg_sq."):
            assert distance(shared.file(version, OPTIMIZER), files[OPTIMIZER], moment) < close, (version, moment)
        assert shared.file(version, "adapter_config.json") == files["adapter_config.json"]
        assert shared.file(version, "rng.safetensors") == files["rng.safetensors"]
    assert distance(alone.files[0][ADAPTER], alone.files[-1][ADAPTER]) > 100 * CLOSE


@pytest.mark.long(part="exact")
def test_a_base_that_each_process_has_whole_makes_the_same_bits(shared: Run) -> None:
    whole = replace(shared.job, settings=shared.job.settings.model_copy(update={"sharding": "none"}))
    ended = launch(shared.folder, whole, "whole")
    assert ended.returncode == 0, ended.stderr[-4000:]
    for version in range(1, len(shared.job.steps) + 1):
        for name in (ADAPTER, OPTIMIZER, "rng.safetensors", "adapter_config.json"):
            assert (shared.folder / f"whole-v{version}" / name).read_bytes() == shared.file(version, name), (
                version,
                name,
            )


def test_the_figures_are_those_of_one_process(shared: Run, alone: OneProcess) -> None:
    for ours, theirs in zip(shared.report["figures"], alone.figures, strict=True):
        known = {name: figure for name, figure in theirs.items() if figure is not None}
        assert {name for name in ours if ours[name] is not None} == known.keys()
        # They are sums of fp32 numbers of order one, and may be near 0 themselves.
        assert {name: ours[name] for name in known} == pytest.approx(known, rel=CLOSE, abs=1e-6)


def test_the_leader_reads_alone_what_it_needs_alone(shared: Run, alone: OneProcess) -> None:
    for name in ("before", "second", "after", "base"):
        assert shared.report[name] == pytest.approx(getattr(alone, name), rel=CLOSE), name
    assert shared.report["decided"] == alone.decided > 0
    assert shared.report["base"] != shared.report["after"]


def test_a_row_that_one_process_refuses_fails_the_step_in_all_and_moves_nothing(shared: Run) -> None:
    assert shared.report["failure"].startswith("PeerFailed: process 1: RowError")


def test_all_processes_end_with_the_same_bits(shared: Run) -> None:
    last = shared.file(len(shared.job.steps), ADAPTER)
    for rank in range(1, shared.job.settings.processes):
        assert (shared.folder / f"shared-follower-{rank}" / ADAPTER).read_bytes() == last


@pytest.mark.long(part="exact")
def test_a_step_that_a_death_ended_is_taken_again_bit_for_bit(shared: Run) -> None:
    if shared.job.settings.processes != 2:
        pytest.skip("once is enough")
    ended = launch(shared.folder, shared.job, KILLED)
    assert ended.returncode != 0
    assert (shared.folder / f"{KILLED}-v2").exists() and not (shared.folder / f"{KILLED}-v3").exists()
    ended = launch(shared.folder, replace(shared.job, begins_at=2), "resumed")
    assert ended.returncode == 0, ended.stderr[-4000:]
    for version in range(3, len(shared.job.steps) + 1):
        resumed = shared.folder / f"resumed-v{version}"
        for name in (ADAPTER, OPTIMIZER, "rng.safetensors"):
            assert (resumed / name).read_bytes() == shared.file(version, name), (version, name)


def test_a_process_that_is_alone_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PeersMissing, match="set trainer.sharding to none"):
        Learner.fresh(base_model(tmp_path / "base", tied=True), SETTINGS, 1)


@pytest.mark.parametrize(
    ("wrong", "remedy"),
    [
        ({"processes": 1}, "set processes to 2 or more"),
        ({"offload": True}, "set offload to false"),
        ({"probe_memory": True}, "set probe_memory to false"),
        ({"backend": "unsloth"}, "backend to hf"),
    ],
)
def test_settings_that_a_sharded_base_cannot_have_are_refused(wrong: dict[str, Any], remedy: str) -> None:
    with pytest.raises(ValueError, match=remedy):
        TrainerSettings(**{"sharding": "fsdp", "processes": 2, **wrong})
