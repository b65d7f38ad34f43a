"""Steps on rewards that imitate the best past attempts beside their own, with the real learner."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from sqlalchemy import Engine, event

from migrations import schema
from tests.unit.trainer.step.test_step import FakeVllm, Training
from trainer.step.learners import Learners
from whetstone.config.trainer import TrainerSettings
from whetstone.privacy.store import learned


@pytest.fixture(params=["sqlite"])
def database_kind(request: pytest.FixtureRequest) -> str:
    """What differs between databases, test_examples.py tests on both."""
    return str(request.param)


@pytest.fixture
def training(engine: Engine, seed: Any, tiny_model: Path, tmp_path: Path) -> Iterator[Training]:
    with FakeVllm(tiny_model) as fake:
        training = Training(engine, seed, fake, tmp_path / "data")
        yield training
        training.vllm.close()


def replayed(training: Training, number: int) -> list[tuple[str, str | None]]:
    """Trajectory, and why it is left out, of the examples that a step was the last to take."""
    rows = [row for row in training.rows(schema.examples) if row.step == number]
    return [(row.trajectory_id, row.left_out) for row in sorted(rows, key=lambda row: str(row.source_id))]


def step(training: Training, group: str, version: int, **rules: Any) -> Any:
    """Take a step on one more group, and return its row."""
    training.group(group, version=version)
    training.with_rules(**rules)
    training.learners = Learners(training.settings)
    assert training.step() is True
    row = max(training.rows(schema.steps), key=lambda row: row.number)
    assert row.state == "promoted", row.error
    return row


def test_the_best_attempt_of_an_earlier_step_is_imitated_and_the_step_says_so(training: Training) -> None:
    first = step(training, "g", 0, replay_share=0.5, replay_weight=0.3)
    assert (first.imitates["trajectories"], replayed(training, 1)) == (
        0,
        [],
    )  # its own group's best is none of the past
    training.group("later", version=1)
    training.write(schema.groups, schema.groups.c.id == "later", state="open")
    before = training.seed.one(schema.trajectories, "g-1")
    second = step(training, "h", 1, replay_share=0.5, replay_weight=0.3)
    assert second.imitates == {"from": "best", "min_reward": None, "limit": 1, "trajectories": 1}
    assert set(replayed(training, 2)) == {("g-1", None)}
    assert (second.kind, second.loss_function, second.rows, second.trajectories) == ("grpo", "dppo_tv", 2, 2)
    assert (second.sampled_tokens, first.sampled_tokens) == (8, 8)
    assert second.read_tokens > first.read_tokens and second.loss > 0.9  # random weights: log(64) nats a token and more
    assert training.seed.one(schema.trajectories, "g-1") == before
    with training.engine.connect() as connection:
        assert learned(connection, "default", ["g-1"]) == {"starter": [1, 2]}
        assert learned(connection, "default", ["g-0"]) == {"starter": [1]}


def test_without_a_share_nothing_is_read_of_past_attempts(training: Training) -> None:
    step(training, "g", 0)
    statements: list[str] = []
    event.listen(training.engine, "before_cursor_execute", lambda *given: statements.append(given[2]))
    assert step(training, "h", 1).imitates is None
    assert not any("FROM examples" in one or "UPDATE examples" in one for one in statements)


def test_a_step_that_is_taken_over_imitates_the_same(training: Training) -> None:
    step(training, "g", 0)
    training.with_rules(replay_share=1.0)
    training.group("h", version=1)
    assert training.store.claim("starter", training.settings.trainer) is not None
    training.lease_ends()
    claim = training.store.claim("starter", training.settings.trainer)
    assert claim is not None
    training.store.take_replay(claim, 1)
    training.lease_ends()
    again = training.store.claim("starter", training.settings.trainer)
    assert again is not None and (again.kind, again.wanted, again.attempt) == ("grpo", None, 3)
    training.lease_ends()
    assert training.step() is True
    assert set(replayed(training, 2)) == {("g-1", None)}
    assert training.seed.one(schema.steps, "starter#2").imitates["limit"] == 1


def test_attempts_take_turns(training: Training) -> None:
    step(training, "g", 0)
    step(training, "h", 1)
    chosen = []
    for number, group in enumerate("ijk", 3):
        step(training, group, number - 1, replay_share=0.5)
        chosen.append({name for name, _ in replayed(training, number)})
    assert len(set(map(frozenset, chosen))) == 3 and all(len(names) == 1 for names in chosen)


def test_an_attempt_that_is_too_long_now_is_left_out(training: Training) -> None:
    step(training, "g", 0)
    training.write(schema.completions, schema.completions.c.id == "g-1-1", token_ids=[5] * 40)
    row = step(training, "h", 1, replay_share=0.5, max_row_tokens=30)
    assert replayed(training, 2) == [("g-1", None), ("g-1", "too_long")]
    assert row.imitates["trajectories"] == 1


@pytest.mark.parametrize("objective", ["kto", "dpo"])
def test_preferences_have_no_past_attempts_beside(objective: str) -> None:
    with pytest.raises(ValidationError, match="replay_share is of steps with the objective grpo"):
        TrainerSettings(objective=objective, replay_share=0.1)  # type: ignore[arg-type]
