"""A step that learns from words, from claim to promotion: the real learner, the fake vLLM of `test_supervised`."""

import math
from datetime import UTC, datetime, timedelta
from typing import Any

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

PROMPT = [OPEN, USER, *spelled("hi"), END, LINE, OPEN, ASSISTANT]
ANSWER = [*spelled("no"), END]


def corrected(training: Imitating, name: str, comment: str | None = "yes", version: int = 0, **values: Any) -> str:
    """A trajectory of one answer with what somebody wrote about it."""
    training.seed.trajectory(name, turns=1)
    own = schema.completions.c.trajectory_id == name
    logged = {"prompt_token_ids": PROMPT, "token_ids": ANSWER, "inference_logprobs": [-1.0] * len(ANSWER)}
    messages = [{"role": "user", "content": "hi"}]
    training.write(schema.completions, own, policy_version=version, new_messages=messages, **logged)
    fields = {"source": "comment", "state": "applied", "trajectory_id": name, "final": False, "comment": comment}
    return str(training.seed.feedback(name, **(fields | values)))


def hindsight(training: Imitating, source: str = "comments", limit: int = 64) -> bool:
    request = {"kind": "hindsight", "from": source, "min_reward": None, "limit": limit}
    policy = schema.policies.c.id == "starter"
    training.write(schema.policies, policy, step_asked=request, step_asked_at=datetime.now(UTC))
    return training.step()


def test_a_comment_teaches_what_the_policy_says_with_it_in_the_prompt(training: Imitating) -> None:
    source = corrected(training, "t")
    assert hindsight(training) is True
    step = training.seed.one(schema.steps, "starter#1")
    assert (step.state, step.kind, step.loss_function) == ("promoted", "hindsight", "divergence"), step.error
    assert (step.completions, step.rows, step.sampled_tokens, step.trajectories) == (1, 1, len(ANSWER), 1)
    assert (step.mismatch_k3, step.fresh_share, step.effective_share, step.reward_mean) == (None,) * 4
    assert step.loss > 0 and step.grad_norm > 0
    (example,) = training.rows(schema.examples)
    teacher = [OPEN, USER, *spelled("hi\n\n(Note: yes)"), END, LINE, OPEN, ASSISTANT]
    assert (example.source_id, example.source) == (f"{source}/hindsight", "comments")
    assert (example.prompt_token_ids, example.token_ids, example.step) == (teacher, None, 1)
    assert training.seed.one(schema.trajectories, "t").state == "open"  # a reward may still teach it
    assert training.live_version == 1


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("tools", {"role": "tool", "tool_call_id": "c", "content": "Error: off"}),
        ("replies", {"role": "user", "content": "Error: off"}),
    ],
)
def test_what_followed_an_answer_teaches_as_a_comment_does(
    training: Imitating, source: str, message: dict[str, str]
) -> None:
    corrected(training, "t", comment=None)
    training.seed.completion("t", 1, new_messages=[message])
    assert hindsight(training, source) is True
    step = training.seed.one(schema.steps, "starter#1")
    assert (step.state, step.rows, step.sampled_tokens) == ("promoted", 1, len(ANSWER)), step.error
    (example,) = training.rows(schema.examples)
    teacher = [OPEN, USER, *spelled("hi\n\n(Note: Error: off)"), END, LINE, OPEN, ASSISTANT]
    assert (example.completion_id, example.source, example.prompt_token_ids) == ("t-0", source, teacher)


def test_a_template_of_the_settings_words_it(training: Imitating, tmp_path: Any) -> None:
    template = tmp_path / "words.txt"
    template.write_text(" so {correction}")
    training.with_rules(hindsight_template=template)
    corrected(training, "t")
    assert hindsight(training) is True
    (example,) = training.rows(schema.examples)
    assert example.prompt_token_ids == [OPEN, USER, *spelled("hi so yes"), END, LINE, OPEN, ASSISTANT]


def test_the_newest_comment_counts_and_a_demonstration_is_another_source(training: Imitating) -> None:
    first = corrected(training, "t")
    message = {"role": "assistant", "content": "yes!"}
    later = datetime.now(UTC) + timedelta(seconds=5)
    fields = {"source": "comment", "state": "applied", "trajectory_id": "t", "final": False, "created_at": later}
    second = training.seed.feedback("t", comment="never", **fields)
    third = training.seed.feedback("t", demonstration=message, **(fields | {"source": "demonstration"}))
    assert hindsight(training) is True
    assert hindsight(training, "demonstrations") is True
    by_id = {row.source_id: row for row in training.rows(schema.examples)}
    assert by_id.keys() == {f"{second}/hindsight", f"{third}/hindsight"} and first not in by_id
    teacher = by_id[f"{third}/hindsight"].prompt_token_ids
    assert teacher == [OPEN, USER, *spelled("hi\n\n(Note: yes!)"), END, LINE, OPEN, ASSISTANT]


def test_withdrawn_words_held_out_answers_and_old_versions_teach_nothing(training: Imitating) -> None:
    corrected(training, "withdrawn", withdrawn_at=datetime.now(UTC))
    corrected(training, "eval")
    training.write(schema.trajectories, schema.trajectories.c.id == "eval", split="eval")
    corrected(training, "redacted")
    own = schema.completions.c.trajectory_id == "redacted"
    training.write(schema.completions, own, why_not_trained="redacted")
    assert hindsight(training) is True
    step = training.seed.one(schema.steps, "starter#1")
    assert step.state == "noop" and "no answer could be learned from" in step.error
    training.group("g")
    assert training.step() is True
    training.with_rules(max_staleness=0)
    corrected(training, "old", version=0)
    assert hindsight(training) is True
    assert training.seed.one(schema.steps, "starter#3").state == "noop"
    corrected(training, "fresh", version=training.live_version)
    assert hindsight(training) is True
    step = training.seed.one(schema.steps, "starter#4")
    assert (step.state, step.completions) == ("promoted", 1)


def test_new_words_come_first_and_each_row_has_its_own_answer(training: Imitating) -> None:
    for name in "abc":
        corrected(training, name)
    assert hindsight(training, limit=2) is True
    assert hindsight(training, limit=2) is True
    taken = {row.trajectory_id: row.step for row in training.rows(schema.examples)}
    assert sorted(taken.values()) == [1, 2, 2]
    assert training.seed.one(schema.steps, "starter#2").rows == 2


def test_so_many_in_a_row_and_then_another_kind_first(training: Imitating) -> None:
    training.with_rules(hindsight_in_a_row=2)
    corrected(training, "t")
    for _ in range(2):
        assert hindsight(training) is True
    assert hindsight(training) is False
    step = training.seed.one(schema.steps, "starter#3")
    assert step.state == "noop" and "trainer.hindsight_in_a_row" in step.error
    training.group("g", version=training.live_version)
    assert training.step() is True
    assert hindsight(training) is True
    assert training.seed.one(schema.steps, "starter#5").state == "promoted"


def test_what_cannot_be_rendered_says_why_and_the_others_go_on(training: Imitating) -> None:
    corrected(training, "t")
    corrected(training, "strange")
    strange = [{"role": "martian", "content": "x"}, {"role": "user", "content": "hi"}]
    own = schema.completions.c.trajectory_id == "strange"
    training.write(schema.completions, own, new_messages=strange)
    corrected(training, "mute")
    own = schema.completions.c.trajectory_id == "mute"
    training.write(schema.completions, own, new_messages=[{"role": "assistant", "content": "x"}])
    assert hindsight(training) is True
    why = {row.trajectory_id: row.left_out for row in training.rows(schema.examples)}
    assert (why["t"], why["mute"]) == (None, "no_question")
    assert why["strange"].startswith("refused: ")
    assert training.seed.one(schema.steps, "starter#1").rows == 1


def test_a_step_that_is_taken_over_has_the_same_answers_and_prompts(training: Imitating) -> None:
    corrected(training, "t")
    training.write(
        schema.policies,
        schema.policies.c.id == "starter",
        step_asked={"kind": "hindsight", "from": "comments", "min_reward": None, "limit": 64},
        step_asked_at=datetime.now(UTC),
    )
    assert training.store.claim("starter", training.settings.trainer) is not None
    training.lease_ends()
    corrected(training, "later")
    assert training.step() is True
    step = training.seed.one(schema.steps, "starter#1")
    assert (step.state, step.kind, step.attempt) == ("promoted", "hindsight", 2)
    assert math.isfinite(step.loss)


@pytest.mark.parametrize("text", ["nothing to replace", None])
def test_a_template_without_a_place_for_the_correction_is_refused(tmp_path: Any, text: str | None) -> None:
    from whetstone.config.settings import SettingsError, load

    if text is not None:
        (tmp_path / "words.txt").write_text(text)
    with pytest.raises(SettingsError, match="words.txt"):
        load(environment={}, trainer__hindsight_template=tmp_path / "words.txt")
