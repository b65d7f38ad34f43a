"""A policy that takes over from a model of another server, on the whole stack: real vLLM, proxy and workers."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks.fakes.teacher import Teacher
from tests.e2e.test_stack import WHETSTONE, play, until, up
from whetstone.cli.tables.sql_query import asking

pytestmark = [pytest.mark.stack, pytest.mark.long(part="stacks"), pytest.mark.timeout(600)]

CONFIG = """
[upstreams.far]
url = "{url}"
models = {{ player = "far" }}
[learning.starter.handover]
teacher = "player"
shares = [0.5, 1.0]
usd_per_million_prompt_tokens = 1000000
usd_per_million_completion_tokens = 1000000
"""


def test_a_policy_that_beats_its_teacher_gets_all_of_the_traffic(tmp_path: Path) -> None:
    data, config = tmp_path / "data", tmp_path / "whetstone.toml"
    # "0" names no cell: the teacher loses every game.
    with Teacher(lambda _messages: "0") as teacher:
        config.write_text(CONFIG.format(url=teacher.url))
        with up(data, "--config", str(config)) as (_, addresses):

            def games() -> dict[str, int]:
                query = "SELECT policy, COUNT(*) AS games FROM admin_trajectories WHERE reward IS NOT NULL GROUP BY 1"
                with asking(addresses["database"], query) as (_, rows):
                    return dict(rows)

            def handover() -> dict[str, Any]:
                command = [*WHETSTONE, "policies", "handover", "--json", "--data", str(data), "--config", str(config)]
                (row,) = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
                return dict(row)

            assert handover()["share"] == 0.5
            report = play(addresses["proxy"], 150, "--group-size", "1")
            assert report["failed_requests"] == 0
            until(lambda: handover()["share"] == 1.0, 60)
            first = games()
            assert min(first["starter"], first["player"]) >= 50
            play(addresses["proxy"], 30, "--group-size", "1", "--run", "later")
            until(lambda: sum(games().values()) == 180, 30)
            assert games() == first | {"starter": first["starter"] + 30}
            last = handover()
            assert last["decision"] == "raise"
            assert last["saved_usd"] == last["prompt_tokens"] + last["completion_tokens"] > 0
