"""SQL of why a policy does not train, on both databases."""

from datetime import timedelta

from sqlalchemy import Engine

from migrations import schema
from tests.conftest import NOW, Seed
from whetstone.doctor import training_store as store
from whetstone.doctor.training import ScoredGroups


def test_scored_groups_are_counted_by_what_they_are_compared_with(engine: Engine, seed: Seed) -> None:
    of = {"state": "scored", "compared_with": "group", "closed_at": NOW, "size": 2, "rewarded": 2}
    for number, spread in enumerate((0.5, 0.25, 0.0, None)):
        seed.group(f"g{number}", reward_spread=spread, **of)
    seed.group("single", **of | {"compared_with": "baseline", "closed_at": NOW - timedelta(hours=1)})
    seed.group("open")
    with engine.connect() as connection:
        scored = store.scored(connection, "default", "starter")
        assert store.scored(connection, "default", "other") == ScoredGroups(0, 0, 0, None)
    oldest = NOW - timedelta(hours=1)
    assert scored == ScoredGroups(groups=2, singles=2, uniform=2, oldest=oldest, recent=3, recent_uniform=1)


def test_the_last_launch_is_told_in_words(engine: Engine, seed: Seed) -> None:
    def last() -> str:
        with engine.connect() as connection:
            return store.last_launch(connection, "default")

    assert last() == "the launcher has started no machine yet"
    row = {"project": "default", "reason": "starter: a step was requested", "created_at": NOW}
    over = row | {"ended_at": NOW + timedelta(minutes=5), "steps": 3}
    seed.insert(schema.launches, number=1, **over)
    assert last() == f"the last launch, 1, at {NOW + timedelta(minutes=5):%H:%M} UTC: ended with 3 steps"
    seed.insert(schema.launches, number=2, **over | {"error": "no step was taken while the command ran", "steps": 0})
    assert last().endswith("UTC: no step was taken while the command ran")
    seed.insert(schema.launches, number=3, **row)
    assert last() == f"launch 3 runs since {NOW:%H:%M} UTC"


def test_a_policy_says_since_when_its_version_is_live(engine: Engine, seed: Seed) -> None:
    with engine.connect() as connection:
        (row,) = store.policies(connection, "default", NOW)
    assert row["live_since"] == NOW


def test_equal_rewards_are_counted_among_the_newest_groups_that_closed(engine: Engine, seed: Seed) -> None:
    states = ("scored", "claimed", "trained", "discarded")
    for number in range(2 * store.RECENT):
        closed_at = NOW - timedelta(minutes=number)
        spread = 0.0 if number < 40 else 0.5
        seed.group(f"g{number}", state=states[number % 4], compared_with="group", closed_at=closed_at,
                   reward_spread=spread)  # fmt: skip
    with engine.connect() as connection:
        scored = store.scored(connection, "default", "starter")
    assert (scored.recent, scored.recent_uniform) == (100, 40)


def test_attempts_and_rewards_come_from_the_roll_ups(engine: Engine, seed: Seed) -> None:
    seed.trajectory("a", reward=1.0, state="rewarded", why_not_trained="group_open", first_version=3)
    seed.trajectory("b", reward=0.5, split="eval", state="excluded", why_not_trained="split_eval", first_version=3)
    seed.trajectory("c", state="open")
    seed.trajectory("old", state="ended", why_not_trained="no_reward", created_at=NOW - timedelta(days=9))
    with engine.connect() as connection:
        (row,) = store.policies(connection, "default", NOW - timedelta(days=7))
        rewards = store.rewards(connection, "default", "starter", [0, 3])
        assert store.was_called(connection, "default", "starter")
        assert not store.was_called(connection, "default", "other")
    assert row["attempts"] == {"group_open": 1, "open": 1, "split_eval": 1}
    assert (row["candidate"], row["last_step"], row["step_asked_at"]) == (None, None, None)
    assert {key: value for key, value in rewards.items() if value[0]} == {
        ("train", 3): (1, 1.0, 1.0), ("eval", 3): (1, 0.5, 0.25),
    }  # fmt: skip


def test_the_last_step_and_the_groups_that_wait_are_those_of_the_policy(engine: Engine, seed: Seed) -> None:
    step = {"policy": "starter", "version_in": 0, "groups": 1, "trajectories": 2, "config": {}, "attempt": 1}
    for number in (1, 2):
        seed.insert(schema.steps, project="default", id=f"starter#{number}", number=number, state="claimed",
                    created_at=NOW, **step)  # fmt: skip
    seed.group("g", state="closed")
    with engine.connect() as connection:
        (row,) = store.policies(connection, "default", NOW)
    assert (row["last_step"]["step"], row["groups"]) == (2, {"open": 0, "closed": 1, "scored": 0, "claimed": 0})
