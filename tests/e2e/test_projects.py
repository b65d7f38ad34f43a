"""Two projects on the whole stack: one vLLM, keys made at the command line, a step that is one project's alone."""

import itertools
import subprocess
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, Self

import httpx
import pytest

from tests.e2e.test_stack import ROOT, WHETSTONE, query, until, up
from whetstone.vllm.client import Vllm

pytestmark = [pytest.mark.stack, pytest.mark.long(part="stacks"), pytest.mark.timeout(600)]

CONFIG = """
[vllm]
max_loras = 8
[trainer]
groups_per_step = 1
min_fresh_share = 0.0
[projects.acme]
policies = ["acme-agent"]
aliases = { "gpt-4o" = "acme-agent" }
"""
MEMBERS = 4


def key_of(data: Path, config: Path, project: str, *scopes: str) -> str:
    chosen = [word for scope in scopes for word in ("--scope", scope)]
    command = [*WHETSTONE, "keys", "create", "--project", project, "--name", "an app", *chosen]
    command += ["--data", str(data), "--config", str(config)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


class Client:
    """An app of one project, and its admin."""

    def __init__(self, url: str, key: str) -> None:
        self.http = httpx.Client(base_url=url, timeout=120, headers={"Authorization": f"Bearer {key}"})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()

    def chat(self, model: str, trajectory: str) -> httpx.Response:
        body = {"model": model, "messages": [{"role": "user", "content": "X to move"}], "max_tokens": 8}
        headers = {"X-Trajectory-Id": trajectory, "X-Group-Id": "g", "X-Group-Size": str(MEMBERS)}
        return self.http.post("/v1/chat/completions", json=body, headers=headers)


def test_a_step_of_one_project_changes_nothing_of_the_other(tmp_path: Path) -> None:
    config, data = tmp_path / "whetstone.toml", tmp_path / "data"
    config.write_text(CONFIG)
    with up(data, "--config", str(config)) as (_, addresses), ExitStack() as opened:
        keys = {project: key_of(data, config, project, "admin") for project in ("default", "acme")}
        until(lambda: httpx.get(f"{addresses['proxy']}/v1/models").status_code == 401)
        home, acme = (opened.enter_context(Client(addresses["proxy"], keys[project])) for project in keys)
        vllm = opened.enter_context(closing(Vllm(addresses["vllm"])))
        assert home.chat("acme-agent", "t").status_code == 404
        assert acme.chat("starter", "t").status_code == 404
        for client, model in ((home, "starter"), (acme, "gpt-4o")):
            for member in range(MEMBERS):
                assert client.chat(model, f"t{member}").status_code == 200
                said = {"trajectory_id": f"t{member}", "reward": float(member % 2)}
                assert client.http.post("/v1/feedback", json=said).status_code == 202
        until(lambda: len(query(data, "SELECT * FROM admin_groups WHERE state = 'scored'")) == 2)
        assert home.http.post("/admin/policies/acme-agent/step").status_code == 404
        assert acme.http.post("/admin/policies/acme-agent/step").status_code == 202
        (step,) = until(lambda: query(data, "SELECT * FROM admin_steps WHERE state IN ('promoted', 'rejected')"), 120)
        assert (step["project"], step["policy"], step["state"]) == ("acme", "acme-agent", "promoted")
        name = f"acme-agent@v{step['version_out']}"
        assert name in vllm.models()
        # A trajectory stays on the version it began with: each look is a new one.
        looks = (acme.chat("gpt-4o", f"after{look}") for look in itertools.count())
        until(lambda: next(looks).headers["x-policy-version"] == str(step["version_out"]))
        assert home.chat("starter", "after").headers["x-policy-version"] == "0"
        assert home.chat(name, "after").status_code == 404
    states: dict[str, Any] = {
        row["project"]: row["n"]
        for row in query(
            data, "SELECT project, count(*) AS n FROM admin_trajectories WHERE state = 'trained' GROUP BY project"
        )
    }
    assert states == {"acme": MEMBERS}
