"""Apps that set temperature 0: which of their calls are sampled at another temperature, and what says so."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.unit.proxy.conftest import STREAM, FakeHandler, FakeVllm, RunningProxy, settings_for, wait_for
from whetstone.config.rewards import ExploreSettings, RewardSettings

Start = Callable[..., RunningProxy]
HOT = 0.7
GREEDY = {"temperature": 0, "max_tokens": 9}


def exploring(share: float = 1) -> dict[str, RewardSettings]:
    return {"starter": RewardSettings(explore=ExploreSettings(share=share, temperature=HOT))}


@pytest.fixture
def explorer(database_url: str, fake_vllm: FakeVllm, tmp_path: Path, start: Start) -> RunningProxy:
    """A proxy whose policy explores with each call that it may."""
    return start(settings_for(database_url, fake_vllm.url, tmp_path, learning=exploring()))


def explored(response: httpx.Response) -> bool:
    """Whether the response says that it was explored."""
    assert response.status_code == 200, response.text
    return response.headers.get("x-explored") == "0.7"


def test_a_call_that_explores_says_so_and_can_be_trained_on(explorer: RunningProxy, fake_vllm: FakeVllm) -> None:
    assert explored(explorer.chat(top_p=0.5, **GREEDY))
    (row,) = explorer.recorded()
    assert (row.explored, row.why_not_trained) == (HOT, None)
    assert row.sampling == {"top_p": 0.5, **GREEDY}
    (body,) = fake_vllm.requests
    assert (body["temperature"], body["max_tokens"], "top_p" in body) == (HOT, 9, False)


def test_a_stream_says_it_with_its_first_byte(explorer: RunningProxy) -> None:
    assert explored(explorer.client.post("/v1/chat/completions", json=STREAM | {"temperature": 0}))
    assert [row.explored for row in explorer.recorded()] == [HOT]


@pytest.mark.parametrize(
    ("path", "values"),
    [
        ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}),
        ("/v1/responses", {"input": "hi"}),
    ],
)
def test_every_dialect_explores_through_its_chat(
    explorer: RunningProxy, fake_vllm: FakeVllm, path: str, values: dict[str, Any]
) -> None:
    assert explored(explorer.client.post(path, json={"model": "starter", "temperature": 0} | values))
    assert [row.explored for row in explorer.recorded()] == [HOT]
    assert fake_vllm.requests[0]["temperature"] == HOT


NEVER: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
    "held out": ({"X-Split": "eval"}, GREEDY),
    "not to be trained on": ({"X-No-Train": "true"}, GREEDY),
    "a fixed version": ({}, GREEDY | {"model": "starter@v0"}),
    "sampled anyway": ({}, {"temperature": 0.2}),
    "without a temperature": ({}, {}),
    "barred anyway": ({}, GREEDY | {"nobody_knows": 1}),
}


@pytest.mark.parametrize("case", NEVER)
def test_some_calls_never_explore(explorer: RunningProxy, fake_vllm: FakeVllm, case: str) -> None:
    headers, values = NEVER[case]
    assert not explored(explorer.chat(headers, **values))
    (row,) = explorer.recorded()
    assert row.explored is None
    assert fake_vllm.requests[0].get("temperature") == values.get("temperature")


@pytest.mark.parametrize("headers", [{"X-Split": "eval"}, {"X-No-Train": "true"}])
def test_a_trajectory_that_is_held_out_is_so_to_its_end_whoever_continues_it(
    explorer: RunningProxy, start: Start, headers: dict[str, str]
) -> None:
    explorer.chat({"X-Trajectory-Id": "t"} | headers, **GREEDY)
    explorer.recorded()
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Hello"},
                {"role": "user", "content": "and?"}]  # fmt: skip
    again = start(explorer.settings.model_copy(update={"data": explorer.settings.data / "another"}))
    for proxy, named in ((explorer, {}), (explorer, {"X-Trajectory-Id": "t"}), (again, {"X-Trajectory-Id": "t"})):
        response = proxy.chat(named, messages=messages, **GREEDY)
        assert response.headers["x-trajectory-id"] == "t"
        assert not explored(response)


def test_a_policy_without_a_share_serves_what_it_is_asked(
    sqlite_url: str, fake_vllm: FakeVllm, tmp_path: Path, start: Start
) -> None:
    proxy = start(settings_for(sqlite_url, fake_vllm.url, tmp_path, learning=exploring(share=0)))
    assert not explored(proxy.chat(**GREEDY))
    assert [row.why_not_trained for row in proxy.recorded()] == ["greedy"]
    assert fake_vllm.requests[0]["temperature"] == 0


def test_a_share_explores_and_equal_calls_are_decided_one_by_one(
    sqlite_url: str, fake_vllm: FakeVllm, tmp_path: Path, start: Start
) -> None:
    proxy = start(settings_for(sqlite_url, fake_vllm.url, tmp_path, learning=exploring(share=0.3)))
    count = sum(explored(proxy.chat(**GREEDY)) for _ in range(100))
    assert 10 <= count <= 50  # 30 ± 4.4 standard deviations
    rows = proxy.recorded(100)
    assert sum(row.explored is not None for row in rows) == count
    assert {row.why_not_trained for row in rows if row.explored is None} == {"greedy"}


def test_a_retry_is_sampled_as_its_first_try_and_a_replay_says_the_same(
    sqlite_url: str, fake_vllm: FakeVllm, tmp_path: Path, start: Start
) -> None:
    proxy = start(settings_for(sqlite_url, fake_vllm.url, tmp_path, learning=exploring(share=0.5)))

    def fails(handler: FakeHandler, _body: dict[str, Any]) -> None:
        handler.whole(500, b'{"error": {"message": "no"}}')

    seen = set()
    for number in range(12):
        question = [{"role": "user", "content": f"question {number}"}]
        fake_vllm.script = fails
        failed = proxy.chat(messages=question, **GREEDY)
        assert failed.status_code == 500
        wait_for(lambda number=number: len(proxy.rows(status="error")) == number + 1)
        fake_vllm.script = FakeHandler.speak
        retried = proxy.chat({"x-stainless-retry-count": "1"}, messages=question, **GREEDY)
        assert retried.headers["x-threaded-by"] == "retry"
        first, second = fake_vllm.requests[-2:]
        assert first["temperature"] == second["temperature"] == (HOT if explored(retried) else 0)
        seen.add(explored(retried))
    assert seen == {True, False}
    for number in range(6):
        headers = {"Idempotency-Key": f"k{number}"}
        answers = [proxy.chat(headers, **GREEDY) for _ in range(2)]
        assert explored(answers[0]) == explored(answers[1])
        assert answers[0].headers["x-completion-id"] == answers[1].headers["x-completion-id"]


def test_the_views_say_it(explorer: RunningProxy) -> None:
    explorer.chat(**GREEDY)
    explorer.recorded()
    with explorer.engine.connect() as connection:
        (row,) = connection.exec_driver_sql("SELECT explored, sampling FROM admin_completions").all()
    sampling = row.sampling if isinstance(row.sampling, dict) else json.loads(row.sampling)
    assert (row.explored, sampling["temperature"]) == (HOT, 0)
