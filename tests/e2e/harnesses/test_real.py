"""A real model learns its tasks with the default settings; the check can fail, and goes on where it was cut off."""

import json
import math
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from rich.console import Console

from benchmarks.real import report
from benchmarks.real.progress import Measurement, Plan, Progress, begun
from benchmarks.real.tasks import TASKS
from benchmarks.real.training import Training
from whetstone.config.settings import SettingsError

ROOT = Path(__file__).resolve().parents[3]


def run(smollm2: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.real", "--model", str(smollm2), *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=7000, check=False)


@pytest.mark.stack
@pytest.mark.long(part="real")
@pytest.mark.timeout(7200)
def test_a_real_model_learns_to_route_tickets_with_the_default_settings(smollm2: Path, tmp_path: Path) -> None:
    done = run(smollm2, "--json", str(tmp_path / "routing.json"))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.stack
@pytest.mark.long(part="real")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("task", "lessons"), [("json", 2), ("agent", 5)])
def test_a_task_with_lessons_goes_from_its_teacher_to_rewards_and_its_run_goes_on(
    task: str, lessons: int, smollm2: Path, tmp_path: Path
) -> None:
    """So few steps need not raise the reward; the second run has nothing left to do."""
    path, data = tmp_path / "figures.json", tmp_path / "data"
    options = ["--task", task, "--lessons", str(lessons), "--steps", "1", "--questions", "16", "--data", str(data)]
    first = run(smollm2, *options, "--json", str(path))
    figures = json.loads(path.read_text())
    kinds = [step["kind"] for step in figures["steps"]]
    assert kinds[: lessons + 1] == ["sft"] * lessons + ["grpo"] and set(kinds[lessons + 1 :]) <= {"sft", "grpo"}, (
        first.stdout + first.stderr
    )
    teacher = TASKS[task].lessons
    assert teacher is not None
    alone = ["lessons alone"] if teacher.compare else []
    assert list(figures["measured"]) == ["before", "after", *alone]
    assert all(figures["seconds"][stage] >= figures["seconds"]["after"] > 0 for stage in alone)
    assert figures["failed_requests"] == 0
    run(smollm2, *options, "--json", str(path))
    again = json.loads(path.read_text())
    assert (again["steps"], again["measured"]) == (figures["steps"], figures["measured"])


def figures(**changed: Any) -> dict[str, Any]:
    """What a run leaves when all is well."""
    steps = [{"kind": "grpo", "state": "promoted", "kl": 0.1 * number} for number in range(3)]
    planned = {"steps": 3, "lessons": 0, "questions": 200}
    measured = {"before": {"each": [0, 1] * 100}, "after": {"each": [1] * 150 + [0] * 50}}
    usual = {"steps": steps, "measured": measured, "planned": planned, "failed_requests": 0, "shuffle_rewards": False}
    usual |= {"fates": {"trained": 90, "group_uniform": 10}, "max_kl": 1.0, "seconds": {"after": 60.0}}
    return usual | changed


UNCHANGED = {"before": {"each": [0, 1] * 100}, "after": {"each": [0, 1] * 100}}


def test_a_reward_that_rose_without_a_rejection_and_near_the_base_holds() -> None:
    assert report.faults_of(figures()) == []


@pytest.mark.parametrize(
    ("changed", "fault"),
    [
        ({"measured": UNCHANGED}, "the reward did not rise"),
        ({"failed_requests": 1}, "1 requests failed"),
        ({"preferred": {"share": [0.6, 0.54, 0.66]}}, "the judge prefers it in 60.0%"),
        ({"fates": {"trained": 94, "stale": 6}}, "94.0% of the attempts"),
        ({"steps": [{"kind": "grpo", "state": "promoted", "kl": 0.0}] * 2}, "2 steps, 3 are due"),
        ({"steps": [{"kind": "grpo", "state": "promoted", "kl": 1.2}] * 3}, "1.20 nats a token"),
        (
            {"steps": [*([{"kind": "grpo", "state": "promoted"}] * 3), {"kind": "sft", "state": "rejected"}]},
            "rejected",
        ),
    ],
)
def test_each_fault_is_named(changed: dict[str, Any], fault: str) -> None:
    (named,) = report.faults_of(figures(**changed))
    assert fault in named


def test_without_a_limit_a_policy_may_be_far_from_the_base_model() -> None:
    far = [{"kind": "grpo", "state": "promoted", "kl": 1.2}] * 3
    assert report.faults_of(figures(steps=far, max_kl=None)) == []


def test_with_rewards_that_mean_nothing_a_rise_is_the_fault() -> None:
    (named,) = report.faults_of(figures(shuffle_rewards=True))
    assert "though rewards mean nothing" in named
    assert report.faults_of(figures(shuffle_rewards=True, measured=UNCHANGED)) == []


PLAN = Plan("json", 0, shuffle_rewards=False, steps=20, lessons=40, questions=300, model="m", settings={})


def test_a_run_goes_on_from_what_its_folder_says(tmp_path: Path) -> None:
    progress = begun(tmp_path, PLAN)
    assert progress == Progress(PLAN)
    progress.taught, progress.seconds = True, {"before": 12.5}
    progress.measured["before"] = Measurement("starter@v40", [0, 1], [0.5, 1.0])
    progress.save(tmp_path)
    assert begun(tmp_path, PLAN) == progress


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "letters.txt").touch()
    with pytest.raises(SettingsError, match="holds something else"):
        begun(tmp_path, PLAN)
    assert [path.name for path in tmp_path.iterdir()] == ["letters.txt"]


def test_a_run_with_other_options_is_refused(tmp_path: Path) -> None:
    begun(tmp_path, PLAN)
    with pytest.raises(SettingsError, match="a run with seed 0, steps 20: give the same options"):
        begun(tmp_path, msgspec.structs.replace(PLAN, seed=1, steps=21))


def test_the_table_compares_each_version_with_the_first() -> None:
    progress = Progress(PLAN, measured={"before": Measurement("v1", [0, 0, 0, 1], [0.5] * 4)})
    progress.measured |= {"after": Measurement("v2", [1, 1, 0, 1], [1.0, 1.0, 0.5, 1.0])}
    table = report.table_of(progress, TASKS["json"])
    columns = [list(column.cells) for column in table.columns]
    assert columns[0] == ["before rewards", "after rewards"] and columns[1] == ["25.0%", "75.0%"]
    assert columns[3] == ["50.0%", "87.5%"]
    assert columns[4][0] == "" and columns[4][1].startswith("+50.0% (")
    assert [column.header for column in table.columns][1::2] == ["exact record", "right fields"]


def test_the_file_has_a_line_for_each_step_and_reads_back(tmp_path: Path) -> None:
    path = tmp_path / "results" / "json-seed0.json"
    some = figures(ended_at="2026-11-26T18:00:00+00:00")
    report.write(path, some)
    assert json.loads(path.read_text()) == some
    assert sum('"promoted"' in line for line in path.read_text().splitlines()) == 3


class ScriptedPolicy:
    """A policy whose steps take ten seconds each on a clock of its own; `cut_off` steps later it raises."""

    def __init__(self, steps: list[dict[str, Any]], cut_off: int = 1000) -> None:
        self.ended, self.cut_off = steps, cut_off
        self.now, self.failed_requests, self.calls = 0.0, 0, list[str]()
        self.rewards: dict[int, Any] = {}
        self.base = steps[-1]["version_out"] if steps else 0

    @property
    def live(self) -> str:
        return f"starter@v{self.base}"

    def run(self, *options: str) -> dict[str, Any]:
        self.calls.append("teach" if "teacher" in options else f"measure {self.live}")
        return {"each": [0, 1], "fields": [0.5, 1.0]}

    def learn(self, steps: int, *options: str, seconds: float = math.inf) -> None:
        self.calls.append(f"learn {steps}{' shuffled' if '--shuffle-rewards' in options else ''}")
        until_s = self.now + seconds
        for _ in range(steps):
            if self.now < until_s:
                self._step("grpo")

    def imitate(self, source: str, min_reward: float, limit: int) -> None:
        assert (source, min_reward, limit) == ("teacher", 1.0, 64)
        self._step("sft")

    def promote(self, version: int) -> None:
        self.calls.append(f"promote {version}")
        self.base = version

    def await_rewarded(self, policy: str, count: int) -> None:
        self.calls.append(f"await {count} of {policy}")

    def _step(self, kind: str) -> None:
        if not self.cut_off:
            raise KeyboardInterrupt
        self.cut_off -= 1
        self.now += 10
        number = len(self.ended) + 1
        self.ended.append({"number": number, "kind": kind, "version_in": self.base, "version_out": number})
        self.base = number
        self.after_step()

    def after_step(self) -> None:
        """Set by who awaits steps."""


def train(policy: ScriptedPolicy, progress: Progress, data: Path, minutes: float = math.inf) -> None:
    task = replace(TASKS[progress.plan.task], minutes=minutes)
    Training(cast(Any, policy), task, progress, data, Console(quiet=True), lambda: policy.now).run()


SHORT = msgspec.structs.replace(PLAN, steps=3, lessons=2)


def test_lessons_alone_begin_before_rewards_and_take_as_long(tmp_path: Path) -> None:
    policy, progress = ScriptedPolicy([]), begun(tmp_path, SHORT)
    train(policy, progress, tmp_path)
    teacher = TASKS["json"].lessons
    assert teacher is not None
    lessons = ["teach", f"await {teacher.questions} of teacher", "measure starter@v2"]
    alone = ["promote 2", "measure starter@v8"]
    assert policy.calls == [*lessons, "learn 3", "measure starter@v5", *alone]
    assert [step["kind"] for step in policy.ended] == ["sft"] * 2 + ["grpo"] * 3 + ["sft"] * 3
    assert policy.ended[5]["version_in"] == 2
    assert progress.seconds == {"before": 20.0, "after": 30.0, "lessons alone": 30.0}
    assert begun(tmp_path, SHORT) == progress


@pytest.mark.parametrize("cut_off", range(9))
def test_a_run_that_is_cut_off_anywhere_takes_each_step_once(cut_off: int, tmp_path: Path) -> None:
    steps: list[dict[str, Any]] = []
    first = ScriptedPolicy(steps, cut_off)
    try:
        train(first, begun(tmp_path, SHORT), tmp_path)
    except KeyboardInterrupt:
        second = ScriptedPolicy(steps)
        train(second, begun(tmp_path, SHORT), tmp_path)
        assert "teach" not in second.calls and len(steps) > cut_off
    assert [step["kind"] for step in steps] == ["sft"] * 2 + ["grpo"] * 3 + ["sft"] * 3
    progress = begun(tmp_path, SHORT)
    assert [measurement.version for measurement in progress.measured.values()] == [f"starter@v{n}" for n in (2, 5, 8)]
    assert progress.seconds == {"before": 20.0, "after": 30.0, "lessons alone": 30.0}


def test_a_task_that_wants_no_comparison_takes_no_more_lessons(tmp_path: Path) -> None:
    policy, plan = ScriptedPolicy([]), msgspec.structs.replace(SHORT, task="agent")
    progress = begun(tmp_path, plan)
    train(policy, progress, tmp_path)
    assert policy.calls[-1] == "measure starter@v5" and list(progress.measured) == ["before", "after"]


def test_the_control_shuffles_rewards_and_measures_no_lessons_alone(tmp_path: Path) -> None:
    plan = msgspec.structs.replace(SHORT, shuffle_rewards=True)
    policy = ScriptedPolicy([])
    train(policy, begun(tmp_path, plan), tmp_path)
    assert policy.calls[3:] == ["learn 3 shuffled", "measure starter@v5"]


def test_a_task_without_lessons_begins_with_the_base_model(tmp_path: Path) -> None:
    policy = ScriptedPolicy([])
    train(policy, begun(tmp_path, msgspec.structs.replace(SHORT, task="routing", lessons=0)), tmp_path)
    assert policy.calls == ["measure starter@v0", "learn 3", "measure starter@v3"]


@pytest.mark.parametrize("cut_off", range(4))
def test_training_ends_with_its_minutes_over_all_its_parts(cut_off: int, tmp_path: Path) -> None:
    plan, steps = msgspec.structs.replace(SHORT, task="routing", lessons=0, steps=9), list[dict[str, Any]]()
    with suppress(KeyboardInterrupt):
        train(ScriptedPolicy(steps, cut_off), begun(tmp_path, plan), tmp_path, minutes=0.5)
    policy = ScriptedPolicy(steps)
    train(policy, begun(tmp_path, plan), tmp_path, minutes=0.5)
    assert len(steps) == 3
    assert begun(tmp_path, plan).measured["after"].version == "starter@v3"


def test_fewer_steps_are_a_fault_unless_the_minutes_were_over() -> None:
    few = {"steps": 30, "lessons": 0, "questions": 2, "minutes": 25}
    assert report.faults_of(figures(planned=few, seconds={"after": 1500.0})) == []
    (named,) = report.faults_of(figures(planned=few, seconds={"after": 1499.0}))
    assert named == "3 steps, 30 are due"
