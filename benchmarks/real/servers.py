"""Run what a task needs beside the stack: its rule program as another server, and its judge."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from benchmarks.fakes.judge import RuleJudge, rule_in
from benchmarks.fakes.teacher import Teacher
from benchmarks.real.task import Task

TEACHER = "teacher"
"""The policy that the rule program is."""
JUDGE = "rule"
NOISE_SD = 0.1
"""Of the judge's scores, which lie between 0 and 1: models differ from themselves by as much."""


@contextmanager
def servers_of(task: Task, policy: str, seed: int, *, shuffled: bool) -> Iterator[dict[str, Any]]:
    """Run the task's servers; yield the settings by which the stack knows them.

    `seed`: of the judge's noise. `shuffled`: the judge exchanges the scores of each group's attempts.
    """
    settings: dict[str, Any] = {}
    with ExitStack() as servers:
        if task.lessons is not None:
            teacher = servers.enter_context(Teacher(task.lessons.rule))
            settings["upstreams"] = {"rules": {"url": teacher.url, "models": {TEACHER: "rules"}}}
        if task.judge is not None:
            judge = servers.enter_context(RuleJudge(rule_in(task.judge), NOISE_SD, shuffled=shuffled, seed=seed))
            settings["judges"] = {JUDGE: {"model": f"openai/{JUDGE}", "url": judge.url}}
            settings["learning"] = {policy: {"ruler": {"judges": [JUDGE]}}}
        yield settings


def judge_url(settings: dict[str, Any]) -> str:
    """Return the address of the task's judge; empty without one."""
    return str(settings.get("judges", {}).get(JUDGE, {}).get("url", ""))
