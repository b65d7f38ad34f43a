"""Steps on rewards that also learn to predict what tools return, with the real learner."""

import pytest
from pydantic import ValidationError

from migrations import schema
from tests.unit.trainer.step.test_replay import database_kind, training
from tests.unit.trainer.step.test_step import Training
from trainer.learner.learner import Learner
from trainer.step.learners import Learners
from whetstone.config.trainer import TrainerSettings

__all__ = ["database_kind", "training"]
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "3"}


def surprise(training: Training, version: int) -> float:
    """Nats of what the tool gave, [11, 12] after the first answer of either attempt, under a version."""
    rules = training.settings.trainer
    folder = training.adapters / f"starter@v{version}"
    learner = Learner.resume(training.fake.model, folder, rules) if version else Learner.fresh(
        training.fake.model, rules, training.settings.seed
    )  # fmt: skip
    return -sum(sum(learner.logprobs([1, 2, 20 + number, 30 + number], [11, 12])) for number in (0, 1))


@pytest.mark.parametrize("is_tool", [True, False])
def test_what_a_tool_returned_is_less_of_a_surprise_after_the_step(
    training: Training, is_tool: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    training.with_rules(echo_weight=0.5, measure_kl=False)
    training.learners = Learners(training.settings)
    training.group("g")
    if is_tool:
        training.write(schema.completions, schema.completions.c.turn == 1, new_messages=[RESULT])
    assert training.step() is True
    step = training.seed.one(schema.steps, "starter#1")
    assert step.state == "promoted", step.error
    assert (step.sampled_tokens, step.rows) == (8, 2)
    before, after = surprise(training, 0), surprise(training, 1)
    assert ("step starter#1: 4 tokens of tools are predicted" in caplog.messages) == is_tool
    # The advantages of the two attempts, and so all else of the loss, almost cancel at first.
    assert (step.loss == pytest.approx(0.5 * before / 4, abs=0.1)) == is_tool
    assert (after < before - 0.01) == is_tool


@pytest.mark.parametrize("objective", ["kto", "dpo"])
def test_preferences_predict_nothing_beside(objective: str) -> None:
    with pytest.raises(ValidationError, match="echo_weight is of steps with the objective grpo"):
        TrainerSettings(objective=objective, echo_weight=0.1)  # type: ignore[arg-type]
