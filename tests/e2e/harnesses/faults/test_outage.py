"""A database that is away, in its short form, and that the proof can fail."""

import subprocess
import sys
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.faults.apps import AppLedger, SqlLedger
from benchmarks.faults.outage import CAUGHT_UP_S, Run, faults_of

ROOT = Path(__file__).resolve().parents[4]

SQL = SqlLedger([("c0", 0)], [("f0", 0)], [], Counter())


@pytest.mark.slow
@pytest.mark.stack
def test_no_app_feels_that_the_database_is_away() -> None:
    command = [sys.executable, "-m", "benchmarks.faults.outage", "--short", "--seed", "1"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "it holds" in run.stdout


ANSWER, FEEDBACK = "answer, database away", "feedback, database away"


def took(*kinds: str) -> defaultdict[str, list[float]]:
    """One answer of each kind."""
    return defaultdict(list, {kind: [1.0] for kind in kinds})


@pytest.fixture
def right() -> Run:
    """What apps and clock saw when all is well."""
    return Run(
        received=AppLedger({"c0": 0}, {"f0": 0}), took_ms=took(ANSWER, FEEDBACK), reported_away=1, caught_up_s=3.0
    )


def test_an_outage_without_effect_on_apps_is_no_fault(right: Run) -> None:
    assert faults_of(right, SQL) == []


@pytest.mark.parametrize(
    ("wrong", "fault"),
    [
        ({"failed": ["request 3, sent with the database away: 503"]}, "request 3"),
        ({"took_ms": took("answer, database there", FEEDBACK)}, "no answer"),
        ({"took_ms": took(ANSWER)}, "no feedback"),
        ({"reported_away": 0}, "/readyz never reported"),
        ({"caught_up_s": None}, "not everything was in SQL"),
        ({"caught_up_s": CAUGHT_UP_S + 1}, "not everything was in SQL"),
        ({"received": AppLedger({"c0": 0, "c1": 1}, {"f0": 0})}, "SQL has not: c1"),
        ({"received": AppLedger({"c0": 0}, {"f0": 0, "f1": 1})}, "SQL has not: f1"),
    ],
)
def test_an_outage_that_apps_felt_is_a_fault(right: Run, wrong: dict[str, Any], fault: str) -> None:
    (reported,) = faults_of(replace(right, **wrong), SQL)
    assert fault in reported


def test_feedback_that_was_written_twice_is_a_fault(right: Run) -> None:
    (reported,) = faults_of(right, replace(SQL, feedback=[("f0", 0), ("f1", 0)]))
    assert "twice: 0" in reported
