"""`whetstone status` on one screen: what runs, each policy's last step and gain, why nothing trains."""

import io
import os
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from rich.console import Console

from migrations import schema
from tests.conftest import NOW
from tests.unit.whetstone.cli.commands.test_trajectories import Here, Proxy, here, proxy
from tests.unit.whetstone.doctor.test_vllm_checks import write_addresses
from whetstone.cli.commands.status import examine
from whetstone.cli.tables.status.view import shown
from whetstone.config.settings import Settings
from whetstone.stack import data_lock

__all__ = ["here", "proxy"]
STEP = {
    "policy": "starter", "groups": 12, "trajectories": 96, "config": {}, "attempt": 1, "kind": "grpo",
}  # fmt: skip


def screen(facts: dict[str, Any], width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    console.print(shown(facts, datetime.now(UTC)))
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def in_one_line(text: str) -> str:
    return " ".join(text.split())


def test_the_last_step_and_the_gain_are_shown_with_what_they_compare(here: Here, proxy: Proxy) -> None:
    now = datetime.now(UTC)
    with here.engine.begin() as connection:
        connection.execute(schema.policies.update().values(live_version=1))
    here.seed.insert(schema.steps, project="default", id="starter#1", number=1, state="promoted", version_in=0,
                     version_out=1, reward_mean=0.5, created_at=now, ended_at=now, **STEP)  # fmt: skip
    for version, won in ((0, 10), (1, 30)):
        for number in range(40):
            here.seed.trajectory(f"v{version}-{number}", split="eval", state="excluded", first_version=version,
                                 last_version=version, reward=float(number < won), turns=0,
                                 prompt_hash=f"prompt {number}")  # fmt: skip
    facts = examine(Settings(data=here.data), now)
    (row,) = facts["policies"]
    assert row["gain"] == row["last_step"]["gain"]
    assert (row["gain"]["split"], row["gain"]["rewarded"], row["gain"]["mean"]) == ("eval", [40, 40], 0.5)
    assert row["gain"]["pairs"] == 40
    text = screen(facts)
    assert (
        "starter v1 over v0: reward +0.500 ± 0.162 on held-out calls, 40 pairs at" in text
        and text.count("over v0") == 1
    )
    assert any(line.startswith("starter") and "1 promoted" in line for line in text.splitlines())
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize(
    ("prompts", "line"),
    [
        (("a", "a"), "starter v1 over v0: reward +0.500 ± 0.195 in training"),
        (("a", "b"), "starter v1 over v0: not compared, because their prompts in training differ; send held-out"),
    ],
)
def test_a_gain_in_training_is_not_shown_where_the_prompts_have_changed(
    here: Here, proxy: Proxy, prompts: tuple[str, str], line: str
) -> None:
    with here.engine.begin() as connection:
        connection.execute(schema.policies.update().values(live_version=1))
    for version, won in ((0, 10), (1, 30)):
        for number in range(40):
            here.seed.trajectory(f"v{version}-{number}", state="rewarded", first_version=version, turns=0,
                                 last_version=version, reward=float(number < won),
                                 prompt_hash=f"{prompts[version]}{number}")  # fmt: skip
    assert line in in_one_line(screen(examine(Settings(data=here.data), datetime.now(UTC))))


def test_nothing_trains_without_a_stack_and_the_remedy_is_named(here: Here) -> None:
    facts = examine(Settings(data=here.data), datetime.now(UTC))
    (row,) = facts["policies"]
    assert row["training"]["now"] is False and row["training"]["why_not"] == "the stack is down"
    text = in_one_line(screen(facts))
    assert "Why nothing trains now starter: the stack is down → start it with `whetstone up`" in text


def test_a_server_that_was_stopped_with_the_stack_does_not_serve(here: Here) -> None:
    url = "http://127.0.0.1:33801"
    here.seed.insert(schema.replicas, project="default", id=url, state="serving", seen_at=NOW)
    facts = examine(Settings(data=here.data), NOW)
    assert [one["state"] for one in facts["replicas"]] == ["stopped"]
    assert f"{url} stopped" in in_one_line(screen(facts))
    assert not any(url in one["what"] for one in facts["problems"])
    # A server that the settings name was not started by `up`, so the last look at it is what is known.
    (listed,) = examine(Settings(data=here.data, vllm={"urls": (url,)}), NOW)["replicas"]  # type: ignore[arg-type]
    assert listed["state"] == "serving"


def test_scored_groups_are_counted_from_the_database(here: Here, proxy: Proxy) -> None:
    of = {"state": "scored", "compared_with": "group", "closed_at": NOW, "size": 2, "rewarded": 2}
    for number, spread in enumerate((0.5, 0.5, 0.0)):
        here.seed.group(f"g{number}", reward_mean=0.5, reward_spread=spread, **of)
    here.seed.group("single", reward_mean=1.0, **of | {"compared_with": "baseline", "rewarded": 16})
    (row,) = examine(Settings(data=here.data), NOW)["policies"]
    assert row["training"]["why_not"] == (
        "3 of the 12 scored groups that start a step are there (16 single attempts count in part)"
    )


def test_groups_with_equal_rewards_have_a_line(here: Here, proxy: Proxy) -> None:
    of = {"state": "discarded", "reason": "group_uniform", "compared_with": "group", "closed_at": NOW, "size": 2}
    for number, spread in enumerate((0.5, 0.0, 0.0, 0.0)):
        here.seed.group(f"g{number}", reward_mean=0.5, reward_spread=spread, rewarded=2, **of)
    text = in_one_line(screen(examine(Settings(data=here.data), NOW)))
    assert "equal in 3 of the last 4 closed groups (75%), and no step takes those → try harder or easier tasks" in text


@pytest.mark.parametrize(
    ("cap", "line"),
    [
        (None, "spent today $1.50 (judges $1.50, upstreams $0.00)"),
        (20, "spent today $1.50 of $20.00 (judges $1.50, upstreams $0.00)"),
        (1.5, "spending cap reached: $1.50 of $1.50 are spent on 2026-01-01; judging waits"),
    ],
)
def test_what_was_spent_today_is_shown_with_the_cap(here: Here, proxy: Proxy, cap: float | None, line: str) -> None:
    settings = Settings(data=here.data, spending={"usd_per_day": cap})  # type: ignore[arg-type]
    assert (examine(settings, NOW)["spending"] is None) == (cap is None), "nothing is shown without cap and costs"
    here.seed.insert(schema.judge_days, project="default", policy="starter", day="2026-01-01", judge="j", cost_usd=1.5,
                     **dict.fromkeys(("calls", "refused", "failed", "tokens"), 1))  # fmt: skip
    assert line in in_one_line(screen(examine(settings, NOW)))


def test_a_stack_that_stops_is_not_called_absent(here: Here) -> None:
    here.seed.insert(schema.replicas, project="default", id="http://h:1", state="serving", seen_at=NOW)
    with data_lock.exclusive(here.data):
        starting = examine(Settings(data=here.data), NOW)
        data_lock.mark_stopping(here.data)
        facts = examine(Settings(data=here.data), NOW)
    assert [one["what"] for one in starting["problems"]] == [f"the stack on {here.data} is starting"]
    assert [one["what"] for one in facts["problems"]] == [f"the stack on {here.data} is stopping"]
    assert [one["state"] for one in facts["replicas"]] == ["stopping"]
    text = in_one_line(screen(facts))
    assert "starter: the stack is stopping → wait: its last processes still run" in text and "no stack" not in text


def test_attempts_of_a_week_explain_what_is_missing(here: Here, proxy: Proxy) -> None:
    here.seed.trajectory("old", why_not_trained="greedy", state="ended", created_at=NOW - timedelta(days=30))
    (row,) = examine(Settings(data=here.data), NOW)["policies"]
    assert row["training"]["why_not"] == "no call has been recorded in the last 7 days"
    here.seed.trajectory("new", why_not_trained="no_reward", state="ended")
    (row,) = examine(Settings(data=here.data), NOW)["policies"]
    assert (row["attempts"], row["training"]["why_not"]) == (
        {"no_reward": 1},
        "no reward is known of 1 of the last 1 attempt",
    )


def test_a_step_that_trains_is_shown_in_place_of_a_reason(here: Here, proxy: Proxy) -> None:
    here.seed.insert(schema.steps, project="default", id="starter#3", number=3, state="claimed", version_in=0,
                     created_at=NOW, **STEP)  # fmt: skip
    facts = examine(Settings(data=here.data), NOW)
    assert facts["policies"][0]["training"] == {"now": True, "why_not": None, "remedy": None, "uniform": None}
    text = screen(facts)
    assert "starter trains now: step 3" in text and "Why nothing" not in text


@pytest.mark.parametrize("part", ["judge", "trainer"])
def test_judge_and_trainer_have_a_line_each(here: Here, proxy: Proxy, part: str) -> None:
    write_addresses(here.data, proxy=proxy.url, pids={"up": os.getpid(), part: os.getpid(), "vllm-1": os.getpid()})
    text = screen(examine(Settings(data=here.data), NOW))
    assert f"{part} runs (process {os.getpid()})" in in_one_line(text) and "vllm-1" in text
