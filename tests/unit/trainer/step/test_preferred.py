"""A step on pairs of another policy's answers, from claim to promotion, with the real learner."""

from datetime import UTC, datetime

import pytest

from migrations import schema
from tests.unit.trainer.step.test_supervised import (
    ASSISTANT,
    END,
    LINE,
    OPEN,
    USER,
    Imitating,
    database_kind,
    ending_model,
    spelled,
    training,
)

__all__ = ["database_kind", "ending_model", "training"]
PROMPT = [OPEN, USER, *spelled("question 0"), END, LINE, OPEN, ASSISTANT]


def side(training: Imitating, trajectory_id: str, group: str, reward: float, text: str) -> None:
    """An answer of an imported log."""
    training.told(trajectory_id, response={"role": "assistant", "content": text}, why_not_trained="imported")
    training.write(
        schema.trajectories,
        schema.trajectories.c.id == trajectory_id,
        group_id=group,
        reward=reward,
        state="excluded",
        why_not_trained="imported",
    )


def prefer(training: Imitating, limit: int = 64) -> bool:
    wanted = {"kind": "prefer", "from": "teacher", "min_reward": None, "limit": limit}
    training.write(
        schema.policies, schema.policies.c.id == "starter", step_asked=wanted, step_asked_at=datetime.now(UTC)
    )
    return training.step()


def test_the_better_answer_gains_on_the_worse_one(training: Imitating) -> None:
    for name, reward, text in (("a", 1.0, "yes"), ("b", 0.5, "hm"), ("c", 0.0, "no")):
        side(training, name, "g", reward, text)
    assert prefer(training) is True
    step = training.seed.one(schema.steps, "starter#1")
    assert (step.state, step.kind, step.loss_function, step.error) == ("promoted", "prefer", "dpo", None)
    # Before the update policy and reference are equal, so the loss is -log σ(0).
    assert step.loss == pytest.approx(0.6931, abs=1e-3)
    assert (step.completions, step.rows, step.fresh_share, step.mismatch_k3) == (2, 2, None, None)

    def gap(version: int) -> float:
        yes, no = ([*spelled(text), END] for text in ("yes", "no"))
        return training.likelihood(PROMPT, yes, version) - training.likelihood(PROMPT, no, version)

    assert gap(1) > gap(0) + 0.1
    stored = {row.source_id: (row.trajectory_id, row.left_out) for row in training.rows(schema.examples)}
    assert stored == {"a-0/prefer": ("a", None), "c-0/prefer": ("c", None)}


def test_pairs_that_no_step_has_used_come_first(training: Imitating) -> None:
    for group in ("g", "h", "i"):
        for reward in (0.0, 1.0):
            side(training, f"{group}{reward:.0f}", group, reward, "xyz"[int(reward)])
    for number in (1, 2, 3):
        assert prefer(training, limit=1) is True
        assert training.seed.one(schema.steps, f"starter#{number}").state == "promoted"
    assert sorted(row.step for row in training.rows(schema.examples)) == [1, 1, 2, 2, 3, 3]


def test_a_pair_needs_different_rewards_whole_answers_and_one_prompt(training: Imitating) -> None:
    side(training, "a", "equal", 1.0, "yes")
    side(training, "b", "equal", 1.0, "no")
    side(training, "c", "alone", 1.0, "yes")
    assert prefer(training) is True
    assert training.seed.one(schema.steps, "starter#1").error == "no answer could be learned from: there is none"

    side(training, "d", "cut", 1.0, "yes")
    side(training, "e", "cut", 0.0, "no")
    side(training, "f", "other", 1.0, "yes")
    side(training, "g", "other", 0.0, "no")
    c = schema.completions.c
    training.write(schema.completions, c.trajectory_id == "e", finish_reason="length")
    training.write(schema.completions, c.trajectory_id == "f", new_messages=[{"role": "user", "content": "else"}])
    assert prefer(training) is True
    step = training.seed.one(schema.steps, "starter#2")
    assert (step.state, step.error) == ("noop", "no answer could be learned from: 1 cut_off, 3 no_pair")

    # What is cut off stays out; the group's next worst answer takes its place.
    side(training, "e2", "cut", 0.2, "nope")
    assert prefer(training) is True
    step = training.seed.one(schema.steps, "starter#3")
    assert (step.state, step.completions) == ("promoted", 2)
    assert {row.trajectory_id for row in training.rows(schema.examples) if row.left_out is None} == {"d", "e2"}


def test_a_step_that_is_taken_over_has_the_same_pairs(training: Imitating) -> None:
    side(training, "a", "g", 1.0, "yes")
    side(training, "b", "g", 0.0, "no")
    training.fake.renders_with = 500
    with pytest.raises(Exception, match="500"):
        prefer(training)
    side(training, "z", "h", 1.0, "more")
    side(training, "y", "h", 0.0, "less")
    training.fake.renders_with = 200
    training.lease_ends()
    assert training.step() is True
    assert {row.trajectory_id for row in training.rows(schema.examples)} == {"a", "b"}
    assert training.seed.one(schema.steps, "starter#1").attempt == 2
