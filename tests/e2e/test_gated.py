"""The gate on the whole stack: a candidate known to be far worse, made by the trainer's own path, is refused."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_imitated import App
from tests.e2e.test_stack import ROOT, until, up

sys.path.append(str(ROOT / "whetstone" / "demo" / "tictactoe"))
import game

pytestmark = [pytest.mark.stack, pytest.mark.long(part="stacks"), pytest.mark.timeout(600)]

# One step of this size unlearns to play. The probe would see that as well, were its bounds not wide open.
CONFIG = """
[trainer]
learning_rate = 0.01
[gate]
tests = ["heldout"]
heldout_prompts = 24
max_k3 = 10.0
max_parent_kl = 1e6
max_length_ratio = 1e6
[[learning.starter.rewards]]
name = "legal"
run = "{program}"
"""
PROGRAM = """#!{python}
import json, sys
board, answer = json.load(sys.stdin)["messages"][-2:]
print(int((answer.get("content") or "") in [cell for cell in board["content"] if cell.isdigit()]))
"""
PROMPTS = 24


def boards(count: int) -> list[str]:
    """Different boards on which it is the agent's turn, one move or two into a game."""
    found: dict[str, None] = {}
    for number in range(200):
        first = game.first_board(1, f"opening {number}")
        cell = game.free(first)[number % 8]
        found |= dict.fromkeys((first, game.after(first, cell, f"opening {number}")))
    return list(found)[:count]


def asked(board: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": game.SYSTEM}, {"role": "user", "content": board}]


@pytest.fixture
def app(tmp_path: Path) -> Iterator[App]:
    program = tmp_path / "legal.py"
    program.write_text(PROGRAM.format(python=sys.executable))
    program.chmod(0o755)
    (tmp_path / "whetstone.toml").write_text(CONFIG.format(program=program))
    with up(tmp_path / "data", "--config", str(tmp_path / "whetstone.toml")) as (_, addresses):
        app = App(addresses)
        yield app
        app.http.close()
        app.vllm.close()


def test_a_candidate_that_is_far_worse_on_held_out_prompts_never_goes_live(app: App) -> None:
    for number, board in enumerate(boards(PROMPTS)):
        headers = {"X-Trajectory-Id": f"eval-{number}", "X-Split": "eval"}
        body = {"model": "starter", "messages": asked(board), "max_tokens": 8}
        assert app.http.post("/v1/chat/completions", json=body, headers=headers).status_code == 200
    until(lambda: len(app.rows("SELECT 1 FROM admin_trajectories WHERE split = 'eval'")) == PROMPTS)
    for number, board in enumerate(boards(8)):
        answer = app.chat("", f"taught-{number}", messages=asked(board))
        app.feedback(completion_id=answer["id"], demonstration="none")
    step = app.step(kind="sft", **{"from": "demonstrations"})
    assert step["state"] == "rejected" and step["error"].startswith("heldout: ")

    probe, heldout = app.rows("SELECT * FROM gate_results ORDER BY created_at, id")
    assert (probe["test"], probe["decision"]) == ("probe", "pass")
    assert (heldout["test"], heldout["decision"], heldout["version"], heldout["against"]) == ("heldout", "reject", 1, 0)
    difference: Any = app.rows("SELECT figures ->> 'difference' AS d FROM gate_results WHERE test = 'heldout'")[0]["d"]
    assert float(difference) <= -0.2
    (candidate,) = app.rows("SELECT * FROM admin_versions WHERE version = 1")
    assert (candidate["state"], candidate["served"], candidate["heldout_count"]) == ("rejected", 0, PROMPTS)
    assert app.rows("SELECT live_version FROM admin_policies WHERE policy = 'starter'") == [{"live_version": 0}]

    drawn = "SELECT first_version, split, state, why_not_trained FROM admin_trajectories"
    answers = app.rows(f"{drawn} WHERE group_id LIKE 'evaluation.%'")
    assert len(answers) == 2 * PROMPTS
    assert {tuple(row.values()) for row in answers} == {
        (version, "eval", "rewarded", "split_eval") for version in (0, 1)
    }
    # Every token that vLLM sampled for it is recorded: the probe's and the answers'.
    told = app.http.get("/metrics").text
    (completeness,) = (line.split()[1] for line in told.splitlines() if line.startswith("whetstone_capture_complete"))
    assert float(completeness) == 1.0
    # The app never met it.
    assert app.http.get("/v1/models").json()["data"][0]["id"] == "starter"
    assert app.chat("", "after", messages=asked(boards(1)[0]))["choices"][0]["message"]["content"]
    until(lambda: app.rows("SELECT 1 FROM admin_completions WHERE trajectory_id = 'after' AND policy_version = 0"))
