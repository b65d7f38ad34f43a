"""The proof of the baselines in its short form: the whole stack, thumbs on single answers, a policy that learns."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.learning.thumbs import Outcome
from whetstone.domain.stats import gain, share

ROOT = Path(__file__).resolve().parents[4]


@pytest.mark.stack
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("steps", "options"),
    [
        # Two small steps show that thumbs become steps; whether it learns from them takes more.
        (2, ["--questions", "40", "--enough", "-1", "--singles", "48"]),
        # Ten steps leave the gain of twenty unfinished, and still far beyond chance.
        pytest.param(10, ["--questions", "400", "--enough", "0.05"], marks=pytest.mark.long(part="harnesses")),
    ],
)
def test_an_app_that_only_posts_thumbs_has_a_policy_that_learns(steps: int, options: list[str], vllm_url: str) -> None:
    command = [sys.executable, "-m", "benchmarks.learning.thumbs", "--steps", str(steps), *options, "--vllm", vllm_url]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=580, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    taken = re.findall(r"^step \d+  (\d+) of (\d+) by baseline", run.stdout, re.MULTILINE)
    assert len(taken) >= steps and all(int(baselined) == int(of) >= 48 for baselined, of in taken)
    assert " 0 failed requests" in run.stdout


def outcome(before: int, after: int, trajectories: int = 96, failed_requests: int = 0) -> Outcome:
    """Of 400 questions so many were liked before and after."""
    first, last = ([1] * liked + [0] * (400 - liked) for liked in (before, after))
    return Outcome(share(first), share(last), gain(first, last), trajectories, 96, failed_requests)


def test_learned_is_what_gained_enough_and_more_than_chance_gives() -> None:
    assert outcome(180, 240).learned(0.15)
    assert not outcome(180, 239).learned(0.15)
    assert not outcome(240, 180).learned(0.15)
    assert not outcome(180, 181).learned(0.0)
    assert outcome(240, 180).learned(-1)


def test_a_run_with_groups_or_failed_requests_proves_nothing() -> None:
    assert outcome(180, 240).clean
    assert not outcome(180, 240, trajectories=97).clean
    assert not outcome(180, 240, failed_requests=1).clean
