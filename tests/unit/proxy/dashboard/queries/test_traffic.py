"""Traffic of a day: sums agree with the rows, hours keep apart, percentiles come from a bounded number of calls."""

from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Engine

from migrations import schema
from proxy.dashboard.queries import traffic
from proxy.dashboard.queries.first_lines import FirstLines, first_lines, group_prompts
from tests.conftest import NOW, Seed
from tests.unit.whetstone.calls.test_store import plan
from whetstone.calls.store import Filter
from whetstone.domain.ids import IMPORTED_LOG

ALL = Filter("default")
HOURS = traffic.hours_until(NOW + timedelta(minutes=30))


@pytest.fixture
def day(seed: Seed) -> Seed:
    """Calls of three hours, two policies and two keys."""
    for policy, upstream in (("writer", None), ("log", IMPORTED_LOG)):
        seed.insert(
            schema.policies, project="default", id=policy, base_model="m", model_path="m", live_version=0,
            upstream=upstream, next_version=1, next_step=1, state="recording", created_at=NOW,
        )  # fmt: skip
    seed.trajectory("t", turns=0)
    rows: list[dict[str, Any]] = [
        {"created_at": NOW, "key_id": "k1", "ttft_ms": 50.0, "total_ms": 100.0},
        {"created_at": NOW + timedelta(minutes=5), "key_id": "k1", "status": "error", "total_ms": None},
        {"created_at": NOW - timedelta(hours=1), "policy": "writer", "policy_version": 2, "total_ms": 300.0},
        {"created_at": NOW - timedelta(hours=2), "status": "aborted", "total_ms": 20.0},
        {"created_at": NOW - timedelta(hours=30)},
        {"created_at": NOW, "policy": "log"},
    ]
    for turn, row in enumerate(rows):
        seed.completion("t", turn, prompt_tokens=10, completion_tokens=turn, **({"policy": "starter"} | row))
    return seed


def sums(engine: Engine, by: Any, wanted: Filter = ALL) -> dict[str | None, tuple[int, int, int, int]]:
    with engine.connect() as connection:
        rows = traffic.sums(connection, wanted, by, HOURS[0])
    return {row["by"]: (row["calls"], row["errors"], row["aborted"], row["sampled_tokens"]) for row in rows}


def test_sums_are_of_the_last_day_and_leave_an_imported_log_out(day: Seed) -> None:
    assert sums(day.engine, "hour") == {
        f"{NOW - timedelta(hours=2):%Y-%m-%d %H:00}": (1, 0, 1, 3),
        f"{NOW - timedelta(hours=1):%Y-%m-%d %H:00}": (1, 0, 0, 2),
        f"{NOW:%Y-%m-%d %H:00}": (2, 1, 0, 1),
    }
    assert sums(day.engine, "policy") == {"starter": (3, 1, 1, 4), "writer": (1, 0, 0, 2)}
    assert sums(day.engine, "key_id") == {None: (2, 0, 1, 5), "k1": (2, 1, 0, 1)}


@pytest.mark.parametrize(
    ("wanted", "calls"),
    [({"policy": "writer"}, 1), ({"version": 0}, 3), ({"key_id": "k1"}, 2), ({"key_id": "k1", "version": 2}, 0)],
    ids=str,
)
def test_policy_version_and_key_choose(day: Seed, wanted: dict[str, Any], calls: int) -> None:
    chosen = Filter("default", **wanted)
    assert sum(row[0] for row in sums(day.engine, "policy", chosen).values()) == calls
    with day.engine.connect() as connection:
        # The sample has the imported log's call, too.
        of_log = 1 if wanted == {"version": 0} else 0
        assert len(traffic.sample(connection, chosen, HOURS)) == calls + of_log


def test_a_sample_has_the_newest_calls_of_each_hour(day: Seed) -> None:
    for turn in range(10, 10 + traffic.EACH_HOUR):
        day.completion("t", turn, created_at=NOW + timedelta(minutes=10, seconds=turn), total_ms=7.0)
    with day.engine.connect() as connection:
        times = traffic.sample(connection, ALL, HOURS)
        assert [one.total_ms for one in traffic.newest_times(connection, "default", HOURS[0], 3)] == [7.0] * 3
    by_hour = [[one.total_ms for one in times if one.hour == place] for place in range(len(HOURS))]
    assert [len(one) for one in by_hour[-3:]] == [1, 1, traffic.EACH_HOUR] and set(by_hour[-1]) == {7.0}
    assert not any(by_hour[:-3]) and by_hour[-2] == [300.0]


def test_a_sample_is_read_by_an_index(engine: Engine, seed: Seed) -> None:
    if engine.dialect.name != "sqlite":
        pytest.skip("PostgreSQL plans by statistics")
    seed.trajectory("t")
    with engine.connect() as connection:
        of = plan(connection, lambda: traffic.sample(connection, ALL, HOURS))
        searches = of.count("ix_completions_project_created_at (project=? AND created_at>? AND created_at<?)")
        assert searches == len(HOURS) and "SCAN completions" not in of


def test_the_feedback_rate_is_of_trajectories_and_judges_are_not_people(seed: Seed) -> None:
    seed.trajectory("a", reward=1.0)
    seed.trajectory("b")
    seed.trajectory("old", reward=1.0, created_at=NOW - timedelta(days=2))
    seed.feedback("a", 1.0)
    seed.feedback("b", 0.5, source="judge")
    with seed.engine.connect() as connection:
        counts = traffic.rewarded(connection, "default", HOURS[0])
    assert counts == {"trajectories": 2, "rewarded": 1, "feedback": 1}


def test_a_trajectory_is_listed_by_its_first_prompt_and_its_last_answer(seed: Seed) -> None:
    seed.trajectory("talk", turns=3)
    seed.trajectory("empty", turns=0)
    seed.trajectory("silent", turns=0, tail_completion_id="silent-0")
    seed.completion("silent", 0, new_messages=None, response=None, status="error")
    names = ("talk", "empty", "silent")
    rows = [dict(seed.one(schema.trajectories, name)._mapping) for name in names]
    with seed.engine.connect() as connection:
        lines = first_lines(connection, "default", rows)
        assert first_lines(connection, "default", []) == {} == group_prompts(connection, "default", [])
    assert lines == {"talk": FirstLines("question 0", "answer 2"), "empty": FirstLines(), "silent": FirstLines()}


def test_a_group_is_listed_by_the_prompt_of_its_members(seed: Seed) -> None:
    for name in ("full", "empty", "silent"):
        seed.group(name)
    for member in ("a", "b"):
        seed.trajectory(member, "full", turns=2)
    seed.trajectory("s", "silent", turns=0)
    seed.completion("s", 0, new_messages=None)
    with seed.engine.connect() as connection:
        assert group_prompts(connection, "default", ["full", "empty", "silent"]) == {"full": "question 0"}
        if seed.engine.dialect.name != "sqlite":
            return
        of = plan(connection, lambda: group_prompts(connection, "default", ["full"]))
        assert "ix_trajectories_project_group_id" in of and "SCAN" not in of.replace("SCAN members", ""), of
