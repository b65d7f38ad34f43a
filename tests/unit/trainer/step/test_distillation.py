"""A step that learns from a teacher, from claim to promotion: the real learner, the fake vLLM of `test_supervised`, and
a teacher whose scores are those of another learner.
"""

import re
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from sqlalchemy import Engine

from benchmarks.fakes.json_server import Handler, Server
from migrations import schema
from tests.unit.trainer.step.test_supervised import (
    ASSISTANT,
    END,
    LINE,
    OPEN,
    USER,
    Imitating,
    RenderingVllm,
    database_kind,
    ending_model,
    spelled,
)
from trainer.learner.learner import Learner
from trainer.vllm import teacher
from whetstone.config.teachers import TeacherSettings
from whetstone.config.trainer import TrainerSettings

__all__ = ["database_kind", "ending_model"]

PROMPT = [OPEN, USER, *spelled("hi"), END, LINE, OPEN, ASSISTANT]
ANSWER = [*spelled("no"), END]
TOP = 5


class TokenizingVllm(RenderingVllm):
    """Divides plain text too."""

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any] | str]:
        if path == "/tokenize" and "prompt" in body:
            return 200, {"tokens": spelled(body["prompt"])}
        return super().answer(path, body)


class FakeTeacher(Server):
    """Scores prompts as vLLM does: each place has its likeliest tokens, and the token that is there."""

    def __init__(self, learner: Learner) -> None:
        self.learner = learner
        self.served = ["large"]
        self.divides = spelled
        self.fails: list[int] = []
        """Statuses of the next answers to requests for scores."""
        self.keys: list[str | None] = []
        self.longest = 100
        self.lacks_scores = False
        self.adds = 0
        """To each token's id."""
        super().__init__(_Handler, base="/v1")

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if path == "/v1/models":
            return 200, {"data": [{"id": name} for name in self.served]}
        if path == "/tokenize":
            assert body["add_special_tokens"] is False
            return 200, {"tokens": self.divides(body["prompt"])}
        assert path == "/v1/completions" and body["max_tokens"] == 1
        if self.fails:
            return self.fails.pop(0), {"error": {"message": "busy"}}
        if len(body["prompt"]) > self.longest:
            return 400, {"error": {"message": f"longer than {self.longest} tokens"}}
        return 200, {"choices": [{} if self.lacks_scores else {"prompt_logprobs": self.scores(body)}]}

    def scores(self, body: dict[str, Any]) -> list[Any]:
        with torch.no_grad():
            logprobs_TV = self.learner._model(input_ids=torch.tensor([body["prompt"]])).logits[0].log_softmax(-1)
        places: list[Any] = [None]
        for token_id, logprobs_V in zip(body["prompt"][1:], logprobs_TV, strict=False):
            top = dict(
                zip(*(some.tolist() for some in reversed(logprobs_V.topk(body["prompt_logprobs"]))), strict=True)
            )
            top[token_id] = logprobs_V[token_id].item()
            ranks = {name: int((logprobs_V > value).sum()) + 1 for name, value in top.items()}
            places.append(
                {
                    str(name + self.adds): {"logprob": value, "rank": ranks[name], "decoded_token": "x"}
                    for name, value in reversed(top.items())
                }
            )
        return places


class _Handler(Handler):
    server: FakeTeacher

    def respond(self, body: dict[str, Any]) -> None:
        self.server.keys.append(self.headers["authorization"])
        self.whole(*self.server.answer(self.path, body))


class Distilling(Imitating):
    """A training worker with a teacher."""

    def __init__(self, engine: Engine, seed: Any, fake: RenderingVllm, data: Path, large: FakeTeacher) -> None:
        super().__init__(engine, seed, fake, data)
        self.large = large
        teachers = {"large": TeacherSettings(url=large.url, model="large")}
        self.settings = self.settings.model_copy(update={"teachers": teachers})
        self.with_rules(distill_top=TOP)

    def answered(self, name: str, version: int = 0, answer: list[int] = ANSWER) -> None:
        """A trajectory of one answer."""
        self.seed.trajectory(name, turns=1)
        own = schema.completions.c.trajectory_id == name
        logged = {"prompt_token_ids": PROMPT, "token_ids": answer, "inference_logprobs": [-1.0] * len(answer)}
        self.write(schema.completions, own, policy_version=version, **logged)

    def distill(self, source: str = "large", limit: int = 64) -> Any:
        """Take a step; return its row."""
        request = {"kind": "distill", "from": source, "min_reward": None, "limit": limit}
        policy = schema.policies.c.id == "starter"
        self.write(schema.policies, policy, step_asked=request, step_asked_at=datetime.now(UTC))
        assert self.step() is True
        return max(self.rows(schema.steps), key=lambda step: step.number)


@pytest.fixture
def large(tiny_model: Path, make_rows: Any) -> Iterator[FakeTeacher]:
    learner = Learner.fresh(tiny_model, TrainerSettings(threads=1, device="cpu", learning_rate=1e-1), seed=9)
    learner.step(make_rows(8, seed=9), 0)
    with FakeTeacher(learner) as server:
        yield server


@pytest.fixture
def training(engine: Engine, seed: Any, ending_model: Path, tmp_path: Path, large: FakeTeacher) -> Iterator[Distilling]:
    with TokenizingVllm(ending_model) as fake:
        training = Distilling(engine, seed, fake, tmp_path / "data", large)
        yield training
        training.vllm.close()


def test_the_policy_moves_towards_what_the_teacher_says_of_its_own_answers(training: Distilling) -> None:
    for place in range(4):
        training.answered(f"t{place}", answer=[*spelled("no"), 20 + place, END])
    step = training.distill()
    assert (step.state, step.kind, step.loss_function) == ("promoted", "distill", "divergence"), step.error
    assert (step.completions, step.rows, step.sampled_tokens, step.trajectories) == (4, 4, 16, 4)
    assert (step.mismatch_k3, step.fresh_share, step.effective_share, step.reward_mean) == (None,) * 4
    examples = training.rows(schema.examples)
    assert len(examples) == 4 and {one.source for one in examples} == {"large"}
    assert {(one.prompt_token_ids, one.token_ids, one.left_out) for one in examples} == {(None, None, None)}
    assert all(re.fullmatch(r".+/distill/large", one.source_id) for one in examples)
    assert training.seed.one(schema.trajectories, "t0").state == "open"  # a reward may still teach it
    later = [training.distill() for _ in range(training.settings.trainer.max_staleness)]
    assert {one.state for one in later} == {"promoted"}, [one.error for one in later]
    assert later[-1].loss < 0.9 * step.loss


def test_answers_that_it_has_not_scored_come_first(training: Distilling) -> None:
    for name in "abc":
        training.answered(name)
    training.distill(limit=2)
    assert training.distill(limit=2).rows == 2
    taken = {row.trajectory_id: row.step for row in training.rows(schema.examples)}
    assert sorted(taken.values()) == [1, 2, 2]


def test_held_out_and_excluded_answers_and_old_versions_teach_nothing(training: Distilling) -> None:
    t, c = schema.trajectories.c, schema.completions.c
    for name in ("eval", "private", "redacted"):
        training.answered(name)
    training.write(schema.trajectories, t.id == "eval", split="eval")
    training.write(schema.trajectories, t.id == "private", no_train=True)
    training.write(schema.completions, c.trajectory_id == "redacted", why_not_trained="redacted")
    step = training.distill()
    assert step.state == "noop" and step.error == "no answer could be learned from: there is none"
    training.answered("fresh")
    assert training.distill().state == "promoted"
    training.with_rules(max_staleness=0, distill_top=TOP)
    assert training.distill().state == "noop"


def test_answers_that_the_teacher_refuses_say_why_and_the_others_go_on(training: Distilling) -> None:
    training.answered("short")
    training.answered("long", answer=[*spelled("no" * 10), END])
    training.large.longest = len(PROMPT) + len(ANSWER)
    assert training.distill().rows == 1
    why = {row.trajectory_id: row.left_out for row in training.rows(schema.examples)}
    assert why["short"] is None
    assert why["long"].startswith("no_scores: ") and "longer than" in why["long"]


def test_tokens_that_the_policys_model_lacks_are_refused(training: Distilling) -> None:
    training.answered("t")
    training.large.adds = 1000
    assert training.distill().state == "noop"
    (example,) = training.rows(schema.examples)
    assert re.match(r"no_scores: token 10\d\d is none of the policy's model, which has 64", example.left_out)


def test_a_teacher_that_fails_a_moment_is_tried_again(training: Distilling) -> None:
    training.answered("t")
    training.large.fails = [503, 500]
    assert training.distill().state == "promoted"


def test_a_key_is_sent(training: Distilling, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = TeacherSettings(url=training.large.url, model="large", api_key_env="TEACHER_KEY")
    training.settings = training.settings.model_copy(update={"teachers": {"large": settings}})
    training.answered("t")
    step = training.distill()
    assert (step.state, step.error) == ("failed", "teachers.large: the environment has no TEACHER_KEY")
    monkeypatch.setenv("TEACHER_KEY", "secret")
    assert training.distill().state == "promoted"
    assert set(training.large.keys) == {"Bearer secret"}


def ours(training: Distilling) -> str:
    training.large.served = ["starter@v0", "starter@v3"]
    return "serves starter@v0, a policy: start another vLLM for the teacher's model, without LoRA"


def proxy(training: Distilling) -> str:
    training.large.served = ["large", "starter"]
    return "serves starter, a policy"


def no_such_model(training: Distilling) -> str:
    training.large.served = ["small"]
    return "has no model 'large'; it has: small"


def another_tokenizer(training: Distilling) -> str:
    training.large.divides = lambda text: spelled(text)[::-1]
    return "its tokenizer divides text otherwise than the policy's model does"


def no_scores(training: Distilling) -> str:
    training.large.lacks_scores = True
    return "gives no prompt_logprobs, as vLLM does"


def down(training: Distilling) -> str:
    training.large.fails = [503] * teacher.TRIES
    return "answers 503"


def away(training: Distilling) -> str:
    settings = TeacherSettings(url="http://127.0.0.1:9/v1", model="large")
    training.settings = training.settings.model_copy(update={"teachers": {"large": settings}})
    return "cannot be reached"


def unnamed(training: Distilling) -> str:
    training.settings = training.settings.model_copy(update={"teachers": {}})
    return "no teacher is named 'large': add [teachers.large] to the settings"


@pytest.mark.parametrize("fault", [ours, proxy, no_such_model, another_tokenizer, no_scores, down, away, unnamed])
def test_a_teacher_that_is_none_ends_the_step_with_the_reason_and_nothing_is_lost(
    training: Distilling, fault: Any
) -> None:
    training.answered("t")
    why = fault(training)
    step = training.distill()
    assert step.state == "failed" and why in step.error
    assert training.live_version == 0 and training.versions().keys() == {0}
    assert training.seed.one(schema.trajectories, "t").state == "open"
