"""`whetstone doctor` on the log: what it counts on both databases, what it says of it, how the command ends."""

import json
import shutil
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from sqlalchemy import Engine
from typer.testing import CliRunner, Result

from tests.conftest import NOW, Seed
from whetstone.cli.main import app
from whetstone.config.settings import Settings
from whetstone.doctor import log_checks as log
from whetstone.doctor.log_store import LogStatistics, seen
from whetstone.vllm.self_test.questions import Check, Question

GOOD = LogStatistics(
    trajectories=100, grouped=90, ended=100, rewarded=80, stale=0, trained=50, too_long=0, longest=500,
    base_rewards=(0.0, 1.0) * 20, live_rewards=(1.0,) * 5, groups=40, uniform=10, completions=200,
    lacking=(("aborted", 3),), tools=("search", "get_weather"),
)  # fmt: skip
NOTHING = LogStatistics(0, 0, 0, 0, 0, 0, 0, 0, (), (), 0, 0, 0, (), ())


def said(question: Question, **changed: Any) -> Check:
    (found,) = [check for check in log.checks(replace(GOOD, **changed)) if check.name == question.name]
    return found


def test_a_log_that_is_good_to_learn_from_is_good_in_every_respect() -> None:
    assert [check.ok for check in log.checks(GOOD)] == [True] * 9


def test_an_empty_log_is_no_verdict() -> None:
    assert [check.ok for check in log.checks(NOTHING)] == [None] * 9
    assert "none" in log.checks(NOTHING)[0].found


@pytest.mark.parametrize(
    ("question", "changed", "word"),
    [
        (log.SIBLINGS, {"grouped": 20}, "X-Group-Id"),
        (log.REWARDS, {"rewarded": 3}, "post feedback"),
        (log.SUCCESS, {"base_rewards": (0.0,) * 19 + (1.0,)}, "warm up"),
        (log.SUCCESS, {"base_rewards": (1.0,) * 50}, "little left to teach"),
        (log.MIXED, {"uniform": 38}, "finer rewards"),
        (log.SAMPLED, {"lacking": (("greedy", 30), ("sampling_bent: top_p", 10))}, "temperature above 0"),
        (log.SAMPLED, {"lacking": (("sampling_bent: new_field", 30),)}, "docs/parameters.md"),
        (log.SAMPLED, {"lacking": (("no_token_ids", 30),)}, "no exact chat"),
        (log.SAMPLED, {"lacking": (("media", 30),)}, "images"),
        (log.CONSTRAINED, {"constrained": 30, "grammars": (("tools", 40),)}, "strict tools: send `strict: false`"),
        (log.CONSTRAINED, {"constrained": 30, "grammars": (("thinking_token_budget", 40),)}, "set an effort"),
        (
            log.CONSTRAINED,
            {"constrained": 30, "grammars": (("response_format", 40),)},
            "ask for the form in the prompt",
        ),
        (log.TOOLS, {"tools": ("search", "send_mail")}, "X-No-Train"),
        (log.LENGTH, {"too_long": 1}, "trainer.max_row_tokens"),
        (log.FRESH, {"stale": 30}, "max_staleness"),
    ],
)
def test_what_will_not_work_is_said_with_what_to_do(question: Question, changed: dict[str, Any], word: str) -> None:
    check = said(question, **changed)
    assert check.ok is False
    assert word in check.means


def test_the_parameters_that_bend_the_sampling_are_named() -> None:
    found = said(log.SAMPLED, lacking=(("greedy", 30), ("sampling_bent: top_p", 10), ("aborted", 9))).found
    assert found == "40 of 200 (20%) answers cannot be weighed; greedy 30; sampling_bent: top_p 10"


def test_the_habits_behind_the_most_frequent_reasons_are_named_and_no_more() -> None:
    lacking = (("media", 50), ("greedy", 40), ("sampling_bent: a", 30), ("sampling_bent: b", 20), ("no_logprobs", 10))
    means = said(log.SAMPLED, lacking=lacking).means
    assert [means.count(habit) for habit in log.HABITS.values()] == [
        int(reason in ("media", "greedy", "sampling_bent")) for reason in log.HABITS
    ]
    assert "temperature 0" not in said(log.SAMPLED, lacking=(("greedy", 3),)).means, "few do no harm"


def test_grammars_are_counted_by_their_source() -> None:
    assert said(log.CONSTRAINED, constrained=3, grammars=(("tools", 40), ("tool_choice", 2))).found == (
        "3 of 100 (3%) attempts were decided by what was allowed; answers with a grammar from tools: 40; "
        "answers with a grammar from tool_choice: 2"
    )


def test_rewards_that_are_no_shares_leave_the_success_open() -> None:
    assert said(log.SUCCESS, base_rewards=(-1.0, 2.0) * 20).ok is None


@pytest.mark.parametrize("name", ["send_mail", "bookFlight", "delete-row", "shell", "github.create_issue", "run"])
def test_a_tool_that_acts_is_told_by_its_name(name: str) -> None:
    assert said(log.TOOLS, tools=(name,)).found == f"may act: {name}"


@pytest.mark.parametrize("name", ["search", "get_orders", "runtime_info", "address_of", "settings", "look_up"])
def test_a_tool_that_only_looks_is_not_suspected(name: str) -> None:
    assert said(log.TOOLS, tools=(name,)).ok is True


def shown(statistics: LogStatistics, *, verbose: bool = False) -> str:
    console = Console(width=80)
    with console.capture() as capture:
        console.print(log.shown(log.checks(statistics), "mine", verbose=verbose))
    return capture.get()


@pytest.mark.parametrize("statistics", [NOTHING, replace(NOTHING, trajectories=3, ended=3, rewarded=2, completions=3)])
def test_too_little_to_tell_anything_is_one_line(statistics: LogStatistics) -> None:
    title, verdict = shown(statistics).splitlines()
    assert "the log of mine" in title and verdict.startswith("too little is recorded yet")
    assert shown(statistics, verbose=True).count("could not tell") == 9


def test_what_is_not_known_yet_is_one_line() -> None:
    lines = shown(replace(GOOD, tools=(), stale=0, trained=0)).splitlines()
    assert len(lines) <= 6 and "nothing in the log speaks against" in lines[-1]
    assert "? not known yet (--verbose says why): tools without effects, fresh" in " ".join(lines)


def test_a_doubt_comes_before_what_is_well_with_its_remedy() -> None:
    lines = shown(replace(GOOD, rewarded=3)).splitlines()
    assert lines[1].startswith("! rewards: 3 of 100") and "post feedback" in " ".join(lines[2:6])
    assert lines.index(next(line for line in lines if line.startswith("✓"))) > 2


def test_doubts_are_summed_up_below_the_table() -> None:
    text = " ".join(shown(replace(GOOD, grouped=0, too_long=9)).split())
    assert "the log of mine" in text
    assert "training may not work well on this: attempts with a sibling, length" in text


def test_what_is_counted(seed: Seed, engine: Engine) -> None:
    for group in ("a", "b"):
        seed.group(group, state="scored", rewarded=2, reward_spread=0.5 if group == "a" else 0.0, closed_at=NOW)
        for member in (0, 1):
            seed.trajectory(f"{group}{member}", group, turns=2, state="rewarded", reward=float(member))
    seed.group("ranked", state="discarded", rewarded=2, reward_spread=0.0, formed_by="evaluation")
    seed.group("single", formed_by="single")
    seed.trajectory("alone", "single", state="excluded", why_not_trained="stale")
    seed.trajectory("open", turns=0)
    seed.trajectory("decided", state="excluded", why_not_trained="constrained", turns=0)
    seed.trajectory("held-out", "a", split="eval", state="rewarded", reward=1.0)
    seed.trajectory("later", state="trained", reward=0.25, first_version=1, last_version=1, turns=0)
    tool = {"type": "function", "function": {"name": "send_mail"}}
    seed.completion("open", 0, why_not_trained="greedy", tools=[tool, {"name": "look", "input_schema": {}}, 7])
    seed.completion("decided", 0, constraints={"top_p": 0.9, "grammar": "tools"})
    seed.completion("decided", 1, constraints={"top_p": 0.9})
    log_facts = seen(engine, "default", "starter", max_row_tokens=7)
    assert (log_facts.trajectories, log_facts.grouped, log_facts.ended, log_facts.rewarded) == (8, 4, 7, 5)
    assert (log_facts.stale, log_facts.trained) == (1, 1)
    assert (log_facts.too_long, log_facts.longest) == (4, 8)
    assert sorted(log_facts.base_rewards) == sorted(log_facts.live_rewards) == [0, 0, 1, 1]
    assert (log_facts.groups, log_facts.uniform) == (2, 1)
    assert (log_facts.completions, log_facts.lacking) == (13, (("greedy", 1),))
    assert (log_facts.constrained, log_facts.grammars) == (1, (("tools", 1),))
    assert log_facts.tools == ("look", "send_mail")


def test_another_policy_and_another_project_count_for_nothing(seed: Seed, engine: Engine) -> None:
    seed.project("acme")
    seed.trajectory("theirs", project="acme", state="rewarded", reward=1.0)
    assert seen(engine, "default", "starter", 8192) == seen(engine, "nobody", "starter", 8192)
    assert seen(engine, "acme", "starter", 8192).rewarded == 1


def test_only_the_newest_are_looked_at(seed: Seed, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("whetstone.doctor.log_store.NEWEST", 3)
    for number in range(5):
        at = NOW + timedelta(minutes=number)
        seed.trajectory(f"t{number}", state="rewarded", reward=float(number), created_at=at, turns=0)
    log_facts = seen(engine, "default", "starter", 8192)
    assert (log_facts.trajectories, log_facts.rewarded) == (3, 3)
    assert log_facts.base_rewards == (0, 1, 2), "what came before training"
    assert log_facts.live_rewards == (4, 3, 2)


def doctor(data: Path, *arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "120"}).invoke(app, ["doctor", "--data", str(data), *arguments])


def test_the_log_is_looked_at_without_any_stack(tmp_path: Path, sqlite_template: Path) -> None:
    shutil.copyfile(sqlite_template, tmp_path / "whetstone.db")
    result = doctor(tmp_path, "--log")
    assert result.exit_code == 0
    assert "the log of starter" in result.output
    checks = json.loads(doctor(tmp_path, "--log", "--json").output)
    assert [check["ok"] for check in checks] == [None] * len(log.checks(GOOD))


def test_without_a_database_there_is_no_log(tmp_path: Path) -> None:
    from whetstone.config.settings import SettingsError

    result = doctor(tmp_path, "--log")
    assert isinstance(result.exception, SettingsError)
    assert "start the stack" in str(result.exception)


def test_examine_reads_the_settings_policy(seed: Seed, engine: Engine) -> None:
    seed.trajectory("t", state="rewarded", reward=1.0)
    assert log.examine(engine, Settings())[0].found.startswith("0 of 1")
    assert log.examine(engine, Settings(policy="other"))[0].found.startswith("none")
