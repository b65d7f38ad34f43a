"""`whetstone step`: what it asks, how it waits, what it shows, how it ends. The proxy is a real one."""

import json
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import update
from typer.testing import CliRunner, Result

from migrations import schema
from tests.conftest import Seed
from tests.unit.proxy.conftest import FakeVllm, RunningProxy, settings_for
from tests.unit.whetstone.conftest import Ended
from tests.unit.whetstone.doctor.test_vllm_checks import write_addresses
from whetstone.cli.main import app
from whetstone.config.trainer import CORRECTIONS


class Stack:
    """A proxy that runs, as `up` leaves its addresses; `worker` ends the step that is asked for."""

    def __init__(self, proxy: RunningProxy, data: Path) -> None:
        self.proxy, self.data = proxy, data
        self.seed = Seed(proxy.engine, datetime.now(UTC))
        write_addresses(data, proxy=proxy.url, database=proxy.settings.database_url)

    def step(self, *arguments: str) -> Result:
        return CliRunner(env={"COLUMNS": "120"}).invoke(app, ["step", "--data", str(self.data), *arguments])

    def asked(self) -> Any:
        (row,) = self.proxy.rows(schema.policies, id="starter")
        return row.step_asked, row.step_asked_at

    def works(self, **ended: Any) -> threading.Thread:
        """A training worker that waits for a step and ends it so, after a look at it by who waits."""

        def work() -> None:
            deadline = time.monotonic() + 60
            while (asked := self.asked())[0] is None:
                assert time.monotonic() < deadline
                time.sleep(0.05)
            values = {"number": 1, "kind": asked[0]["kind"], "asked_at": asked[1], "version_in": 0, "groups": 3,
                      "trajectories": 24, "config": {}, "attempt": 1, "created_at": self.seed.now}  # fmt: skip
            self.seed.insert(
                schema.steps, project="default", id="starter#1", policy="starter", state="claimed", **values
            )
            time.sleep(0.5)
            with self.proxy.engine.begin() as connection:
                connection.execute(update(schema.steps).values(ended_at=datetime.now(UTC), **ended))

        thread = threading.Thread(target=work)
        thread.start()
        return thread


@pytest.fixture
def stack(sqlite_template: Path, tmp_path: Path) -> Iterator[Stack]:
    shutil.copyfile(sqlite_template, tmp_path / "whetstone.db")
    with FakeVllm() as fake:
        proxy = RunningProxy(settings_for(f"sqlite:///{tmp_path / 'whetstone.db'}", fake.url, tmp_path))
        yield Stack(proxy, tmp_path)
        proxy.stop()


def test_a_step_whose_version_goes_live_is_shown_with_its_figures(stack: Stack) -> None:
    worker = stack.works(state="promoted", version_out=1, loss=-0.125, kl=0.0, reward_mean=0.5)
    result = stack.step()
    worker.join()
    assert result.exit_code == 0, result.output
    shown = " ".join(result.output.replace("│", " ").split())
    assert "step 1 of starter" in shown and "kind grpo" in shown and "made version 1, promoted" in shown
    assert "trajectories 24" in shown and "loss -0.125" in shown and "kl 0" in shown
    assert "entropy" not in shown  # nothing is not zero
    assert stack.asked()[0] == {"kind": "grpo"}


@pytest.mark.parametrize("state", ["noop", "failed", "rejected"])
def test_a_step_that_makes_nothing_ends_with_1_and_its_reason(stack: Stack, state: str) -> None:
    worker = stack.works(state=state, error="no group [is] scored")
    result = stack.step("starter")
    worker.join()
    assert result.exit_code == 1
    assert f"{state}: no group [is] scored" in result.stderr


def test_a_supervised_step_is_asked_for_with_what_it_imitates(stack: Stack) -> None:
    result = stack.step("--imitate", "best", "--min-reward", "0.5", "--limit", "8", "--no-wait")
    assert result.exit_code == 0, result.output
    assert stack.asked()[0] == {"kind": "sft", "from": "best", "min_reward": 0.5, "limit": 8}


@pytest.mark.parametrize("source", CORRECTIONS)
def test_a_step_that_learns_from_words_may_take_each_source_of_them(stack: Stack, source: str) -> None:
    assert stack.step("--hindsight", source, "--no-wait").exit_code == 0
    policy = stack.seed.one(schema.policies, "starter")
    assert policy.step_asked == {"kind": "hindsight", "from": source, "min_reward": None, "limit": 64}


def test_a_teacher_must_be_one_of_the_settings(stack: Stack) -> None:
    result = stack.step("--distill", "large")
    assert result.exit_code == 1
    assert "there is none: add [teachers.NAME] to the settings" in " ".join(result.stderr.split())


def test_what_the_proxy_refuses_is_said_in_its_words(stack: Stack) -> None:
    assert stack.step("--no-wait").exit_code == 0
    again = stack.step("--no-wait")
    assert again.exit_code == 1 and "is asked for already" in again.stderr
    unknown = stack.step("no body")
    assert unknown.exit_code == 1 and "there is no policy 'no body'; there are: starter" in unknown.stderr
    assert "from must be" in stack.step("--imitate", "nobody").stderr


def test_a_stack_that_is_stopped_meanwhile_is_not_waited_for(stack: Stack) -> None:
    stopping = threading.Timer(1, (stack.data / "up.json").unlink)
    stopping.start()
    result = stack.step()
    stopping.join()
    assert result.exit_code == 1
    assert "the stack was stopped; the step goes on when it is started again" in result.stderr
    assert stack.asked()[0] == {"kind": "grpo"}


def test_what_came_of_it_is_one_object_where_json_is_asked_for(stack: Stack) -> None:
    worker = stack.works(state="promoted", version_out=1, loss=-0.125)
    result = stack.step("--json")
    worker.join()
    assert result.exit_code == 0
    told = json.loads(result.stdout)
    assert (told["state"], told["version_out"], told["loss"]) == ("promoted", 1, -0.125)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--rows",),
        ("--distill", "large", "--imitate", "best"),
        ("--distill", "large", "--dry-run"),
        ("--limit", "3"),
        ("--min-reward", "1"),
        ("--imitate", "best", "--limit", "0"),
        ("--hindsight", "rumours"),
    ],
)
def test_options_that_do_not_go_together_ask_for_nothing(stack: Stack, arguments: tuple[str, ...]) -> None:
    assert stack.step(*arguments).exit_code == 2
    assert stack.asked() == (None, None)


def test_without_a_stack_it_ends_with_2_and_the_remedy(whetstone: Callable[..., Ended], tmp_path: Path) -> None:
    ended = whetstone("step", "--data", str(tmp_path))
    assert (ended.code, ended.out) == (2, "")
    assert f"no stack runs on {tmp_path}: start it with `whetstone up`" in ended.message


def test_a_proxy_that_is_gone_is_no_stack(whetstone: Callable[..., Ended], tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        write_addresses(tmp_path, proxy=f"http://127.0.0.1:{free.getsockname()[1]}")
        ended = whetstone("step", "--data", str(tmp_path))
    assert ended.code == 2 and "no proxy answers at" in ended.message


def test_damaged_addresses_are_said(whetstone: Callable[..., Ended], tmp_path: Path) -> None:
    write_addresses(tmp_path, proxy=None)
    ended = whetstone("step", "--data", str(tmp_path))
    assert ended.code == 2 and "up.json cannot be read" in ended.message


def test_a_dry_run_needs_no_stack_and_asks_for_nothing(whetstone: Callable[..., Ended], stack: Stack) -> None:
    (stack.data / "up.json").unlink()
    ended = whetstone("step", "--dry-run", "--json", "--data", str(stack.data))
    assert ended.code == 0, ended.err
    told = json.loads(ended.out)
    assert (told["policy"], told["version_in"], told["trajectories"]) == ("starter", 0, [])
    assert told["why_not_due"].startswith("the policy only records")
    assert stack.asked() == (None, None)


def test_a_dry_run_without_a_database_ends_with_2(whetstone: Callable[..., Ended], tmp_path: Path) -> None:
    ended = whetstone("step", "--dry-run", "--data", str(tmp_path))
    assert ended.code == 2 and f"there is no database in {tmp_path}" in ended.message
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_goes_by_the_database_of_the_stack_that_runs(whetstone: Callable[..., Ended], stack: Stack) -> None:
    (stack.data / "elsewhere").mkdir()
    write_addresses(stack.data / "elsewhere", database=stack.proxy.settings.database_url)
    ended = whetstone("step", "--dry-run", "--data", str(stack.data / "elsewhere"))
    assert ended.code == 0, ended.err
    assert "no step of starter is due" in ended.out
    assert stack.proxy.rows(schema.steps) == []
