"""Whose call is this, through the running proxy: every place that may say it, and every dialect that may not."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import select

from migrations import schema
from tests.unit.proxy.conftest import FakeHandler, RunningProxy, answer, events, wait_for

HI = {"role": "user", "content": "hi"}
HELLO = {"role": "assistant", "content": "Hello"}
MORE = {"role": "user", "content": "more"}


def by(response: Any) -> tuple[str, str]:
    assert response.status_code == 200, response.text
    return response.headers["x-threaded-by"], response.headers["x-trajectory-id"]


def test_a_base_url_may_say_it(plain_proxy: RunningProxy) -> None:
    body = {"model": "starter", "messages": [HI]}
    response = plain_proxy.client.post("/r/group/g/trajectory/t/task/greeting/v1/chat/completions", json=body)
    assert by(response) == ("url", "t")
    assert response.headers["x-group-id"] == "g"
    (row,) = plain_proxy.recorded()
    (trajectory,) = plain_proxy.rows(schema.trajectories)
    assert (row.threaded_by, trajectory.id, trajectory.group_id, trajectory.task) == ("url", "t", "g", "greeting")
    assert plain_proxy.client.get("/r/trajectory/t/v1/models").json() == plain_proxy.client.get("/v1/models").json()
    refused = plain_proxy.client.post("/r/trajectory/a b/v1/chat/completions", json=body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_id")
    assert plain_proxy.client.post("/r/tracjectory/t/v1/chat/completions", json=body).status_code == 400


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/completions"])
def test_the_metadata_of_every_dialect_may_say_it(plain_proxy: RunningProxy, path: str) -> None:
    bodies: dict[str, Any] = {
        "/v1/chat/completions": {"messages": [HI]},
        "/v1/messages": {"messages": [HI], "max_tokens": 9},
        "/v1/responses": {"input": "hi"},
        "/v1/completions": {"prompt": "hi"},
    }
    metadata = {"trajectory_id": "t", "group_id": "g", "split": "eval", "team": "red"}
    plain_proxy.client.post(path, json={"model": "starter", "metadata": metadata} | bodies[path])
    plain_proxy.recorded()
    (trajectory,) = plain_proxy.rows(schema.trajectories)
    assert (trajectory.id, trajectory.group_id, trajectory.split) == ("t", "g", "eval")
    assert trajectory.metadata == {"team": "red"}


@pytest.mark.parametrize("header", ["X-Claude-Code-Session-Id", "session-id", "session_id", "x-opencode-session"])
def test_an_agent_program_says_it_already(plain_proxy: RunningProxy, header: str) -> None:
    assert by(plain_proxy.chat({header: "5f0c-1"})) == ("agent", "5f0c-1")
    assert by(plain_proxy.chat({header: "5f0c-1"}, messages=[MORE])) == ("agent", "5f0c-1")
    assert by(plain_proxy.chat({header: "5f0c-1", "X-Trajectory-Id": "t"})) == ("header", "t")


def test_a_conversation_that_says_nothing_stays_together_streamed_or_whole(plain_proxy: RunningProxy) -> None:
    first = by(plain_proxy.chat(stream=True))
    second = by(plain_proxy.chat(messages=[HI, HELLO, MORE]))
    third = by(plain_proxy.chat(messages=[HI, HELLO, MORE, HELLO | {"tool_calls": None}, MORE], stream=True))
    assert [rule for rule, _ in (first, second, third)] == ["new", "content", "content"]
    assert first[1] == second[1] == third[1]
    rows = plain_proxy.recorded(3)
    assert [row.turn for row in rows] == [0, 1, 2]
    assert [row.continued_by for row in rows] == [rows[1].id, rows[2].id, None]


def test_a_group_alone_still_leaves_the_trajectory_to_be_resolved(plain_proxy: RunningProxy) -> None:
    first = plain_proxy.chat({"X-Group-Id": "g"})
    second = plain_proxy.chat({"X-Group-Id": "g"}, messages=[HI, HELLO, MORE])
    assert by(second) == ("content", by(first)[1])
    assert first.headers["x-group-id"] == second.headers["x-group-id"] == "g"
    assert "x-group-id" not in plain_proxy.chat().headers


def test_each_choice_may_be_gone_on_from(plain_proxy: RunningProxy, fake_vllm: Any) -> None:
    def script(handler: Any, body: Any) -> None:
        handler.whole(200, json.dumps(_two_words(body)).encode())

    fake_vllm.script = script
    first = by(plain_proxy.chat(n=2))
    second = by(plain_proxy.chat(messages=[HI, {"role": "assistant", "content": "word 1"}, MORE]))
    assert second == ("content", f"{first[1]}.1")


def _two_words(body: dict[str, Any]) -> dict[str, Any]:
    whole = answer(body.get("n", 1))
    for choice in whole["choices"]:
        choice["message"] = choice["message"] | {"content": f"word {choice['index']}"}
    return whole


@pytest.mark.parametrize("target", ["trajectory_id", "completion_id"])
def test_feedback_that_ends_it_lets_the_next_call_begin_another(plain_proxy: RunningProxy, target: str) -> None:
    response = plain_proxy.chat()
    rule, trajectory_id = by(response)
    name = trajectory_id if target == "trajectory_id" else response.json()["id"]
    accepted = plain_proxy.client.post("/v1/feedback", json={target: name, "reward": 1.0, "final": True})
    assert accepted.status_code == 202
    rule, after = by(plain_proxy.chat(messages=[HI, HELLO, MORE]))
    assert rule == "after"
    assert after != trajectory_id
    plain_proxy.recorded(2)
    (row,) = plain_proxy.rows(schema.trajectories, id=after)
    assert row.continues == response.headers["x-completion-id"]


def test_a_requested_end_counts_as_one(plain_proxy: RunningProxy) -> None:
    by(plain_proxy.chat({"X-Trajectory-Id": "t"}))
    assert plain_proxy.client.post("/v1/trajectories/t/end").status_code == 202
    rule, after = by(plain_proxy.chat({"X-Trajectory-Id": "t"}, messages=[MORE]))
    assert rule == "header"
    assert after != "t"


def test_an_app_that_hangs_up_and_asks_again_goes_on_in_one_trajectory(
    plain_proxy: RunningProxy, fake_vllm: Any
) -> None:
    def halfway(handler: Any, _body: Any) -> None:
        handler.begin()
        for event in events()[:2]:
            handler.say(event)
        handler.until_hung_up()

    fake_vllm.script = halfway
    with plain_proxy.client.stream(
        "POST", "/v1/chat/completions", json={"model": "starter", "messages": [HI], "stream": True}
    ) as response:
        trajectory_id = response.headers["x-trajectory-id"]
        next(response.iter_bytes())
    assert fake_vllm.hung_up.wait(20)
    plain_proxy.recorded()
    fake_vllm.script = FakeHandler.speak
    again = plain_proxy.chat({"x-stainless-retry-count": "1"}, stream=True)
    assert by(again) == ("retry", trajectory_id)
    first, second = plain_proxy.recorded(2)
    assert (first.why_not_trained, second.retry_of) == ("superseded", first.id)


def test_two_proxies_wait_for_what_the_other_has_served(
    plain_proxy: RunningProxy, start: Callable[..., RunningProxy]
) -> None:
    other = start(plain_proxy.settings)
    first = by(plain_proxy.chat())
    second = by(other.chat(messages=[HI, HELLO, MORE]))
    third = by(plain_proxy.chat(messages=[HI, HELLO, MORE, HELLO, MORE]))
    assert [second, third] == [("content", first[1])] * 2


def test_a_proxy_that_left_is_waited_for_no_more(plain_proxy: RunningProxy, start: Callable[..., RunningProxy]) -> None:
    query = select(schema.proxies.c.id)
    with plain_proxy.engine.connect() as connection:
        assert len(connection.execute(query).all()) == 1
    start(plain_proxy.settings).stop()
    with plain_proxy.engine.connect() as connection:
        assert len(connection.execute(query).all()) == 1


DIALECTS: dict[str, Callable[[list[Any]], dict[str, Any]]] = {
    "/v1/chat/completions": lambda turns: {"messages": turns, "max_tokens": 3},
    "/v1/messages": lambda turns: {"messages": turns, "max_tokens": 3},
    "/v1/responses": lambda turns: {"input": turns, "max_output_tokens": 3},
}


def echo_of(path: str, answer: dict[str, Any]) -> list[Any]:
    """The answer as the dialect's own client sends it back."""
    match path:
        case "/v1/chat/completions":
            return [answer["choices"][0]["message"]]
        case "/v1/messages":
            return [{"role": "assistant", "content": answer["content"]}]
        case _:
            return list(answer["output"])


@pytest.mark.slow
@pytest.mark.parametrize("path", DIALECTS)
def test_every_dialect_is_threaded_by_what_it_says(real: RunningProxy, path: str) -> None:
    turns: list[Any] = [{"role": "user", "content": f"a conversation at {path}"}]
    resolved = []
    for _ in range(3):
        response = real.client.post(path, json={"model": "starter"} | DIALECTS[path](turns))
        resolved.append(by(response))
        turns = [*turns, *echo_of(path, response.json()), {"role": "user", "content": "go on"}]
    assert [rule for rule, _ in resolved] == ["new", "content", "content"]
    assert len({trajectory for _, trajectory in resolved}) == 1


@pytest.mark.slow
@pytest.mark.parametrize("path", [*DIALECTS, "/v1/completions"])
def test_only_attempts_at_one_prompt_may_form_a_group(real: RunningProxy, path: str) -> None:
    def prompt_hash(prompt: str) -> str:
        turns = [{"role": "user", "content": prompt}]
        body = {"prompt": prompt, "max_tokens": 3} if path == "/v1/completions" else DIALECTS[path](turns)
        _, trajectory_id = by(real.client.post(path, json={"model": "starter"} | body))
        (row,) = wait_for(lambda: real.rows(schema.trajectories, id=trajectory_id))
        return str(row.prompt_hash)

    poem = prompt_hash("Write a poem")
    assert (prompt_hash("Write a poem"), prompt_hash("What is 2+2?") == poem) == (poem, False)
