"""`whetstone policies handover`: which share of its requests a policy answers, why, and what that has saved."""

import json
from datetime import UTC, datetime
from typing import Any

from tests.unit.whetstone.cli.commands.test_trajectories import Here, here
from whetstone.config.settings import load
from whetstone.registry.projects import Store

__all__ = ["here"]

SETTINGS = """
[upstreams.other]
url = "http://other/v1"
models = { teacher = "gpt" }
[learning.starter.handover]
teacher = "teacher"
shares = [0.1, 0.9]
"""
PRICES = "usd_per_million_prompt_tokens = 1000\nusd_per_million_completion_tokens = 2000\n"


def shown(here: Here, settings: str) -> tuple[list[Any], str]:
    """Return what it prints with these settings, as JSON and as a table."""
    file = here.data / "whetstone.toml"
    file.write_text(settings)
    Store(here.engine).prepare(load(file, environment={}))
    runs = [here.run("policies", "handover", "--config", str(file), *more) for more in (("--json",), ())]
    assert [run.exit_code for run in runs] == [0, 0], runs[0].output
    return json.loads(runs[0].stdout), runs[1].stdout


def test_it_shows_share_reason_and_saved_cost(here: Here) -> None:
    shown(here, SETTINGS)
    here.seed.trajectory("t", turns=0)
    here.seed.completion("t", 0, created_at=datetime.now(UTC))
    (row,), table = shown(here, SETTINGS + PRICES)
    assert (row["policy"], row["teacher"], row["share"], row["decision"]) == ("starter", "teacher", 0.1, "begin")
    assert (row["answers"], row["prompt_tokens"], row["completion_tokens"]) == (1, 2, 2)
    assert row["saved_usd"] == 0.006
    assert (
        "10%" in table and "$0.01" in table and "starter begins with 10% of new trajectories" in " ".join(table.split())
    )


def test_without_prices_the_saved_cost_is_unknown(here: Here) -> None:
    (row,), table = shown(here, SETTINGS)
    assert row["saved_usd"] is None
    assert "no prices" in table


def test_without_a_handover_it_names_the_setting(here: Here) -> None:
    rows, table = shown(here, "")
    assert rows == []
    assert "[learning.<policy>.handover] begins it" in table
