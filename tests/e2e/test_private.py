"""What an app keeps from training, and what was redacted: no step, no supervised one, no running mean has it."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, select, update

from judge.settlement.sweep import sweep
from migrations import schema
from tests.conftest import Seed
from trainer.store.unit_of_work import Store
from whetstone.config.rewards import RewardSettings
from whetstone.config.settings import GroupSettings
from whetstone.config.trainer import TrainerSettings

RULES = TrainerSettings(groups_per_step=1, min_fresh_share=0)
GROUPS = GroupSettings(target_size=2, minimum_size=2, idle_s=1, deadline_s=10, prompt_window_s=1, feedback_waits_s=900)
LEARNING = {"starter": RewardSettings(failure_reward=0.0)}


class Stack:
    """The judging worker and the trainer on rows as the proxy leaves them."""

    def __init__(self, engine: Engine, seed: Seed) -> None:
        self.engine, self.seed = engine, seed
        self.trainer = Store(engine, "default")

    def attempts(self, kept_out: bool) -> None:
        """A group of two, a trajectory that is alone, one that waits, each with its reward; demonstrations too."""
        self.seed.group()
        for name, group, reward in (("a", "g", 1.0), ("b", "g", 0.0), ("alone", None, 1.0)):
            self.seed.trajectory(name, group, no_train=kept_out, task="chess")
            self.seed.feedback(name, reward)
            shown = {"role": "assistant", "content": "better"}
            self.seed.feedback(name, source="demonstration", demonstration=shown, final=False)

    def judge(self) -> None:
        for seconds in (1, 20, 40, 60):
            sweep(self.engine, GROUPS, self.seed.now + timedelta(seconds=seconds), LEARNING)

    def taken(self) -> set[str]:
        """What policy-gradient steps take, as long as there are any; each is over at once."""
        while claim := self.trainer.claim("starter", RULES):
            self.trainer.end_without_version(claim, "failed", "", {})
        return set(self.column(schema.step_trajectories.c.trajectory_id))

    def imitated(self, source: str) -> list[str]:
        """What a supervised step takes."""
        asked = {"kind": "sft", "from": source, "min_reward": None if source == "demonstrations" else 0.0, "limit": 9}
        values = {"step_asked": asked, "step_asked_at": datetime.now(UTC)}
        self.write(schema.policies, schema.policies.c.id == "starter", **values)
        claim = self.trainer.claim("starter", RULES)
        assert claim is not None and claim.wanted is not None
        self.trainer.take_examples(claim, claim.wanted)
        found = sorted({one.trajectory_id for one in self.trainer.examples(claim)})
        self.trainer.end_without_version(claim, "noop", "", {})
        return found

    def write(self, table: Any, where: Any, **values: Any) -> None:
        with self.engine.begin() as connection:
            connection.execute(update(table).where(where).values(**values))

    def column(self, column: Any) -> list[Any]:
        with self.engine.connect() as connection:
            return list(connection.scalars(select(column)))


@pytest.fixture
def stack(engine: Engine, seed: Seed) -> Stack:
    return Stack(engine, seed)


def test_what_may_be_trained_on_is(stack: Stack) -> None:
    """Else the tests below would prove nothing."""
    stack.attempts(kept_out=False)
    stack.judge()
    assert stack.taken() == {"a", "b", "alone"}
    assert stack.column(schema.baselines.c.count)
    assert stack.imitated("demonstrations") == ["a", "alone", "b"]
    assert stack.imitated("best") == ["a", "alone", "b"]


def test_what_the_app_keeps_from_training_never_is(stack: Stack) -> None:
    stack.attempts(kept_out=True)
    stack.judge()
    assert stack.taken() == set()
    assert stack.column(schema.baselines.c.count) == []
    assert stack.imitated("demonstrations") == stack.imitated("best") == []
    assert set(stack.column(schema.trajectories.c.why_not_trained)) == {"no_train"}
    assert set(stack.column(schema.trajectories.c.reward)) == {0.0, 1.0}, "what it was worth is known all the same"


def test_what_was_redacted_never_is_either(stack: Stack) -> None:
    stack.attempts(kept_out=False)
    gone = {"prompt_token_ids": None, "token_ids": None, "inference_logprobs": None, "why_not_trained": "redacted"}
    stack.write(schema.completions, schema.completions.c.project == "default", **gone)
    stack.judge()
    claim = stack.trainer.claim("starter", RULES)
    assert claim is not None
    members = stack.trainer.members(claim)
    assert {(one.trajectory_id, one.completions, one.silent) for one in members} == {
        ("a", (), "redacted"), ("b", (), "redacted"), ("alone", (), "redacted"),
    }  # fmt: skip
    stack.trainer.end_without_version(claim, "noop", "", {})
    assert stack.imitated("demonstrations") == stack.imitated("best") == []
