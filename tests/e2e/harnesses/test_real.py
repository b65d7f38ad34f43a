"""A real model learns to route tickets with the default settings; and that the check can fail."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.real.__main__ import faults_of

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.stack
@pytest.mark.long(part="real")
@pytest.mark.timeout(7200)
def test_a_real_model_learns_to_route_tickets_with_the_default_settings(smollm2: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.real", "--model", str(smollm2), "--steps", "20"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=7000, check=False)
    assert run.returncode == 0, run.stdout + run.stderr


def figures(**changed: Any) -> dict[str, Any]:
    """What a run leaves when all is well."""
    steps = [{"state": "promoted", "kl": 0.1 * number} for number in range(3)]
    return {"steps": steps, "before": [0, 1] * 100, "after": [1] * 150 + [0] * 50, "failed_requests": 0} | changed


def test_a_reward_that_rose_without_a_rejection_and_near_the_base_holds() -> None:
    assert faults_of(figures(), 3, shuffle=False) == []


@pytest.mark.parametrize(
    ("changed", "fault"),
    [
        ({"after": [0, 1] * 100}, "the reward did not rise"),
        ({"failed_requests": 1}, "1 requests failed"),
        ({"steps": [{"state": "promoted", "kl": 0.0}] * 2}, "2 steps, 3 are due"),
        ({"steps": [{"state": "promoted", "kl": 1.2}] * 3}, "1.20 nats a token"),
        ({"steps": [*([{"state": "promoted", "kl": None}] * 3), {"state": "rejected", "kl": None}]}, "rejected"),
    ],
)
def test_each_fault_is_named(changed: dict[str, Any], fault: str) -> None:
    (named,) = faults_of(figures(**changed), 3, shuffle=False)
    assert fault in named


def test_with_rewards_that_mean_nothing_a_rise_is_the_fault() -> None:
    (named,) = faults_of(figures(), 3, shuffle=True)
    assert "though rewards mean nothing" in named
    assert faults_of(figures(after=[0, 1] * 100), 3, shuffle=True) == []
