"""A supervised step from claim to promotion, with the real learner; the fake vLLM of `test_step` renders chats too."""

import json
import math
import shutil
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine

from migrations import schema
from tests.unit.trainer.step.test_step import FakeVllm, Training
from trainer.errors import ModelUnusable
from trainer.learner.base.model_files import end_ids
from trainer.learner.learner import Learner
from whetstone.vllm.client import VllmDown, VllmRefused

OPEN, END, LINE, USER, ASSISTANT = 60, 2, 61, 62, 63
ROLES = {"user": USER, "assistant": ASSISTANT}


def spelled(text: str) -> list[int]:
    """One id for each letter."""
    return [3 + ord(letter) % 50 for letter in text]


class RenderingVllm(FakeVllm):
    """Renders a chat as ChatML does, one id for each letter."""

    rendered = 0
    renders_with = 200

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any] | str]:
        if path != "/tokenize":
            return super().answer(path, body)
        self.rendered += 1
        strange = any(message["role"] not in ROLES for message in body["messages"])
        if strange or self.renders_with != 200:
            status = 400 if self.renders_with == 200 else self.renders_with
            return status, {"error": {"message": "no such role", "type": "BadRequestError", "code": status}}
        ids = []
        for message in body["messages"]:
            ids += [OPEN, ROLES[message["role"]], *spelled(message["content"]), END, LINE]
        return 200, {"tokens": [*ids, OPEN, ASSISTANT] if body["add_generation_prompt"] else ids}


class Imitating(Training):
    """A training worker whose admin asks for supervised steps."""

    fake: RenderingVllm

    def asked(self, source: str, min_reward: float | None = None, limit: int = 64) -> bool:
        asked = {"kind": "sft", "from": source, "min_reward": min_reward, "limit": limit}
        of_it = schema.policies.c.id == "starter"
        self.write(schema.policies, of_it, step_asked=asked, step_asked_at=datetime.now(UTC))
        return self.step()

    def shown(self, trajectory_id: str, text: str, turns: int = 1, **values: Any) -> str:
        """A trajectory whose prompt opens an answer, and the demonstration of a better one."""
        self.seed.trajectory(trajectory_id, turns=turns)
        c = schema.completions.c
        first = (c.trajectory_id == trajectory_id) & (c.turn == 0)
        self.write(schema.completions, first, prompt_token_ids=[OPEN, USER, 7, END, LINE, OPEN, ASSISTANT])
        fields = {"source": "demonstration", "state": "applied", "trajectory_id": trajectory_id, "final": False}
        message = {"role": "assistant", "content": text}
        return str(self.seed.feedback(trajectory_id, demonstration=message, **(fields | values)))

    def told(self, trajectory_id: str, **values: Any) -> None:
        """What another server answered: text, no ids."""
        self.seed.trajectory(trajectory_id, policy="teacher", state="ended")
        unknown = {"prompt_token_ids": None, "token_ids": None, "inference_logprobs": None, "policy": "teacher"}
        self.write(schema.completions, schema.completions.c.trajectory_id == trajectory_id, **(unknown | values))

    def likelihood(self, prompt_ids: list[int], token_ids: list[int], version: int) -> float:
        """Nats of the answer under a version."""
        rules = self.settings.trainer
        if version == 0:
            learner = Learner.fresh(self.fake.model, rules, 0)
        else:
            learner = Learner.resume(self.fake.model, self.adapters / f"starter@v{version}", rules)
        return math.fsum(learner.logprobs(prompt_ids, token_ids))


@pytest.fixture(params=["sqlite"])
def database_kind(request: pytest.FixtureRequest) -> str:
    """What differs between databases, test_store_examples.py tests on both."""
    return str(request.param)


@pytest.fixture(scope="session")
def ending_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a token that ends an answer."""
    folder = tmp_path_factory.mktemp("ending") / "tiny-qwen3"
    shutil.copytree(tiny_model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": END}))
    return folder


@pytest.fixture
def training(engine: Engine, seed: Any, ending_model: Path, tmp_path: Path) -> Iterator[Imitating]:
    with RenderingVllm(ending_model) as fake:
        training = Imitating(engine, seed, fake, tmp_path / "data")
        yield training
        training.vllm.close()


def test_a_demonstration_becomes_likelier_and_the_line_of_versions_goes_on(training: Imitating) -> None:
    given = training.shown("t", "yes")
    assert training.asked("demonstrations") is True
    step = training.seed.one(schema.steps, "starter#1")
    assert (step.state, step.kind, step.version_in, step.version_out) == ("promoted", "sft", 0, 1), step.error
    assert (step.loss_function, step.completions, step.rows, step.sampled_tokens) == ("nll", 1, 1, 4)
    assert (step.groups, step.trajectories) == (0, 1)
    assert (step.reward_mean, step.reward_spread, step.advantage_spread, step.mismatch_k3) == (None,) * 4
    assert step.loss > 0 and step.grad_norm > 0 and step.entropy > 0 and step.asked_at is not None
    prompt, answer = [OPEN, USER, 7, END, LINE, OPEN, ASSISTANT], [*spelled("yes"), END]
    assert step.loss == pytest.approx(-training.likelihood(prompt, answer, 0) / 4, rel=1e-4)
    assert training.likelihood(prompt, answer, 1) > training.likelihood(prompt, answer, 0) + 0.1
    assert training.live_version == 1
    assert (training.seed.one(schema.feedback, given).state, training.seed.one(schema.trajectories, "t").state) == (
        "used", "open",
    )  # fmt: skip
    (example,) = training.rows(schema.examples)
    assert (example.source_id, example.prompt_token_ids, example.token_ids, example.step) == (given, None, answer, 1)


def test_a_warm_up_and_policy_gradient_steps_are_one_line(training: Imitating) -> None:
    training.shown("t", "yes")
    assert training.asked("demonstrations") is True
    training.group("g", version=1)
    assert training.step() is True
    assert training.asked("best") is True
    steps = training.rows(schema.steps)
    assert [(step.number, step.kind, step.state, step.version_in, step.version_out) for step in steps] == [
        (1, "sft", "promoted", 0, 1),
        (2, "grpo", "promoted", 1, 2),
        (3, "sft", "promoted", 2, 3),
    ]
    assert training.versions() == {0: "retired", 1: "retired", 2: "retired", 3: "live"}
    # The better one of the group was weighed in step 2 and is imitated in step 3; its ids were never rendered.
    assert {row.source_id for row in training.rows(schema.examples) if row.step == 3} == {"g-1-0", "g-1-1"}
    assert (steps[2].completions, steps[2].rows, steps[2].sampled_tokens) == (2, 1, 4)
    assert training.fake.rendered == 3


def test_another_servers_answers_are_learned_and_what_cannot_be_is_left_out(training: Imitating) -> None:
    training.told("good", response={"role": "assistant", "content": "ok", "refusal": None})
    training.told("cut", finish_reason="length")
    training.told("strange", new_messages=[{"role": "developer", "content": "x"}])
    training.told("native", endpoint="messages")
    training.told("long", response={"role": "assistant", "content": "x" * 90})
    training.with_rules(max_row_tokens=64)
    assert training.asked("teacher") is True
    step = training.seed.one(schema.steps, "starter#1")
    assert (step.state, step.completions, step.trajectories) == ("promoted", 1, 5)
    stored = {row.trajectory_id: row for row in training.rows(schema.examples)}
    prompt = [OPEN, USER, *spelled("question 0"), END, LINE, OPEN, ASSISTANT]
    assert (stored["good"].prompt_token_ids, stored["good"].token_ids) == (prompt, [*spelled("ok"), END])
    assert {name: row.left_out and row.left_out.partition(":")[0] for name, row in stored.items()} == {
        "good": None, "cut": "cut_off", "strange": "refused", "native": "not_a_chat", "long": "too_long",
    }  # fmt: skip
    assert "no such role" in stored["strange"].left_out


@pytest.mark.parametrize("source", ["demonstrations", "best", "teacher"])
def test_a_step_with_nothing_to_imitate_is_over_at_once_and_says_so(training: Imitating, source: str) -> None:
    assert training.asked(source) is True
    step = training.seed.one(schema.steps, "starter#1")
    assert (step.state, step.kind, step.version_out) == ("noop", "sft", None)
    assert step.error == "no answer could be imitated: there is none"
    assert training.live_version == 0
    assert training.step() is False


def test_a_step_of_which_all_is_left_out_tells_why(training: Imitating) -> None:
    training.told("cut", finish_reason="length")
    training.told("native", endpoint="messages")
    assert training.asked("teacher") is True
    assert training.seed.one(schema.steps, "starter#1").error == "no answer could be imitated: 1 cut_off, 1 not_a_chat"
    assert training.asked("teacher") is True
    assert training.seed.one(schema.steps, "starter#2").error == "no answer could be imitated: there is none"


def test_a_step_that_dies_while_it_renders_goes_on_with_the_same_examples(
    training: Imitating, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.step.supervised.STORED_AT_ONCE", 1)
    given = [training.shown(f"t{number}", text) for number, text in enumerate(("yes", "no", "maybe"))]
    training.settings = training.settings.model_copy(
        update={"vllm": training.settings.vllm.model_copy(update={"start_timeout_s": 0.0})}
    )
    training.fake.when_called = lambda path: path != "/tokenize" or training.fake.rendered < 4
    with pytest.raises(VllmDown):
        training.asked("demonstrations")
    training.shown("later", "new")
    training.fake.when_called = lambda _path: True
    assert training.step() is False  # until the lease ends
    training.lease_ends()
    assert training.step() is True
    step = training.seed.one(schema.steps, "starter#1")
    assert (step.state, step.attempt, step.version_out, step.completions) == ("promoted", 2, 2, 3)
    assert {row.source_id for row in training.rows(schema.examples)} == set(given)
    # The first was stored before the fall and is not rendered again; of the second only what was lost.
    assert training.fake.rendered == 3 + 1 + 3 + 3


def test_a_vllm_that_is_away_while_answers_are_rendered_is_waited_for(
    training: Imitating, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.vllm.retry.RETRY_S", 0.01)
    training.shown("t", "yes")
    training.fake.when_called = lambda _path: len(training.fake.calls) > 3
    assert training.asked("demonstrations") is True
    assert training.live_version == 1


def test_a_vllm_that_fails_is_no_reason_to_leave_an_answer_out(training: Imitating) -> None:
    training.shown("t", "yes")
    training.fake.renders_with = 500
    with pytest.raises(VllmRefused):
        training.asked("demonstrations")
    assert [row.left_out for row in training.rows(schema.examples)] == [None]
    training.fake.renders_with = 200
    training.lease_ends()
    assert training.step() is True
    assert (training.live_version, training.seed.one(schema.steps, "starter#1").attempt) == (2, 2)


def test_a_policy_that_only_records_can_be_warmed_up_by_hand(training: Imitating) -> None:
    training.write(schema.policies, schema.policies.c.id == "starter", state="recording")
    training.shown("t", "yes")
    assert training.asked("demonstrations") is True
    assert training.live_version == 1


def test_the_end_tokens_are_those_of_both_files(ending_model: Path, tmp_path: Path) -> None:
    assert end_ids(ending_model) == {END}
    folder = tmp_path / "model"
    shutil.copytree(ending_model, folder)
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 9]}')
    assert end_ids(folder) == {2, 9}
    (folder / "config.json").write_text("{}")
    (folder / "generation_config.json").write_text("{}")
    with pytest.raises(ModelUnusable, match="no eos_token_id in config.json or generation_config.json"):
        end_ids(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelUnusable, match=r"config\.json"):
        end_ids(folder)
