"""An example app's report, and what becomes of one that gives none."""

import subprocess
import sys

import pytest

from whetstone.demo.agent_process import AppFailed, report_of, still_runs
from whetstone.stack.stack import Stack


class Quiet(Stack):
    """A stack in which nothing dies."""

    def __init__(self) -> None:
        pass

    def watch(self) -> list[str]:
        return []


def agent(script: str) -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)


def test_a_report_longer_than_a_pipe_holds_is_read() -> None:
    with agent("import json; print('playing'); print(json.dumps({'won': [1] * 100_000}))") as process:
        assert len(report_of(process, Quiet())["won"]) == 100_000


@pytest.mark.parametrize("script", ["print('{}'); raise SystemExit(3)", "pass"])
def test_an_agent_that_fails_or_says_nothing_is_an_error(script: str) -> None:
    with agent(script) as process, pytest.raises(AppFailed, match=r"ended with code \d"):
        report_of(process, Quiet())


def test_an_app_that_was_to_go_on_and_ended_is_an_error_with_its_code() -> None:
    with agent("raise SystemExit(4)") as process:
        process.wait()
        with pytest.raises(AppFailed, match="ended early, with code 4"):
            still_runs(process)
