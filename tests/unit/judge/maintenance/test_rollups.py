"""Roll-ups say what counting would: whatever happens to the rows, whoever adds them up and dies, on both databases."""

import math
import os
import random
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import Engine, text

from judge.maintenance.rollups import PAIRS, add, roll_up, take, together
from migrations import schema
from tests.conftest import Seed
from tests.unit.judge.counted import STATES, History, holds, left, trajectories
from whetstone.privacy.eraser import erasing, run
from whetstone.privacy.store import Target


@pytest.mark.parametrize("number", range(3))
def test_the_views_say_what_counting_says_at_any_time_of_any_history(engine: Engine, seed: Seed, number: int) -> None:
    dice = random.Random(number)
    history = History(engine, seed, dice)
    seed.group()
    for _ in range(8):
        for _ in range(15):
            history.happen()
        holds(engine)
        roll_up(engine, at_once=dice.choice((1, 7, 500)))
        holds(engine)
    assert {notes for _, notes in left(engine).values()} == {0}


def test_adding_up_again_changes_nothing(engine: Engine, seed: Seed) -> None:
    seed.trajectory("t", turns=2, reward=0.5)
    assert roll_up(engine) == 3
    assert roll_up(engine) == 0
    holds(engine)


def test_a_worker_that_dies_in_the_middle_has_added_nothing(engine: Engine, seed: Seed) -> None:
    seed.trajectory("t", turns=2)
    before = left(engine)
    with engine.connect() as connection, connection.begin() as dying:
        notes = take(connection, *PAIRS["completions"], 10)
        add(connection, PAIRS["completions"][0], together(notes))
        dying.rollback()
    assert left(engine) == before
    assert roll_up(engine) == 3
    holds(engine)


def test_what_a_write_that_is_undone_would_have_counted_is_not_counted(engine: Engine, seed: Seed) -> None:
    seed.trajectory("t")
    with engine.connect() as connection, connection.begin() as undone:
        connection.execute(schema.trajectories.update().values(reward=1.0))
        undone.rollback()
    holds(engine)


def test_a_reward_whose_square_is_nothing_is_taken(engine: Engine, seed: Seed) -> None:
    """PostgreSQL refuses a product that comes to 0: a trigger must not be what makes a write fail."""
    seed.trajectory("t", reward=1e-200)
    with engine.begin() as connection:
        connection.execute(schema.trajectories.update().values(reward=-3e-170))
    roll_up(engine)
    with engine.connect() as connection:
        told = connection.execute(text("SELECT sum(rewarded), sum(reward_squares) FROM admin_trajectory_hours")).one()
    assert tuple(told) == (1, 0.0)


def test_a_turn_that_changes_nothing_that_is_shown_leaves_one_note(engine: Engine, seed: Seed) -> None:
    seed.trajectory("t")
    roll_up(engine)
    with engine.begin() as connection:
        values = {"completions": 2, "sampled_tokens": 4, "last_version": 0, "last_seen_at": seed.now}
        connection.execute(schema.trajectories.update().values(values))
    seed.completion("t", 1)
    assert {what: notes for what, (_, notes) in left(engine).items()} == {
        "trajectories": 0,
        "completions": 1,
        "feedback": 0,
    }


def test_what_is_deleted_leaves_no_row(engine: Engine, seed: Seed) -> None:
    seed.trajectory("t", turns=2, reward=0.1)
    seed.feedback("t", 1.0, trajectory_id="t", state="applied")
    roll_up(engine)
    assert all(hours for hours, _ in left(engine).values())
    run(engine, erasing(Target("default", "trajectory", "t"), seed.now + timedelta(hours=1)))
    holds(engine)
    roll_up(engine)
    assert left(engine) == dict.fromkeys(PAIRS, (0, 0))


def test_a_reward_that_comes_days_later_is_counted_where_its_trajectory_began(engine: Engine, seed: Seed) -> None:
    seed.trajectory("t")
    roll_up(engine)
    with engine.begin() as connection:
        values = {"state": "rewarded", "reward": 0.25, "ended_at": seed.now + timedelta(days=9)}
        connection.execute(schema.trajectories.update().values(values))
    holds(engine)
    roll_up(engine)
    told, _ = trajectories(engine)
    (key,) = told
    assert (key[3], key[5]) == ("2026-01-01 12:00", "rewarded")


def test_a_reward_no_sum_can_bear_is_counted_and_spoils_no_sum(engine: Engine, seed: Seed) -> None:
    for name, reward in (("a", 1e300), ("b", 0.5)):
        seed.trajectory(name, reward=reward, state="rewarded")
    with engine.begin() as connection:
        connection.execute(schema.trajectories.update().where(schema.trajectories.c.id == "a").values(reward=-1e300))
    roll_up(engine)
    (amounts,) = trajectories(engine)[0].values()
    assert (amounts["rewarded"], amounts["off_scale"], amounts["reward_sum"]) == (1, 1, 0.5)


def test_what_waits_for_a_step_of_a_policy_that_does_not_train_says_so(engine: Engine, seed: Seed) -> None:
    seed.project("other", policy_state="recording")
    for project in ("default", "other"):
        seed.trajectory("t", project=project, why_not_trained="waiting_step")
    told, _ = trajectories(engine)
    assert {key[0]: key[-1] for key in told} == {"default": "waiting_step", "other": "policy_not_training"}


def test_a_policys_hours_are_found_by_an_index(engine: Engine, database_kind: str) -> None:
    if database_kind == "postgresql":
        pytest.skip("read from SQLite's plan, which has no statistics to depend on")
    since = "project = 'default' AND hour >= '2026-01-01 00:00'"
    for view, where in (
        ("admin_trajectory_hours", f"policy = 'starter' AND {since}"),
        ("admin_completion_hours", since),
        ("admin_feedback_hours", since),
    ):
        table = view.removeprefix("admin_")
        query = f"EXPLAIN QUERY PLAN SELECT count(*) FROM {view} WHERE {where}"
        with engine.connect() as connection:
            plan = [row.detail for row in connection.execute(text(query))]
        assert any("SEARCH h USING" in step and table in step and "hour>" in step for step in plan), plan


def test_sums_are_the_same_in_any_order() -> None:
    notes = [(("k",), (1, value)) for value in (0.1, 0.2, 0.3, 1e6, -1e6)]
    assert together(notes) == together(reversed(notes)) == {("k",): (5, math.fsum((0.1, 0.2, 0.3)))}


def test_what_comes_to_nothing_is_not_written() -> None:
    assert together([(("k",), (1, 0.5)), (("k",), (-1, -0.5))]) == {}


def test_writers_and_several_workers_at_once_lose_nothing(engine: Engine, seed: Seed) -> None:
    for name in "ab":
        seed.trajectory(name)
    t, over = schema.trajectories.c, threading.Event()

    def write(name: str) -> None:
        for turn in range(1, 31):
            seed.completion(name, turn)
            with engine.begin() as connection:
                values = {"reward": turn / 10, "state": STATES[turn % len(STATES)]}
                connection.execute(schema.trajectories.update().where(t.id == name).values(values))

    def add_up() -> None:
        while not over.is_set():
            roll_up(engine, at_once=5)

    with ThreadPoolExecutor(4) as at_once:
        writing = [at_once.submit(write, name) for name in "ab"]
        adding = [at_once.submit(add_up) for _ in range(2)]
        wait(writing)
        over.set()
    for done in (*writing, *adding):
        done.result()
    holds(engine)
    roll_up(engine)
    holds(engine)
    assert {notes for _, notes in left(engine).values()} == {0}


def test_the_judging_worker_adds_up_by_itself(engine: Engine, database_url: str, seed: Seed, tmp_path: Path) -> None:
    seed.trajectory("t")
    told = {"WHETSTONE_DATA": str(tmp_path), "WHETSTONE_DATABASE": database_url, "WHETSTONE_BROKER": "memory://"}
    command = [sys.executable, "-c", "from judge.tasks import app; app.tasks['judge.roll_up']()"]
    subprocess.run(command, env=os.environ | told, check=True, timeout=60)
    assert {notes for _, notes in left(engine).values()} == {0}
    holds(engine)
