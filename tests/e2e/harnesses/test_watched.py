"""`make watched` in its short form, and what it takes for a loss."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.bench.watched import lost

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.slow
def test_two_hundred_calls_a_second_are_shown() -> None:
    command = [sys.executable, "-m", "benchmarks.bench.watched", "--short"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    # How long a page takes beside other tests means nothing.
    faults = [line for line in run.stdout.splitlines() if line.startswith("FAULT") and "the page takes" not in line]
    assert faults == [], run.stdout + run.stderr
    assert "1200 sent, 1200 counted" in run.stdout, run.stdout + run.stderr


def test_a_loss_is_the_median_over_the_rounds() -> None:
    assert lost([(100.0, 99.0), (100.0, 90.0), (200.0, 196.0)]) == pytest.approx(0.02)
