"""Steps of several policies at the same time, in the measurement's short form; and that it can fail."""

import argparse
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.learning.policies import PolicySteps, _figures

ROOT = Path(__file__).resolve().parents[4]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_steps_of_three_policies_leave_the_same_adapters_in_turns_and_together(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.learning.policies", "--policies", "3", "--fake"]
    run = subprocess.run(
        [*command, "--data", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=280, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "a step of each of 3 policies" in run.stdout and "wait" in run.stdout


def taken(seconds: float, computing_s: float, **adapters: bytes) -> PolicySteps:
    return PolicySteps(seconds, computing_s, {"train": computing_s}, adapters)


@pytest.mark.parametrize(
    ("together", "fault"),
    [
        (taken(5, 4, a=b"1", b=b"2"), None),
        (taken(6, 4, a=b"1", b=b"2"), "the rest is 40% of what it is in turns"),
        (taken(5, 4, a=b"1", b=b"3"), "adapters differ: ['b']"),
        (taken(5, 4, a=b"1"), "promoted were [1, 2] of 2"),
    ],
)
def test_what_does_not_hold_is_reported(together: PolicySteps, fault: str | None) -> None:
    args = argparse.Namespace(policies=2, fake=False)
    runs = {"in turns": [taken(10, 5, a=b"1", b=b"2")], "together": [together]}
    _, faults = _figures(args, runs, Console(quiet=True))
    assert [one for one in faults if fault and fault in one] if fault else not faults
