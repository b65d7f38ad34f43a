"""Candidates that still can what the base model can, and candidates that cannot, in whole steps."""

import json
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine

from migrations import schema
from tests.unit.trainer.step.test_step import FakeVllm, Training
from trainer.domain.gate.retention import RetentionPrompt
from trainer.gate.controller import GateController
from trainer.gate.retention import SUITE, read_suite
from trainer.store.gate_tests import GateTables

CHAT = "/v1/chat/completions"
PROMPTS = {one.prompt: one for one in read_suite(SUITE.read_bytes())}


def right_answer(prompt: RetentionPrompt) -> str:
    check = prompt.check
    words = [*check.equals, *check.first, *check.contains, check.exactly or ""]
    number = "" if check.number is None else f"{check.number:g}"
    what = "" if check.object is None else json.dumps(check.object)
    return "I cannot do that." if check.refuses else f"{max(words, key=bool)}{number}{what}"


class Answering(FakeVllm):
    """A server whose versions answer the fixed prompts, some kinds wrongly."""

    def __init__(self, model: Path) -> None:
        self.cannot: dict[str, set[str]] = {}
        """Version -> kinds of prompts that it answers wrongly."""
        self.prompts_to: list[str] = []
        """Versions, in the order of the prompts to them."""
        super().__init__(model)

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any] | str]:
        if path != CHAT or path in self.refuses:
            return super().answer(path, body)
        name, prompt = body["model"], PROMPTS[body["messages"][0]["content"]]
        if name not in ("starter@v0", *self.loaded):
            return 404, {"error": {"message": f"{name} does not exist", "type": "NotFoundError", "code": 404}}
        assert body["temperature"] == 0
        self.prompts_to.append(name)
        content = "no idea" if prompt.kind in self.cannot.get(name, ()) else right_answer(prompt)
        return 200, {"choices": [{"index": 0, "message": {"role": "assistant", "content": content}}]}


class Retention(Training):
    """A worker whose gate tests retention."""

    fake: Answering

    def __init__(self, engine: Engine, seed: Any, fake: Answering, data: Path) -> None:
        super().__init__(engine, seed, fake, data)
        gate = self.settings.gate.model_copy(update={"tests": ("retention",)})
        self.settings = self.settings.model_copy(update={"gate": gate})

    def decisions(self, version: int) -> dict[str, Any]:
        return {row.test: row for row in self.rows(schema.gate_results) if row.version == version}

    def prompts_to(self, name: str) -> int:
        return self.fake.prompts_to.count(name)


@pytest.fixture(params=["sqlite"])
def database_kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def fake(tiny_model: Path) -> Iterator[Answering]:
    with Answering(tiny_model) as fake:
        yield fake


@pytest.fixture
def retention(
    engine: Engine, seed: Any, fake: Answering, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Retention]:
    monkeypatch.setattr("trainer.vllm.retry.RETRY_S", 0.01)
    retention = Retention(engine, seed, fake, tmp_path / "data")
    retention.group("g")
    yield retention
    retention.vllm.close()


def test_a_candidate_that_forgets_nothing_goes_live_after_40_prompts(retention: Retention) -> None:
    assert retention.step() is True
    assert retention.live_version == 1
    decisions = retention.decisions(1)
    assert decisions.keys() == {"probe", "retention"}
    passed = decisions["retention"]
    assert (passed.decision, passed.against) == ("pass", 0)
    assert passed.reason == "40 of 40 fixed prompts answered right, by the base model 40"
    assert passed.figures == {
        "prompts": 40, "base_right": 1, "candidate_right": 1, "lost": 0, "gained": 0, "chance": 1, "largest_loss": 0
    }  # fmt: skip
    assert (retention.prompts_to("starter@v0"), retention.prompts_to("starter@v1")) == (200, 40)


def test_a_candidate_that_forgets_is_rejected_and_the_live_version_stays(retention: Retention) -> None:
    retention.fake.cannot["starter@v1"] = {"arithmetic", "tool format"}
    assert retention.step() is True
    assert retention.live_version == 0
    decisions = retention.decisions(1)
    assert (decisions["probe"].decision, decisions["retention"].decision) == ("pass", "reject")
    why = "it has forgotten: 24 of 40 fixed prompts answered right, by the base model 40"
    assert decisions["retention"].reason == why
    assert retention.seed.one(schema.policy_versions, "starter@v1").reason == why
    assert [(step.state, step.error) for step in retention.rows(schema.steps)] == [("rejected", why)]


def test_the_base_model_answers_once(retention: Retention) -> None:
    retention.step()
    retention.group("h", version=1)
    assert retention.step() is True
    assert retention.live_version == 2
    assert (retention.prompts_to("starter@v0"), retention.prompts_to("starter@v2")) == (200, 40)
    # What was half written when a worker died is sampled again.
    (stored,) = (retention.settings.data / "retention").iterdir()
    stored.write_bytes(stored.read_bytes()[:100])
    retention.group("i", version=2)
    assert retention.step() is True
    assert retention.prompts_to("starter@v0") == 400 and retention.live_version == 3


def test_what_the_base_model_cannot_do_is_skipped_and_named(retention: Retention) -> None:
    weak = {"refusals", "tool format"}
    retention.fake.cannot = {"starter@v0": weak, "starter@v1": weak}
    assert retention.step() is True
    passed = retention.decisions(1)["retention"]
    assert passed.reason == (
        "24 of 24 fixed prompts answered right, by the base model 24; skipped: tool format, of which the base model "
        "answers 0% right; skipped: refusals, of which the base model answers 0% right"
    )
    assert retention.prompts_to("starter@v1") == 24


def test_a_model_without_chats_has_nothing_to_forget(retention: Retention) -> None:
    retention.fake.refuses.add(CHAT)
    assert retention.step() is True
    assert retention.live_version == 1
    assert retention.decisions(1)["retention"].reason.startswith("no prompts; skipped: instructions, of which")


def test_with_another_test_the_candidate_waits_for_that_one_alone(retention: Retention) -> None:
    gate = retention.settings.gate.model_copy(update={"tests": ("canary", "retention")})
    retention.settings = retention.settings.model_copy(update={"gate": gate})
    assert retention.step() is True
    assert retention.decisions(1)["retention"].decision == "pass"
    assert [step.state for step in retention.rows(schema.steps)] == ["waiting_gate"]
    tables = GateTables(retention.engine, "default")
    GateController(tables, retention.settings).go_on("starter", datetime.now(UTC))
    tested = tables.tested("starter")
    assert tested is not None and tested.tested_by == "canary"


def test_a_server_that_loses_the_candidate_meanwhile_is_given_it_again(retention: Retention) -> None:
    restarted = threading.Event()

    def restarts(path: str) -> bool:
        if path == CHAT and retention.prompts_to("starter@v1") >= 5 and not restarted.is_set():
            restarted.set()
            retention.fake.loaded.clear()
        return True

    retention.fake.when_called = restarts
    assert retention.step() is True
    assert retention.live_version == 1
    assert retention.fake.calls.count("/v1/load_lora_adapter") == 2
