"""A step asked for by hand of a stack that only records, with nothing replaced."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.e2e.test_stack import ROOT, WHETSTONE, play, query, until, up

pytestmark = [pytest.mark.stack, pytest.mark.long(part="stacks"), pytest.mark.timeout(600)]


def step(data: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [*WHETSTONE, "step", "--data", str(data), *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)


def test_whetstone_step_shows_then_takes_a_step_of_a_policy_that_only_records(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with up(data) as (_, address):
        nothing = step(data)
        assert nothing.returncode == 1, nothing.stdout
        assert "noop: requested by hand, but there is nothing to train on: no group is scored" in nothing.stderr
        assert play(address["proxy"], 32)["failed_requests"] == 0
        until(lambda: query(data, "SELECT count(*) AS n FROM admin_groups WHERE state = 'scored'")[0]["n"])
        shown = json.loads(step(data, "--dry-run", "--json").stdout)
        assert shown["why_not_due"].startswith("the policy only records") and shown["rows"]
        assert [row["state"] for row in query(data, "SELECT state FROM admin_steps")] == ["noop"]
        taken = step(data)
        assert taken.returncode == 0, taken.stderr
        (row,) = query(data, "SELECT * FROM admin_steps WHERE state = 'promoted'")
        assert row["asked_at"] is not None and row["kind"] == "grpo"
        assert f"version {row['version_out']}, promoted" in taken.stdout
        assert query(data, "SELECT live_version, state FROM admin_policies") == [
            {"live_version": row["version_out"], "state": "recording"}
        ]
        trained = query(data, "SELECT trajectory_id FROM admin_trajectories WHERE state = 'trained'")
        promised = {one["trajectory_id"] for one in shown["trajectories"] if one["left_out"] is None}
        # More games may have been scored between the look and the step.
        assert promised <= {one["trajectory_id"] for one in trained}
    gone = step(data)
    assert gone.returncode == 2 and "no stack runs on" in gone.stderr
