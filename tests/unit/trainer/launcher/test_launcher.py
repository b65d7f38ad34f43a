"""The launcher's sweep on real tables; what it needs to start."""

import os
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, select

from migrations import schema
from tests.unit.trainer.store.test_claims import Tables
from trainer.errors import LeaseLost
from trainer.gate.controller import GateController
from trainer.launcher.__main__ import Launcher
from whetstone.config.settings import Settings, SettingsError, as_environment

WITHOUT = ("torch", "transformers", "peft", "safetensors", "accelerate")
PROGRAM = f"""
import sys
for name in {WITHOUT}:
    sys.modules[name] = None
import trainer.launcher.__main__
"""


@pytest.fixture
def launcher(engine: Engine, database_url: str, tmp_path: Path) -> Launcher:
    rules = {"groups_per_step": 2, "min_groups_per_step": 1, "min_fresh_share": 0}
    command = (sys.executable, "-c", "import time; time.sleep(0.5)")
    settings = Settings(data=tmp_path, database=database_url, trainer=rules, launcher={"command": command})
    return Launcher(settings, engine)


def test_it_launches_once_while_a_step_is_due_and_no_second_time_meanwhile(
    launcher: Launcher, engine: Engine, seed: Any
) -> None:
    tables = Tables(engine, seed)
    tables.group("g")
    launcher.sweep(datetime.now(UTC))
    assert not launcher.launches.running
    tables.group("h")
    deadline = time.monotonic() + 30
    launcher.sweep(datetime.now(UTC))
    assert launcher.launches.running
    while launcher.launches.running:
        assert time.monotonic() < deadline
        launcher.sweep(datetime.now(UTC))
        time.sleep(0.02)
    launcher.sweep(datetime.now(UTC))
    assert not launcher.launches.running, "it took no step, so the next launch waits"
    (row,) = rows(engine)
    assert (row.reason, row.exit_code, row.steps) == ("starter: a step of 2 groups is due", 0, 0)
    launcher.sweep(datetime.now(UTC) + timedelta(minutes=1))
    assert launcher.launches.running
    launcher.launches.stop()


def test_an_error_of_one_policys_tests_keeps_no_other_policy_waiting(
    launcher: Launcher, engine: Engine, seed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise LeaseLost("another worker has the step")

    monkeypatch.setattr(GateController, "go_on", broken)
    tables = Tables(engine, seed)
    tables.group("g")
    tables.group("h")
    launcher.sweep(datetime.now(UTC))
    assert launcher.launches.running
    launcher.launches.stop()


def test_its_program_says_that_it_is_ready_at_every_level_and_closes_its_launch_when_it_is_stopped(
    engine: Engine, database_url: str, seed: Any, tmp_path: Path
) -> None:
    tables = Tables(engine, seed)
    tables.group("g")
    tables.ask()
    command = (sys.executable, "-c", "import time; time.sleep(60)")
    settings = Settings(
        data=tmp_path, database=database_url, launcher={"command": command}, log={"level": "error"}, sweep_s=0.05
    )
    own = {**os.environ, **as_environment(settings, config=Path(os.devnull))}
    program = [sys.executable, "-m", "trainer.launcher"]
    with subprocess.Popen(program, env=own, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
        assert process.stderr is not None
        assert " ready." in process.stderr.readline()
        deadline = time.monotonic() + 30
        while not rows(engine):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.terminate()
        assert process.wait(30) == 0
    (row,) = rows(engine)
    assert (row.reason, row.error) == ("starter: a step was requested", "stopped with the launcher")


def rows(engine: Engine) -> list[Any]:
    with engine.connect() as connection:
        return list(connection.execute(select(schema.launches)))


def test_it_starts_where_nothing_of_a_trainers_is_installed() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True)


def test_without_a_command_it_says_what_to_set(engine: Engine) -> None:
    with pytest.raises(SettingsError, match=r"launcher\.command is not set"):
        Launcher(Settings(), engine)
