"""Kill -9 of everything in its short form, and that the proof can fail: each thing lost or doubled is reported."""

import random
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.faults.apps import AppLedger, SqlLedger, read_ledger, words_of, wrong_with
from benchmarks.faults.chaos.__main__ import Run, faults_of, moments
from tests.conftest import Seed
from whetstone.database.engine import connect

ROOT = Path(__file__).resolve().parents[4]

PARTS = ("broker", "proxy", "judge", "trainer", "database")
KILLS, REQUESTS = 5, 2


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "database", ["sqlite", pytest.param("postgresql", marks=[pytest.mark.stack, pytest.mark.long(part="harnesses")])]
)
def test_nothing_is_lost_and_nothing_doubled_when_everything_is_killed(database: str) -> None:
    command = [sys.executable, "-m", "benchmarks.faults.chaos", "--short", "--seed", "3", "--database", database]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=580, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "it holds" in run.stdout and run.stdout.count("\nkill ") + run.stdout.startswith("kill") == 6


@pytest.fixture
def received() -> AppLedger:
    """The ledger of apps that sent two requests and one feedback."""
    return AppLedger({"c0": 0, "c1": 1}, {"f0": 0})


@pytest.fixture
def right() -> SqlLedger:
    """What SQL has when all is well: for one more request, the end of its answer never reached the app."""
    completions = [("c0", 0), ("c1", 1), ("c2", 2)]
    taught = [("starter#1", "t0"), ("starter#1", "t1")]
    return SqlLedger(completions, [("f0", 0)], taught, Counter(promoted=1))


def test_ledgers_that_agree_are_no_fault(received: AppLedger, right: SqlLedger) -> None:
    assert wrong_with(received, right) == []


@pytest.mark.parametrize(
    ("wrong", "fault"),
    [
        ({"completions": [("c0", 0)]}, "1 completions that an app holds and SQL has not: c1"),
        ({"completions": [("c0", 0), ("c1", 1), ("c9", 1)]}, "1 completions of one request that SQL has twice: 1"),
        ({"completions": [("c0", 1), ("c1", 0)]}, "2 completions that SQL has under another request: c0, c1"),
        ({"feedback": []}, "1 feedback that an app holds and SQL has not: f0"),
        ({"feedback": [("f0", 0), ("f1", 0)]}, "1 feedback of one request that SQL has twice: 0"),
        ({"taught": [("starter#1", "t0"), ("starter#2", "t0")]}, "1 trajectories in more than one step: t0"),
    ],
)
def test_records_that_are_lost_or_doubled_are_faults(
    received: AppLedger, right: SqlLedger, wrong: dict[str, Any], fault: str
) -> None:
    assert wrong_with(received, replace(right, **wrong)) == [fault]


@pytest.fixture
def run(received: AppLedger) -> Run:
    """A run in which enough happened."""
    return Run(received=received, kills=Counter(dict.fromkeys(PARTS, 1)), settled_s=1.0)


def test_a_run_in_which_enough_happened_and_nothing_was_lost_holds(run: Run, right: SqlLedger) -> None:
    assert faults_of(run, right, KILLS, REQUESTS) == []


@pytest.mark.parametrize(
    ("wrong", "fault"),
    [
        ({"settled_s": None}, "still unwritten"),
        ({"left_behind": ["x.refused"]}, "x.refused"),
        ({"kills": Counter(proxy=4)}, "only 4 of 5 kills"),
        ({"received": AppLedger({"c0": 0}, {"f0": 0})}, "only 1 of 2 answers"),
        ({"received": AppLedger({"c0": 0, "c1": 1}, {})}, "no feedback"),
    ],
)
def test_a_run_that_proves_nothing_is_a_fault(run: Run, right: SqlLedger, wrong: dict[str, Any], fault: str) -> None:
    (reported,) = faults_of(replace(run, **wrong), right, KILLS, REQUESTS)
    assert fault in reported


def test_a_run_without_a_promoted_step_is_a_fault(run: Run, right: SqlLedger) -> None:
    (reported,) = faults_of(run, replace(right, steps=Counter(claimed=1)), KILLS, REQUESTS)
    assert "no step was promoted" in reported


def test_every_part_is_killed_as_often_as_another_and_again_the_same() -> None:
    plan = moments(PARTS, 40, random.Random(1))
    assert Counter(name for name, _ in plan) == Counter(dict.fromkeys(PARTS, 8))
    assert [share for _, share in plan] == sorted(share for _, share in plan)
    assert plan == moments(PARTS, 40, random.Random(1)) != moments(PARTS, 40, random.Random(2))


def test_the_ledger_reads_what_sql_says(tmp_path: Path, sqlite_template: Path) -> None:
    shutil.copyfile(sqlite_template, tmp_path / "whetstone.db")
    engine = connect(f"sqlite:///{tmp_path / 'whetstone.db'}")
    seed = Seed(engine)
    seed.project("default")
    seed.trajectory("t", turns=0)
    message = {"role": "user", "content": words_of(7)}
    seed.completion("t", 0, new_messages=[{"role": "user", "content": "before"}, message])
    seed.feedback("t", 1.0, id="f", comment=words_of(7))
    seed.feedback("t", source="end")
    assert read_ledger(engine) == SqlLedger([("t-0", 7)], [("f", 7)], [], Counter())
    engine.dispose()
