"""Siblings that no app asked for: when they are drawn, from what, and when not."""

import json
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from judge.settlement.sweep import sweep
from migrations import schema
from proxy.background.sampler import PRIORITY
from proxy.background.shadow_groups import QUIET_S
from proxy.project import DRAW_EVERY_S
from tests.unit.proxy.conftest import (
    ANSWER_IDS,
    PROMPT_IDS,
    FakeHandler,
    FakeVllm,
    RunningProxy,
    settings_for,
    wait_for,
)
from whetstone.config.rewards import ExploreSettings, RewardSettings
from whetstone.domain.sampling_share import in_share

pytestmark = pytest.mark.slow  # each waits until it is quiet

Start = Callable[..., RunningProxy]
ALWAYS = {"starter": RewardSettings(shadow_share=1.0, shadow_size=2)}


@given(st.text(min_size=1))
def test_the_share_takes_the_same_trajectories_every_time(name: str) -> None:
    assert in_share(name, 1.0)
    assert not in_share(name, 0.0)
    assert in_share(name, 0.3) == in_share(name, 0.3) <= in_share(name, 0.6)


def test_the_share_is_kept() -> None:
    assert 250 < sum(in_share(f"trajectory {n}", 0.3) for n in range(1000)) < 350


def text_answer(body: dict[str, Any]) -> dict[str, Any]:
    choice = {
        "text": "Hello", "finish_reason": "stop", "stop_reason": None, "token_ids": ANSWER_IDS,
        "prompt_token_ids": body["prompt"], "logprobs": {"token_logprobs": [-0.5, -0.25, -0.125], "tokens": ["a"] * 3},
    }  # fmt: skip
    choices = [{"index": index} | choice for index in range(body["n"])]
    return {"id": "cmpl-x", "object": "text_completion", "created": 1, "model": body["model"], "choices": choices}


class Vllm:
    """What the fake answers to siblings; chats as always."""

    def __init__(self, fake: FakeVllm, refuses_priority: bool = False) -> None:
        self.drawn: list[dict[str, Any]] = []
        self.refuses_priority = refuses_priority
        self.hold: threading.Event | None = None
        fake.script = self.speak

    def speak(self, handler: FakeHandler, body: dict[str, Any]) -> None:
        if "prompt" not in body:
            handler.speak(body)
            return
        self.drawn.append(body)
        if self.refuses_priority and "priority" in body:
            handler.whole(400, b'{"error": {"message": "priority scheduling is not enabled"}}')
        elif self.hold is not None:
            hold, self.hold = self.hold, None
            hold.set()
            handler.until_hung_up()
        else:
            handler.whole(200, json.dumps(text_answer(body)).encode())


@pytest.fixture
def shadowed(sqlite_url: str, fake_vllm: FakeVllm, tmp_path: Path, start: Start) -> RunningProxy:
    return start(settings_for(sqlite_url, fake_vllm.url, tmp_path, learning=ALWAYS))


def end(proxy: RunningProxy, **feedback: Any) -> None:
    """Let the worker end and place what is there."""
    assert proxy.client.post("/v1/feedback", json=feedback).status_code == 202
    proxy.recorded()
    settings = proxy.settings
    sweep(proxy.engine, settings.groups, datetime.now(UTC), learning=settings.learning)


def shadows(proxy: RunningProxy, count: int = 2) -> list[Any]:
    return wait_for(lambda: len(rows := proxy.rows(threaded_by="shadow")) >= count and rows, timeout_s=20)


def test_an_ended_attempt_gets_siblings_of_its_last_turn(shadowed: RunningProxy, fake_vllm: FakeVllm) -> None:
    vllm = Vllm(fake_vllm)
    shadowed.chat({"X-Trajectory-Id": "t", "X-Task": "greeting"}, temperature=0.7, max_tokens=9)
    end(shadowed, trajectory_id="t", reward=1.0)
    drawn = shadows(shadowed)
    (body,) = vllm.drawn
    assert body["prompt"] == PROMPT_IDS
    assert (body["n"], body["temperature"], body["max_tokens"], body["priority"]) == (2, 0.7, 9, PRIORITY)
    assert {row.why_not_trained for row in drawn} == {None}
    assert [row.new_messages for row in drawn] == [[{"role": "user", "content": "hi"}]] * 2
    assert [row.response["content"] for row in drawn] == ["Hello"] * 2
    (group,) = shadowed.rows(schema.groups, id="t.shadow")
    assert (group.formed_by, group.target_size) == ("shadow", 2)
    settings = shadowed.settings
    sweep(shadowed.engine, settings.groups, datetime.now(UTC), learning=settings.learning)
    members = shadowed.rows(schema.trajectories, group_id="t.shadow")
    assert {(one.id == "t", one.task) for one in members} == {(True, "greeting"), (False, "greeting")}
    assert len(members) == 3
    assert {one.state for one in members} == {"ended", "rewarded"}


def test_of_a_conversation_the_last_turn_is_drawn_and_compared_without_it(
    shadowed: RunningProxy, fake_vllm: FakeVllm
) -> None:
    vllm = Vllm(fake_vllm)
    messages: list[Any] = [{"role": "user", "content": "hi"}]
    shadowed.chat({"X-Trajectory-Id": "t"})
    messages += [{"role": "assistant", "content": "Hello"}, {"role": "user", "content": "and?"}]
    shadowed.chat({"X-Trajectory-Id": "t"}, messages=messages)
    shadowed.recorded(2)
    end(shadowed, trajectory_id="t", reward=1.0)
    drawn = shadows(shadowed)
    assert [row.new_messages for row in drawn] == [messages] * 2
    assert len(vllm.drawn) == 1
    (group,) = shadowed.rows(schema.groups, id="t.shadow")
    assert group.target_size == 2


MUST_NOT: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
    "eval": ({"X-Split": "eval"}, {}),
    "no_train": ({"X-No-Train": "true"}, {}),
    "greedy": ({}, {"temperature": 0}),
    "tools": ({}, {"tools": [{"type": "function", "function": {"name": "send_mail", "parameters": {}}}]}),
    "told": (
        {},
        {"messages": [{"role": "user", "content": "hi"}, {"role": "tool", "tool_call_id": "x", "content": "done"}]},
    ),
}


def test_what_must_not_be_drawn_again_is_not(shadowed: RunningProxy, fake_vllm: FakeVllm) -> None:
    vllm = Vllm(fake_vllm)
    for name, (headers, values) in (MUST_NOT | {"plain": ({}, {})}).items():
        assert shadowed.chat({"X-Trajectory-Id": name} | headers, **values).status_code == 200
    shadowed.recorded(len(MUST_NOT) + 1)
    for name in (*MUST_NOT, "plain"):
        end(shadowed, trajectory_id=name, reward=1.0)
    shadows(shadowed)
    assert len(vllm.drawn) == 1
    assert [group.id for group in shadowed.rows(schema.groups, formed_by="shadow")] == ["plain.shadow"]


@pytest.mark.parametrize("share", [0, 1])
def test_a_call_at_temperature_0_gets_siblings_at_the_temperature_that_its_policy_explores_with(
    sqlite_url: str, fake_vllm: FakeVllm, tmp_path: Path, start: Start, share: float
) -> None:
    explore = ExploreSettings(temperature=0.7, share=share)
    learning = {"starter": RewardSettings(shadow_share=1.0, shadow_size=2, explore=explore)}
    proxy, vllm = start(settings_for(sqlite_url, fake_vllm.url, tmp_path, learning=learning)), Vllm(fake_vllm)
    # Siblings have no grammar.
    other = [{"role": "user", "content": "as JSON"}]
    proxy.chat({"X-Trajectory-Id": "bound"}, messages=other, temperature=0, response_format={"type": "json_object"})
    proxy.chat({"X-Trajectory-Id": "t"}, temperature=0, top_p=0.5, seed=7, max_tokens=9)
    proxy.recorded(2)
    for name in ("bound", "t"):
        end(proxy, trajectory_id=name, reward=1.0)
    drawn = shadows(proxy)
    (body,) = vllm.drawn
    assert (body["prompt"], body["n"], body["temperature"], body["max_tokens"]) == (PROMPT_IDS, 2, 0.7, 9)
    assert not {"top_p", "seed"} & body.keys()
    assert {(row.why_not_trained, row.sampling["temperature"]) for row in drawn} == {(None, 0.7)}
    (original,) = proxy.rows(trajectory_id="t")
    assert (original.why_not_trained, original.explored) == ((None, 0.7) if share else ("greedy", None))
    sweep(proxy.engine, proxy.settings.groups, datetime.now(UTC), learning=learning)
    assert len(proxy.rows(schema.trajectories, group_id="t.shadow")) == 3


def test_without_a_share_nothing_is_drawn(plain_proxy: RunningProxy, fake_vllm: FakeVllm) -> None:
    vllm = Vllm(fake_vllm)
    plain_proxy.chat({"X-Trajectory-Id": "t"})
    end(plain_proxy, trajectory_id="t", reward=1.0)
    time.sleep(DRAW_EVERY_S + QUIET_S + 0.5)
    assert vllm.drawn == []


def test_an_app_comes_first_and_the_siblings_later(shadowed: RunningProxy, fake_vllm: FakeVllm) -> None:
    vllm = Vllm(fake_vllm)
    vllm.hold = speaking = threading.Event()
    shadowed.chat({"X-Trajectory-Id": "t"})
    end(shadowed, trajectory_id="t", reward=1.0)
    assert speaking.wait(20)
    asked = threading.Event()

    def slowly(handler: FakeHandler, body: dict[str, Any]) -> None:
        fake_vllm.script = vllm.speak
        assert fake_vllm.hung_up.wait(20), "the drawing goes on although an app asks"
        asked.set()
        handler.speak(body)

    fake_vllm.script = slowly
    assert shadowed.chat().status_code == 200
    assert asked.is_set()
    assert len(shadows(shadowed)) == 2
    assert len(vllm.drawn) == 2


def test_a_server_that_knows_no_priority_draws_without(shadowed: RunningProxy, fake_vllm: FakeVllm) -> None:
    vllm = Vllm(fake_vllm, refuses_priority=True)
    shadowed.chat({"X-Trajectory-Id": "t"})
    end(shadowed, trajectory_id="t", reward=1.0)
    shadows(shadowed)
    assert ["priority" in body for body in vllm.drawn] == [True, False]


def test_the_real_server_draws_siblings_of_the_very_prompt(
    vllm_url: str, sqlite_url: str, tmp_path: Path, start: Start
) -> None:
    proxy = start(settings_for(sqlite_url, vllm_url, tmp_path, learning=ALWAYS))
    proxy.chat({"X-Trajectory-Id": "t"}, max_tokens=4)
    (original,) = proxy.recorded()
    end(proxy, trajectory_id="t", reward=1.0)
    drawn = shadows(proxy)
    assert [row.prompt_token_ids for row in drawn] == [original.prompt_token_ids] * 2
    assert {row.why_not_trained for row in drawn} == {None}
    assert all(len(row.token_ids) == len(row.inference_logprobs) > 0 for row in drawn)
