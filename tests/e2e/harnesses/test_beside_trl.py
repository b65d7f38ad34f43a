"""Learning beside TRL in its short form, and that the comparison can fail."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.beside_trl.__main__ import Outcome, best, faults_of, table_of
from benchmarks.beside_trl.examination import last_of_each
from benchmarks.beside_trl.run import Point

ROOT = Path(__file__).resolve().parents[3]
QUESTIONS = 100
BEFORE = [0] * 100


@pytest.mark.stack
@pytest.mark.long(part="trl")
@pytest.mark.timeout(1800)
def test_one_step_of_each_is_examined(smollm2: Path, tmp_path: Path) -> None:
    """So little learns nothing: the comparison says so, and its exit code."""
    path, data = tmp_path / "trl.json", tmp_path / "data"
    command = [sys.executable, "-m", "benchmarks.beside_trl", "--model", str(smollm2), "--steps", "1", "--groups", "4"]
    command += ["--questions", "32", "--data", str(data), "--json", str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1700, check=False)
    assert done.returncode == 1 and "FAULT ours did not gain" in done.stdout, done.stdout + done.stderr
    figures = json.loads(path.read_text())
    assert [run["side"] for run in figures["runs"]] == ["ours", "TRL, colocate", "TRL, transformers"] and len(
        figures["before"]
    ) == 32
    for run in figures["runs"]:
        assert run["right"] and all(len(right) == 32 for right in run["right"])
        assert len(run["seconds"]) == len(run["attempts"]) == len(run["right"])
        assert run["attempts"][0] >= 32 and run["tokens_per_s"] > run["trained_per_s"] > 0
        assert run["peak_mib"] > 2**10


def right(count: int) -> list[int]:
    return [1] * count + [0] * (QUESTIONS - count)


def entry(side: str, seconds: list[float], *counts: int, rate: float = 5e-5) -> Outcome:
    """A run whose points answer so many tickets right."""
    return Outcome(side, rate, 2**11, seconds, [96] * len(seconds), [right(count) for count in counts], 1.0, 100.0)


def test_twice_as_fast_and_not_worse_holds() -> None:
    both = [entry("ours", [60, 120], 10, 25), entry("TRL, colocate", [60, 240], 5, 24)]
    assert faults_of(both, BEFORE) == []


@pytest.mark.parametrize(
    ("ours", "trl", "fault"),
    [
        (entry("ours", [60, 120], 10, 19), entry("TRL, colocate", [60], 5), "ours did not gain 20% points"),
        (entry("ours", [60, 121], 10, 25), entry("TRL, colocate", [60, 240], 5, 24), "in 121 s, TRL in 240 s"),
        (entry("ours", [60, 121], 10, 25), entry("TRL, colocate", [60, 200], 5, 6), "in 121 s, TRL not within 200 s"),
        (entry("ours", [60], 25), entry("TRL, colocate", [60, 240], 5, 60), "TRL's held-out result is higher"),
    ],
)
def test_each_fault_is_named(ours: Outcome, trl: Outcome, fault: str) -> None:
    (named,) = faults_of([ours, trl], BEFORE)
    assert fault in named


def test_of_a_sides_runs_the_one_with_the_best_end_counts() -> None:
    outcomes = [entry("TRL, colocate", [60], 5), entry("TRL, transformers", [60], 40, rate=1e-4)]
    assert best(outcomes, BEFORE).learning_rate == 1e-4
    (fault, _) = faults_of([*outcomes, entry("ours", [60], 20)], BEFORE)
    assert "TRL in 60 s" in fault


def test_the_last_adapter_of_each_minute_is_examined() -> None:
    points = [Point(str(number), 20.0 * number, number, number, number) for number in range(1, 8)]
    assert [point.adapter for point in last_of_each(points, 60.0)] == ["2", "5", "7"]


def test_the_table_says_where_a_run_did_not_gain_enough() -> None:
    table = table_of([entry("ours", [60, 120], 10, 25), entry("TRL, colocate", [60], 5)], BEFORE)
    columns = {str(column.header): list(column.cells) for column in table.columns}
    assert columns["seconds to +20%"] == ["120", "-"] and columns["attempts until then"] == ["96", "-"]
    assert columns["peak, GiB"] == ["2.0", "2.0"]
