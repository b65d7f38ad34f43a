"""The gate's first part: a candidate on several servers, what the probe measures, and what it lets through."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine

from migrations import schema
from tests.unit.trainer.step.test_step import FakeVllm, Training
from trainer.domain.gate.parity import Readings
from trainer.gate import probe
from trainer.learner.learner import Learner
from trainer.step.step import take_step
from trainer.vllm.pool import Replicas
from whetstone.vllm.client import Vllm

ROLL = {"type": "function", "function": {"name": "roll", "parameters": {"type": "object", "properties": {}}}}
CHAT = "/v1/chat/completions"


class Calling(FakeVllm):
    """A server that calls tools, as its versions are told to."""

    def __init__(self, model: Path) -> None:
        self.calls_of: dict[str, dict[str, Any]] = {}
        """Name -> the function that it calls."""
        self.finish_reason = "tool_calls"
        super().__init__(model)

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any] | str]:
        if path != CHAT or path in self.refuses:
            return super().answer(path, body)
        function = self.calls_of[body["model"]]
        calls = [{"id": "call-1", "type": "function", "function": function}] if function else []
        message = {"role": "assistant", "content": None, "tool_calls": calls}
        choice = {"index": 0, "message": message, "finish_reason": self.finish_reason}
        return 200, {"choices": [choice], "usage": {"prompt_tokens": 5, "completion_tokens": 7}}


class Gate(Training):
    """A worker before two servers; the second can be made to fail."""

    def __init__(self, engine: Engine, seed: Any, fake: Calling, other: FakeVllm, data: Path) -> None:
        super().__init__(engine, seed, fake, data)
        self.second = Vllm(other.url)
        self.replicas = Replicas({"http://one": self.vllm, "http://two": self.second})

    def step(self) -> bool:
        return take_step("starter", self.store, self.learners, self.replicas, self.settings)

    def bounds(self, **values: Any) -> None:
        gate = self.settings.gate.model_copy(update=values)
        self.settings = self.settings.model_copy(update={"gate": gate})

    def offers_tools(self) -> None:
        self.write(schema.completions, schema.completions.c.turn == 0, tools=[ROLL])

    def decision(self) -> Any:
        (row,) = self.rows(schema.gate_results)
        return row


@pytest.fixture(params=["sqlite"])
def database_kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def fake(tiny_model: Path) -> Iterator[Calling]:
    with Calling(tiny_model) as fake:
        yield fake


@pytest.fixture
def other(tiny_model: Path) -> Iterator[FakeVllm]:
    with FakeVllm(tiny_model) as other:
        yield other


@pytest.fixture
def gate(
    engine: Engine, seed: Any, fake: Calling, other: FakeVllm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Gate]:
    monkeypatch.setattr("trainer.vllm.retry.RETRY_S", 0.01)
    monkeypatch.setattr("trainer.vllm.pool.OTHERS_S", 0.1)
    gate = Gate(engine, seed, fake, other, tmp_path / "data")
    gate.group("g")
    yield gate
    gate.vllm.close()
    gate.second.close()


def test_a_candidate_goes_live_once_every_server_has_it_and_its_probe_is_written_down(
    gate: Gate, fake: Calling, other: FakeVllm
) -> None:
    assert gate.step() is True
    assert gate.live_version == 1
    assert set(fake.loaded) == set(other.loaded) == {"starter@v1"}
    told = gate.decision()
    assert (told.test, told.decision, told.version, told.against, told.reason) == ("probe", "pass", 1, 0, None)
    assert set(told.figures) == {
        "k3", "parent_k3", "served_share", "served_share_error", "sampling_s", "reading_s", "parent_kl",
        "length", "parent_length", "length_ratio", "tokens", "servers", "servers_without_it",
    }  # fmt: skip
    assert 0 < told.figures["parent_kl"] < 0.1
    assert (told.figures["servers"], told.figures["servers_without_it"], told.figures["length_ratio"]) == (2, 0, 1)
    version = gate.seed.one(schema.policy_versions, "starter@v1")
    assert version.probe_tokens == told.figures["tokens"] == fake.sampled > 0
    assert other.calls.count("/v1/completions") == 0


def test_a_server_that_cannot_load_it_is_left_out_and_named(gate: Gate, fake: Calling, other: FakeVllm) -> None:
    fake.refuses.add("/v1/load_lora_adapter")
    assert gate.step() is True
    assert gate.live_version == 1
    assert (set(fake.loaded), set(other.loaded)) == (set(), {"starter@v1"})
    told = gate.decision()
    assert "not loaded by http://one" in told.reason and "no adapter of ours" in told.reason
    assert told.figures["servers_without_it"] == 1
    assert fake.calls.count("/v1/completions") == 0  # the probe asks one that has it


def test_a_server_that_is_away_is_left_out_as_well(gate: Gate, fake: Calling) -> None:
    fake.when_called = lambda _path: False
    assert gate.step() is True
    assert (gate.live_version, gate.decision().figures["servers_without_it"]) == (1, 1)


def test_a_server_that_loads_it_a_little_later_is_waited_for(
    gate: Gate, other: FakeVllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.vllm.pool.OTHERS_S", 60)
    other.refuses.add("/v1/load_lora_adapter")

    def mends(path: str) -> bool:
        if path == "/v1/load_lora_adapter" and other.calls.count(path) == 3:
            other.refuses.clear()
        return True

    other.when_called = mends
    assert gate.step() is True
    assert set(other.loaded) == {"starter@v1"}
    assert gate.decision().figures["servers_without_it"] == 0


def test_what_no_server_loads_is_rejected(gate: Gate, fake: Calling, other: FakeVllm) -> None:
    for one in (fake, other):
        one.refuses.add("/v1/load_lora_adapter")
    assert gate.step() is True
    assert (gate.live_version, gate.versions()) == (0, {0: "live", 1: "rejected"})
    told = gate.decision()
    assert (told.decision, told.figures) == ("reject", {})
    assert "no adapter of ours" in told.reason


def test_a_server_that_was_started_again_gets_the_parent_for_the_probe_too(gate: Gate, fake: Calling) -> None:
    assert gate.step() is True
    fake.loaded.clear()
    gate.group("h", version=1)
    assert gate.step() is True
    assert gate.live_version == 2
    assert set(fake.loaded) == {"starter@v1", "starter@v2"}


def test_a_candidate_that_has_moved_too_far_is_rejected(gate: Gate) -> None:
    gate.bounds(max_parent_kl=1e-9)
    assert gate.step() is True
    assert gate.versions() == {0: "live", 1: "rejected"}
    told = gate.decision()
    assert "too far from its parent" in told.reason and told.figures["parent_kl"] > 1e-9


@pytest.mark.parametrize("scale", [0.5, 2.0])
def test_an_adapter_that_is_served_in_another_scale_is_rejected(gate: Gate, fake: Calling, scale: float) -> None:
    fake.wrong_scale = scale
    assert gate.step() is True
    assert gate.versions() == {0: "live", 1: "rejected"}
    told = gate.decision()
    assert "serves another adapter than was trained" in told.reason
    assert told.figures["served_share"] == pytest.approx(scale, rel=0.2) and told.figures["k3"] < 1e-3


def test_where_no_lora_can_be_doubled_a_small_effect_says_nothing_of_its_share(
    gate: Gate, fake: Calling, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Learner, "can_double", False)
    monkeypatch.setattr(Readings, "is_effect_large", lambda *_: False)
    fake.wrong_scale = 0.5
    assert gate.step() is True
    assert gate.live_version == 1
    assert "served_share" not in gate.decision().figures


def test_a_bound_that_is_set_alone_decides_whether_the_adapter_is_the_right_one(gate: Gate, fake: Calling) -> None:
    gate.bounds(max_k3=1.0)
    fake.wrong_scale = 0.5
    assert gate.step() is True
    assert gate.live_version == 1


def test_a_candidate_that_seems_wrong_once_is_asked_again_with_other_seeds(gate: Gate, fake: Calling) -> None:
    fake.wrong_seeds = range(probe.ROUNDS * probe.MOST_CHOICES)  # all of the first draw
    assert gate.step() is True
    assert gate.live_version == 1
    assert gate.decision().figures["k3"] < 1e-6


@pytest.mark.parametrize(("share", "tokens"), [(0.9999, probe.ENOUGH_TOKENS), (1e-9, probe.LEAST_TOKENS)])
def test_each_version_samples_enough_tokens_or_as_many_as_there_is_time_for(
    gate: Gate, share: float, tokens: int
) -> None:
    gate.bounds(probe_share=share)
    assert gate.step() is True
    assert 2 * tokens <= gate.decision().figures["tokens"] < 4 * tokens


def test_the_parents_answers_in_the_step_are_not_sampled_again(gate: Gate, fake: Calling) -> None:
    gate.group("many", rewards=(0.0, 1.0) * 8, turns=1)
    token_ids = list(range(20, 36))
    logprobs = fake.learner("starter@v0").logprobs([1, 2], token_ids)
    of_many = schema.completions.c.trajectory_id.startswith("many-")
    gate.write(schema.completions, of_many, token_ids=token_ids, inference_logprobs=logprobs)
    fake.says = {"starter@v0": [5]}  # would be much shorter
    assert gate.step() is True
    figures = gate.decision().figures
    assert figures["tokens"] == fake.sampled and figures["parent_length"] > 10
    assert 0 < figures["parent_kl"] < 1 and 0 < figures["parent_k3"] < 1


@pytest.mark.parametrize(("candidate", "parent"), [(9, 1), (1, 9)])
def test_a_candidate_whose_answers_are_much_longer_or_shorter_is_rejected(
    gate: Gate, fake: Calling, candidate: int, parent: int
) -> None:
    fake.says = {"starter@v1": [5] * candidate, "starter@v0": [5] * parent}
    assert gate.step() is True
    assert gate.versions() == {0: "live", 1: "rejected"}
    assert "times as long as its parent's" in gate.decision().reason


@pytest.mark.parametrize(
    "function",
    [
        {},
        {"name": "roll", "arguments": "{not JSON"},
        {"name": "roll", "arguments": "[6]"},
        {"name": "unknown", "arguments": "{}"},
    ],
    ids=["no call", "no JSON", "no object", "no such tool"],
)
def test_a_candidate_that_has_forgotten_how_to_call_tools_is_rejected(
    gate: Gate, fake: Calling, function: dict[str, str]
) -> None:
    gate.offers_tools()
    fake.calls_of = {"starter@v0": {"name": "roll", "arguments": json.dumps({"sides": 6})}, "starter@v1": function}
    assert gate.step() is True
    assert gate.versions() == {0: "live", 1: "rejected"}
    told = gate.decision()
    assert "0% of its answers make tool calls that can be read, of its parent's 100%" in told.reason
    assert (told.figures["tool_calls"], told.figures["parent_tool_calls"]) == (0, 1)
    chats = fake.calls.count(CHAT)
    assert told.figures["tokens"] == 7 * chats + fake.sampled


def test_a_candidate_that_calls_tools_as_its_parent_does_goes_live(gate: Gate, fake: Calling) -> None:
    gate.offers_tools()
    roll = {"name": "roll", "arguments": "{}"}
    fake.calls_of = {"starter@v0": roll, "starter@v1": roll}
    assert gate.step() is True
    assert gate.live_version == 1
    assert gate.decision().figures["tool_calls"] == 1


def test_chats_with_tools_run_while_the_other_answers_are_sampled(gate: Gate, fake: Calling) -> None:
    gate.offers_tools()
    roll = {"name": "roll", "arguments": "{}"}
    fake.calls_of = {"starter@v0": roll, "starter@v1": roll}
    begun = {CHAT: threading.Event(), "/v1/completions": threading.Event()}

    def waits_for_the_other(path: str) -> bool:
        if path in begun:
            begun[path].set()
            return all(event.wait(30) for event in begun.values())
        return True

    fake.when_called = waits_for_the_other
    assert gate.step() is True
    assert gate.live_version == 1


@pytest.mark.parametrize("why", ["cut off", "refused"])
def test_chats_with_tools_that_say_nothing_are_left_out(gate: Gate, fake: Calling, why: str) -> None:
    gate.offers_tools()
    fake.calls_of = {"starter@v0": {"name": "roll", "arguments": "{}"}, "starter@v1": {}}
    if why == "cut off":
        fake.finish_reason = "length"
    else:
        fake.refuses.add(CHAT)
    assert gate.step() is True
    assert gate.live_version == 1
    assert "tool_calls" not in gate.decision().figures
