"""Runs of the launcher's command, with real processes; what each cost; what comes after one that fails."""

import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, select

from migrations import schema
from tests.conftest import NOW
from trainer.launcher.launches import FIRST_PAUSE_S, LONGEST_PAUSE_S, Launches
from trainer.launcher.store import LaunchTable
from whetstone.config.launcher import LauncherSettings


class Scene:
    """A launcher's tables, and a clock that the test moves."""

    def __init__(self, engine: Engine, seed: Any) -> None:
        self.engine, self.seed = engine, seed
        self.now = datetime(2026, 1, 2, tzinfo=UTC)

    def launches(self, program: str = "", price: float | None = None, command: tuple[str, ...] = ()) -> Launches:
        settings = LauncherSettings(command=command or (sys.executable, "-c", program), usd_per_hour=price)
        return Launches(settings, LaunchTable(self.engine, "default"))

    def ended(self, launches: Launches) -> None:
        """Look until the command has ended."""
        deadline = time.monotonic() + 30
        while launches.running:
            assert time.monotonic() < deadline
            launches.look(self.now)
            time.sleep(0.01)

    def step(self, number: int, ended_at: datetime, state: str = "promoted") -> None:
        self.seed.insert(
            schema.steps, project="default", id=f"starter#{number}", policy="starter", number=number, state=state,
            version_in=0, groups=1, trajectories=2, config={}, attempt=1, created_at=ended_at, ended_at=ended_at,
        )  # fmt: skip

    def rows(self) -> list[Any]:
        with self.engine.connect() as connection:
            return list(connection.execute(select(schema.launches).order_by(schema.launches.c.number)))


@pytest.fixture
def scene(engine: Engine, seed: Any) -> Scene:
    return Scene(engine, seed)


def test_a_launch_is_recorded_with_its_steps_and_its_cost(scene: Scene) -> None:
    launches = scene.launches(price=3.0)
    began = scene.now
    scene.step(1, began - timedelta(seconds=1))
    launches.start("starter: a step was requested", began)
    assert launches.running and not launches.may_start(began)
    scene.step(2, began + timedelta(minutes=5))
    scene.step(3, began + timedelta(minutes=9), state="noop")
    scene.now = began + timedelta(minutes=10)
    scene.ended(launches)
    (row,) = scene.rows()
    assert (row.number, row.reason, row.steps, row.exit_code, row.error) == (
        1, "starter: a step was requested", 1, 0, None,
    )  # fmt: skip
    assert row.cost_usd == pytest.approx(0.5)
    assert (row.created_at, row.ended_at) == (began, scene.now)
    assert launches.may_start(scene.now)


def test_without_a_price_the_cost_is_unknown(scene: Scene) -> None:
    launches = scene.launches()
    launches.start("due", scene.now)
    scene.ended(launches)
    assert scene.rows()[0].cost_usd is None


def failing(scene: Scene) -> Launches:
    return scene.launches("raise SystemExit(3)")


def taking_no_step(scene: Scene) -> Launches:
    return scene.launches()


def missing(scene: Scene) -> Launches:
    return scene.launches(command=("/nowhere/at-all",))


@pytest.mark.parametrize(
    ("made", "code", "says"),
    [(failing, 3, "the command ended with 3"), (taking_no_step, 0, None), (missing, None, "could not be started")],
)
def test_after_a_launch_without_a_step_the_next_one_waits(
    scene: Scene, made: Callable[[Scene], Launches], code: int | None, says: str | None
) -> None:
    launches, pauses = made(scene), []
    for _ in range(7):
        launches.start("due", scene.now)
        scene.ended(launches)
        began = scene.now
        while not launches.may_start(scene.now):
            scene.now += timedelta(seconds=10)
        pauses.append((scene.now - began).total_seconds())
    assert pauses[:3] == [FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S]
    assert pauses[-1] == LONGEST_PAUSE_S
    row = scene.rows()[0]
    assert row.exit_code == code
    assert (says in row.error) if says else row.error is None


def test_after_a_launch_with_steps_nothing_waits(scene: Scene) -> None:
    launches = scene.launches()
    launches.start("due", scene.now)
    scene.ended(launches)
    scene.now += timedelta(seconds=LONGEST_PAUSE_S)
    launches.start("due", scene.now)
    scene.step(1, scene.now)
    scene.ended(launches)
    assert launches.may_start(scene.now)


def test_stopping_the_launcher_ends_the_command_and_records_it(scene: Scene) -> None:
    launches = scene.launches("import time; time.sleep(60)")
    launches.start("due", scene.now)
    launches.stop(scene.now)
    (row,) = scene.rows()
    assert (row.exit_code, row.error, row.ended_at) == (-15, "stopped with the launcher", scene.now)
    launches.stop(scene.now)
    assert len(scene.rows()) == 1


def test_a_launch_of_a_killed_launcher_ends_when_the_next_one_begins(scene: Scene) -> None:
    table = LaunchTable(scene.engine, "default")
    assert table.begin("due", NOW) == 1
    assert table.begin("due", scene.now) == 2
    first, second = scene.rows()
    assert first.ended_at == scene.now and first.cost_usd is None and "was killed" in first.error
    assert second.ended_at is None
