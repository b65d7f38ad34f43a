"""A request asked again: whether it is a retry, a replay, or the next member of its group."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from sqlalchemy import text

from migrations import schema
from tests.unit.proxy.conftest import FakeHandler, FakeVllm, RunningProxy

MESSAGES = [{"role": "user", "content": "hi"}]
RETRY = {"x-stainless-retry-count": "1"}


def unanswered(proxy: RunningProxy, fake: FakeVllm, headers: dict[str, str] | None = None) -> None:
    """A call that vLLM breaks off."""
    fake.script = lambda handler, _body: handler.hang_up()
    assert proxy.chat(headers).status_code == 503
    fake.script = FakeHandler.speak


@pytest.mark.parametrize("headers", [{}, {"X-Group-Id": "g"}])
def test_a_retry_of_the_client_is_no_second_member(
    proxy: RunningProxy, fake_vllm: FakeVllm, headers: dict[str, str]
) -> None:
    unanswered(proxy, fake_vllm, headers)
    assert proxy.chat(headers | RETRY).status_code == 200
    first, second = proxy.recorded(2)
    assert (second.retry_of, second.why_not_trained) == (first.id, None)
    assert (first.status, first.why_not_trained) == ("error", "superseded")
    assert [(row.id, row.state) for row in proxy.rows(schema.trajectories)] == [(first.trajectory_id, "open")]
    assert (first.threaded_by, second.threaded_by, second.trajectory_id) == ("new", "retry", first.trajectory_id)


def test_a_retry_of_another_body_is_no_retry(proxy: RunningProxy, fake_vllm: FakeVllm) -> None:
    unanswered(proxy, fake_vllm)
    proxy.chat(RETRY, max_tokens=3)
    first, second = proxy.recorded(2)
    assert (first.why_not_trained, second.retry_of) == ("error", None)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "headers", [{"Idempotency-Key": "a key, of any characters"}, {"X-Turn-Id": "1", "X-Trajectory-Id": "t"}]
)
def test_a_turn_asked_again_gets_the_very_same_answer(
    proxy: RunningProxy, fake_vllm: FakeVllm, headers: dict[str, str], stream: bool
) -> None:
    first, again = proxy.chat(headers, stream=stream), proxy.chat(headers, stream=stream)
    assert first.status_code == again.status_code == 200
    assert first.content == again.content
    ours = {name: value for name, value in first.headers.items() if name not in ("date", "server")}
    assert {name: again.headers[name] for name in ours} == ours
    assert len(fake_vllm.requests) == len(proxy.recorded()) == 1


def test_an_answer_survives_the_proxy_that_gave_it(proxy: RunningProxy, start: Any, fake_vllm: FakeVllm) -> None:
    first = proxy.chat({"Idempotency-Key": "k"}, stream=True)
    proxy.recorded()
    other = start(proxy.settings)
    assert other.chat({"Idempotency-Key": "k"}, stream=True).content == first.content
    assert len(fake_vllm.requests) == 1


def test_a_turn_id_holds_within_its_trajectory(proxy: RunningProxy, fake_vllm: FakeVllm) -> None:
    for trajectory in ("t0", "t1"):
        proxy.chat({"X-Turn-Id": "1", "X-Trajectory-Id": trajectory})
    assert len(proxy.recorded(2)) == len(fake_vllm.requests) == 2


def test_a_key_with_another_body_is_409(plain_proxy: RunningProxy, fake_vllm: FakeVllm) -> None:
    plain_proxy.chat({"Idempotency-Key": "k"})
    refused = plain_proxy.chat({"Idempotency-Key": "k"}, max_tokens=1)
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "turn_reused")
    assert len(fake_vllm.requests) == 1


def test_a_turn_that_failed_is_served_afresh(plain_proxy: RunningProxy, fake_vllm: FakeVllm) -> None:
    key = {"Idempotency-Key": "k"}
    unanswered(plain_proxy, fake_vllm, key)
    assert plain_proxy.chat(key).status_code == 200
    first, second = plain_proxy.recorded(2)
    assert (second.retry_of, first.why_not_trained) == (first.id, "superseded")


def test_the_same_turn_twice_at_once_is_sampled_once(plain_proxy: RunningProxy, fake_vllm: FakeVllm) -> None:
    both_sent = threading.Event()

    def script(handler: FakeHandler, body: Any) -> None:
        assert both_sent.wait(20)
        handler.speak(body)

    fake_vllm.script = script
    with ThreadPoolExecutor() as pool:
        calls = [pool.submit(plain_proxy.chat, {"Idempotency-Key": "k"}) for _ in range(4)]
        both_sent.set()
        answers = {call.result().content for call in calls}
    assert len(answers) == len(fake_vllm.requests) == len(plain_proxy.recorded()) == 1


def test_equal_bodies_without_a_word_are_ordinary_members(plain_proxy: RunningProxy, fake_vllm: FakeVllm) -> None:
    with ThreadPoolExecutor() as pool:
        calls = [pool.submit(plain_proxy.chat, {"X-Group-Id": "g"}) for _ in range(8)]
        assert [call.result().status_code for call in calls] == [200] * 8
    assert {row.why_not_trained for row in plain_proxy.recorded(8)} == {None}
    assert len(fake_vllm.requests) == 8


def test_without_the_database_a_keyed_turn_waits_for_better_times(
    plain_proxy: RunningProxy, fake_vllm: FakeVllm
) -> None:
    """Whether it was answered stands there; sampling it twice would be worse than a 503."""
    with plain_proxy.engine.begin() as connection:
        connection.execute(text("PRAGMA legacy_alter_table = ON"))  # the views stay as they are
        connection.execute(text("ALTER TABLE completions RENAME TO away"))
    response = plain_proxy.chat({"Idempotency-Key": "k"})
    assert (response.status_code, response.json()["error"]["code"]) == (503, "database_away")
    assert fake_vllm.requests == []
    with plain_proxy.engine.begin() as connection:
        connection.execute(text("ALTER TABLE away RENAME TO completions"))
    assert plain_proxy.chat({"Idempotency-Key": "k"}).status_code == 200
    assert len(fake_vllm.requests) == len(plain_proxy.recorded()) == 1
