"""Kill -9 of the training worker in its short form, and that the proof can fail: each difference is reported."""

import random
import re
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, select, update

from benchmarks.faults.killed.__main__ import AIMS, moments, settings_of
from benchmarks.faults.killed.records import (
    FIGURES,
    GROUPS_PER_STEP,
    SIZE,
    Ledger,
    Step,
    differences,
    freeze,
    ledger,
    wrong_with,
)
from migrations import schema
from trainer.store.unit_of_work import Store
from whetstone.database.engine import connect

ROOT = Path(__file__).resolve().parents[4]

STEPS = 2


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("kills", "steps"), [(1, 2), pytest.param(4, 5, marks=pytest.mark.long(part="harnesses"))])
def test_a_run_whose_worker_is_killed_learns_bit_for_bit_what_an_undisturbed_one_learns(kills: int, steps: int) -> None:
    command = [sys.executable, "-m", "benchmarks.faults.killed"]
    command += ["--kills", str(kills), "--steps", str(steps), "--seed", "1"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=580, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert f"{kills} kills, {steps} steps, each adapter the same bit for bit: it holds" in run.stdout
    met = re.findall(r"after its start, ([a-z, ]+) \(", run.stdout)
    assert len(met) == kills and len(set(met)) >= kills / 2, run.stdout


def step(number: int, **values: Any) -> Step:
    taught = {f"g{group:03d}-{member}": 0.5 for group in range(GROUPS_PER_STEP) for member in range(SIZE)}
    taught = {f"{number}.{name}": advantage for name, advantage in taught.items()}
    files = {"adapter_model.safetensors": b"w", "optimizer.safetensors": b"o", "rng.safetensors": b"r"}
    return Step(number, "promoted", 1, (1,) * len(FIGURES), taught, files, **values)


@pytest.fixture
def right() -> Ledger:
    """What a run leaves when all is well."""
    steps = tuple(step(number) for number in range(1, STEPS + 1))
    trained_in = {name: one.number for one in steps for name in one.taught}
    return Ledger(steps, Counter(trained=STEPS * GROUPS_PER_STEP), trained_in, (7,))


def changed(run: Ledger, which: int, **values: Any) -> Ledger:
    """With another step of that number."""
    return replace(run, steps=tuple(replace(s, **values) if s.number == which else s for s in run.steps))


def test_a_right_ledger_has_no_faults_though_attempts_differ(right: Ledger) -> None:
    assert wrong_with(right, STEPS) == []
    assert differences(right, changed(right, 1, attempt=4)) == []


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "optimizer.safetensors", "rng.safetensors"])
def test_one_byte_of_one_file_is_a_difference(right: Ledger, name: str) -> None:
    files = right.steps[1].files | {name: b"x"}
    assert differences(right, changed(right, 2, files=files)) == [f"step 2: {name} differs"]


def test_other_figures_and_other_advantages_are_differences(right: Ledger) -> None:
    other = changed(right, 1, figures=tuple(0 if name == "loss" else 1 for name in FIGURES))
    same = changed(right, 1, figures=(1,) * len(FIGURES))
    assert differences(same, other) == ["step 1: loss 1 != 0"]
    taught = right.steps[0].taught | {"1.g000-0": -0.5}
    assert "other trajectories" in differences(right, changed(right, 1, taught=taught))[0]


def test_a_trajectory_in_two_steps_is_a_fault(right: Ledger) -> None:
    twice = right.steps[1].taught | {"1.g000-0": 0.5}
    faults = wrong_with(changed(right, 2, taught=twice), STEPS)
    assert "in more than one step: ['1.g000-0']" in faults


@pytest.mark.parametrize(
    ("values", "fault"),
    [
        ({"state": "failed"}, "step 2 is failed"),
        ({"files": {}}, "step 2 left no whole adapter"),
        ({"number": 3}, "steps [1, 3], not 1 to 2"),
        ({"taught": {}}, "do not agree"),
    ],
)
def test_a_step_that_is_not_what_it_should_be_is_a_fault(right: Ledger, values: dict[str, Any], fault: str) -> None:
    assert any(fault in reported for reported in wrong_with(changed(right, 2, **values), STEPS))


def test_a_step_that_is_missing_is_a_fault(right: Ledger) -> None:
    short = replace(right, steps=right.steps[:1])
    assert wrong_with(short, STEPS)
    assert differences(right, short) == ["2 steps undisturbed, 1 with kills"]


def test_groups_that_were_not_trained_and_two_live_versions_are_faults(right: Ledger) -> None:
    groups = Counter(trained=STEPS * GROUPS_PER_STEP - 1, discarded=1)
    assert any("discarded" in fault for fault in wrong_with(replace(right, groups=groups), STEPS))
    assert "live are [1, 2]" in wrong_with(replace(right, live=(1, 2)), STEPS)


def test_kills_are_aimed_at_every_part_of_a_step_and_again_the_same() -> None:
    aimed = moments(20, random.Random(3))
    assert Counter(aim for aim, _ in aimed).keys() == set(AIMS)
    assert aimed == moments(20, random.Random(3)) != moments(20, random.Random(4))


@pytest.fixture
def frozen(tmp_path: Path, sqlite_template: Path) -> Engine:
    """The database that is trained on, for two steps; its logprobs come from no model."""
    path = tmp_path / "frozen.db"
    shutil.copyfile(sqlite_template, path)
    engine = connect(f"sqlite:///{path}")
    freeze(engine, settings_of(tmp_path, 0), STEPS, lambda prompt, answer: [-1.0] * len(answer))
    return engine


def test_a_step_takes_the_frozen_groups_in_their_order_for_every_worker(frozen: Engine, tmp_path: Path) -> None:
    settings = settings_of(tmp_path, 0)
    claim = Store(frozen, settings.project).claim(settings.policy, settings.trainer)
    assert claim is not None
    members = Store(frozen, settings.project).members(claim)
    assert sorted({member.group_id for member in members}) == [f"g{n:03d}" for n in range(GROUPS_PER_STEP)]
    assert all(len(member.completions) == 2 for member in members)
    first, second = members[0].completions
    assert second.prompt_ids[: len(first.prompt_ids) + len(first.token_ids)] == first.prompt_ids + first.token_ids


def test_the_ledger_reads_what_sql_says_and_counts_a_damaged_adapter_as_none(frozen: Engine, tmp_path: Path) -> None:
    settings = settings_of(tmp_path, 0)
    store = Store(frozen, settings.project)
    claim = store.claim(settings.policy, settings.trainer)
    assert claim is not None
    folder = tmp_path / "starter@v1"
    folder.mkdir()
    (folder / "adapter_model.safetensors").write_bytes(b"w")
    store.trained(claim, {"loss": 0.25}, folder, "hash")
    read = ledger(frozen)
    (only,) = read.steps
    assert (only.number, only.state, only.attempt, only.files) == (1, "trained", 1, {})
    assert 0.25 in only.figures and len(only.taught) == GROUPS_PER_STEP * SIZE
    assert read.groups == Counter(claimed=GROUPS_PER_STEP, scored=GROUPS_PER_STEP)
    assert read.live == (0,)
    with frozen.begin() as connection:
        connection.execute(update(schema.trajectories).values(trained_in_step=1))
        ids = list(connection.execute(select(schema.trajectories.c.id)).scalars())
    assert ledger(frozen).trained_in == dict.fromkeys(ids, 1)
