"""The launcher's sweep on real tables; what it needs to start."""

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
from trainer.launcher.__main__ import Launcher
from whetstone.config.settings import Settings, SettingsError

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
    with engine.connect() as connection:
        (row,) = connection.execute(select(schema.launches))
    assert (row.reason, row.exit_code, row.steps) == ("starter: a step of 2 groups is due", 0, 0)
    launcher.sweep(datetime.now(UTC) + timedelta(minutes=1))
    assert launcher.launches.running
    launcher.launches.stop(datetime.now(UTC))


def test_it_starts_where_nothing_of_a_trainers_is_installed() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True)


def test_without_a_command_it_says_what_to_set(engine: Engine) -> None:
    with pytest.raises(SettingsError, match=r"launcher\.command is not set"):
        Launcher(Settings(), engine)
