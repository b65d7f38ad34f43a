"""A log of elsewhere on the whole stack: imported beside the traffic, learned from by a supervised step."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.e2e.test_stack import up
from whetstone.cli.main import app

pytestmark = [pytest.mark.stack, pytest.mark.long(part="stacks"), pytest.mark.timeout(300)]


def told(data: Path, *arguments: str) -> Any:
    result = CliRunner().invoke(app, [*arguments, "--json", "--data", str(data)])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_a_policy_learns_from_a_log_while_it_is_served(tmp_path: Path) -> None:
    log, data = tmp_path / "log.jsonl", tmp_path / "data"
    question = {"role": "user", "content": "123456789"}
    lines = [
        {"messages": [question, {"role": "assistant", "content": str(place)}], "score": place % 2} for place in range(8)
    ]
    log.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    with up(data) as (_, _addresses):
        status = told(data, "status")
        assert (status["running"], status["proxy"]["ready"], status["problems"]) == (True, True, [])
        assert {one["state"] for one in status["replicas"]} == {"serving"}
        assert told(data, "import", str(log), "--policy", "teacher", "--reward-field", "score")["trajectories"] == 8
        step = told(data, "step", "--imitate", "teacher", "--min-reward", "0.5")
        assert (step["kind"], step["state"], step["trajectories"], step["completions"]) == ("sft", "promoted", 4, 4)
        (starter, teacher) = told(data, "status")["policies"]
        assert (starter["live_version"], starter["last_step"]["state"]) == (1, "promoted")
        assert (teacher["policy"], teacher["upstream"]) == ("teacher", "an imported log")
