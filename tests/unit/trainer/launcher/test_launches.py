"""Runs of the launcher's command, with real processes; what each cost; what comes after one that fails."""

import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, select
from sqlalchemy.exc import OperationalError

from migrations import schema
from tests.conftest import NOW
from trainer.launcher.launches import FIRST_PAUSE_S, LONGEST_PAUSE_S, Launches
from trainer.launcher.store import VAIN, LaunchTable
from whetstone.config.launcher import LauncherSettings


class Scene:
    """A launcher's tables, and a clock that the test moves."""

    def __init__(self, engine: Engine, seed: Any) -> None:
        self.engine, self.seed = engine, seed
        self.now = datetime(2026, 1, 2, tzinfo=UTC)

    def launches(self, program: str = "", command: tuple[str, ...] = (), **settings: Any) -> Launches:
        given = LauncherSettings(command=command or (sys.executable, "-c", program), **settings)
        return Launches(given, LaunchTable(self.engine, "default"))

    def ended(self, launches: Launches) -> None:
        """Look until the command has ended."""
        deadline = time.monotonic() + 30
        while launches.running:
            assert time.monotonic() < deadline
            launches.look(self.now)
            time.sleep(0.01)

    def version(self, number: int, at: datetime) -> None:
        """A step makes a version, which the gate may test for long."""
        self.seed.insert(
            schema.policy_versions, project="default", id=f"starter@v{number}", policy="starter", version=number,
            parent=0, step=number, state="candidate", served=True, created_at=at,
        )  # fmt: skip

    def failed(self, number: int, ended_at: datetime) -> None:
        self.seed.insert(
            schema.steps, project="default", id=f"starter#{number}", policy="starter", number=number, state="failed",
            version_in=0, groups=1, trajectories=2, config={}, attempt=1, created_at=ended_at, ended_at=ended_at,
        )  # fmt: skip

    def rows(self) -> list[Any]:
        with self.engine.connect() as connection:
            return list(connection.execute(select(schema.launches).order_by(schema.launches.c.number)))


@pytest.fixture
def scene(engine: Engine, seed: Any) -> Scene:
    return Scene(engine, seed)


def test_a_launch_is_recorded_with_its_steps_and_its_cost(scene: Scene) -> None:
    launches = scene.launches(usd_per_hour=3.0)
    began = scene.now
    scene.version(1, began - timedelta(seconds=1))
    launches.start("starter: a step was requested", began)
    assert launches.running and not launches.may_start(began)
    scene.version(2, began + timedelta(minutes=5))
    scene.failed(3, began + timedelta(minutes=9))
    scene.failed(4, began + timedelta(minutes=11))
    scene.now = began + timedelta(minutes=10)
    scene.ended(launches)
    (row,) = scene.rows()
    assert (row.number, row.reason, row.steps, row.exit_code, row.error) == (
        1, "starter: a step was requested", 2, 0, None,
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
    [(failing, 3, "the command ended with 3"), (taking_no_step, 0, VAIN), (missing, None, "could not be started")],
)
def test_after_a_launch_without_a_step_the_next_one_waits(
    scene: Scene, made: Callable[[Scene], Launches], code: int | None, says: str
) -> None:
    launches, pauses = made(scene), []
    for _ in range(9):
        launches.start("due", scene.now)
        scene.ended(launches)
        began = scene.now
        while not launches.may_start(scene.now):
            scene.now += timedelta(seconds=30)
        pauses.append((scene.now - began).total_seconds())
    assert pauses[:3] == [FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S]
    assert pauses[-1] == LONGEST_PAUSE_S
    row = scene.rows()[0]
    assert row.exit_code == code
    assert says in row.error


def test_after_a_launch_with_steps_nothing_waits(scene: Scene) -> None:
    launches = scene.launches()
    launches.start("due", scene.now)
    scene.ended(launches)
    scene.now += timedelta(seconds=LONGEST_PAUSE_S)
    launches.start("due", scene.now)
    scene.version(1, scene.now)
    scene.ended(launches)
    assert launches.may_start(scene.now)


def test_a_command_that_runs_for_too_long_is_ended(scene: Scene) -> None:
    launches = scene.launches("import time; time.sleep(60)", longest_s=600.0)
    launches.start("due", scene.now)
    launches.look(scene.now + timedelta(seconds=600))
    assert launches.running
    launches.look(scene.now + timedelta(seconds=601))
    assert not launches.running
    assert (scene.rows()[0].exit_code, scene.rows()[0].error) == (-15, "ended after 600 s (launcher.longest_s)")


def test_an_end_that_could_not_be_recorded_is_recorded_later(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    launches = scene.launches("raise SystemExit(3)")
    launches.start("due", scene.now)
    with monkeypatch.context() as patched:
        patched.setattr(LaunchTable, "end", away)
        with pytest.raises(OperationalError):
            scene.ended(launches)
    assert not launches.may_start(scene.now) and scene.rows()[0].ended_at is None
    ended = scene.now
    launches.look(scene.now + timedelta(minutes=5))
    assert (scene.rows()[0].exit_code, scene.rows()[0].ended_at) == (3, ended)


def away(*_: Any, **__: Any) -> int:
    raise OperationalError("SELECT 1", {}, Exception("the database is away"))


def test_stopping_the_launcher_ends_the_command_and_records_it(scene: Scene) -> None:
    launches = scene.launches("import time; time.sleep(60)")
    launches.start("due", scene.now)
    launches.stop()
    (row,) = scene.rows()
    assert (row.exit_code, row.error) == (-15, "stopped with the launcher")
    assert row.ended_at > scene.now
    launches.stop()
    assert len(scene.rows()) == 1


def test_a_launch_of_a_killed_launcher_ends_when_the_next_one_begins(scene: Scene) -> None:
    table = LaunchTable(scene.engine, "default")
    assert table.begin("due", NOW) == 1
    assert table.begin("due", scene.now) == 2
    first, second = scene.rows()
    assert first.ended_at == scene.now and first.cost_usd is None and "was killed" in first.error
    assert second.ended_at is None
