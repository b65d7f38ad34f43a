"""A policy that another server's model answers for, until the policy is as good: who answers which call."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import update

from migrations import schema
from tests.unit.proxy.conftest import FakeHandler, FakeVllm, RunningProxy, identified, settings_for, wait_for

TEACHER = "starter-teacher"
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture
def other() -> Iterator[FakeVllm]:
    """The server of the teacher."""
    with FakeVllm(base_names=["gpt"]) as other:
        other.script = identified
        yield other


class Scene:
    """A proxy whose policy takes over from a teacher."""

    def __init__(self, proxy: RunningProxy, own: FakeVllm, other: FakeVllm) -> None:
        self.proxy, self.own, self.other = proxy, own, other

    def share(self, share: float) -> None:
        """Set the share that the policy answers, and wait until the proxy knows it."""
        with self.proxy.engine.begin() as connection:
            connection.execute(
                update(schema.policies).where(schema.policies.c.id == "starter").values(handover_share=share)
            )
        wait_for(lambda: self.proxy.app.tenants["default"].policies.handover("starter").share == share)

    def answered_by(self, **values: Any) -> str:
        """Return the policy that is recorded for a new chat."""
        headers = values.pop("headers", None)
        reply = self.proxy.chat(headers, **values)
        assert reply.status_code == 200, reply.text
        (row,) = self.proxy.recorded(id=reply.headers["x-completion-id"])
        return str(row.policy)


@pytest.fixture
def scene(
    database_url: str,
    fake_vllm: FakeVllm,
    other: FakeVllm,
    tmp_path: Path,
    start: Callable[..., RunningProxy],
) -> Scene:
    fake_vllm.script = identified
    settings = settings_for(
        database_url,
        fake_vllm.url,
        tmp_path,
        upstreams={"other": {"url": f"{other.url}/v1", "models": {TEACHER: "gpt"}}},
        learning={"starter": {"handover": {"teacher": TEACHER, "shares": [0.25, 0.75, 1]}}},
    )
    return Scene(start(settings), fake_vllm, other)


def test_the_policy_answers_its_share_and_the_teacher_the_others(scene: Scene) -> None:
    scene.share(0.5)
    by = [scene.answered_by(headers={"X-Trajectory-Id": f"t{number}"}) for number in range(40)]
    # Ids decide, so these 40 always fall alike; a share of a half is neither none nor all of them.
    assert 10 <= by.count("starter") <= 30
    assert by.count(TEACHER) == 40 - by.count("starter")
    assert len(scene.own.requests) == by.count("starter")
    assert {body["model"] for body in scene.other.requests} == {"gpt"}


def test_an_app_sees_the_name_that_it_requested(scene: Scene) -> None:
    for share in (0.0, 1.0):
        scene.share(share)
        assert scene.proxy.chat().json()["model"] == "starter"
    assert (len(scene.own.requests), len(scene.other.requests)) == (1, 1)


def test_the_teacher_gets_the_request_without_what_only_vllm_knows(scene: Scene) -> None:
    scene.share(0.0)
    scene.proxy.chat(temperature=0.5)
    assert scene.other.requests == [{"model": "gpt", "messages": MESSAGES, "temperature": 0.5}]
    (row,) = scene.proxy.recorded()
    assert (row.policy, row.policy_version, row.why_not_trained) == (TEACHER, 0, "demonstration")


def test_a_trajectory_stays_with_whom_it_began(scene: Scene) -> None:
    scene.share(0.0)
    named, own = {"X-Trajectory-Id": "t"}, {"X-Trajectory-Id": "own"}
    assert scene.answered_by(headers=named) == TEACHER
    scene.share(1.0)
    assert scene.answered_by(headers=own) == "starter"
    assert scene.answered_by(headers=named) == TEACHER
    scene.share(0.0)
    assert scene.answered_by(headers=own) == "starter"


def test_a_trajectory_that_is_known_by_its_conversation_stays_too(scene: Scene) -> None:
    scene.share(0.0)
    assert scene.answered_by() == TEACHER
    scene.share(1.0)
    reply = scene.proxy.chat(
        messages=[*MESSAGES, {"role": "assistant", "content": "Hello"}, {"role": "user", "content": "and now?"}]
    )
    first, second = scene.proxy.recorded(2)
    assert (second.policy, second.trajectory_id) == (TEACHER, first.trajectory_id)
    assert reply.headers["x-threaded-by"] == "content"


def test_all_attempts_of_a_group_go_to_the_same_one(scene: Scene) -> None:
    scene.share(0.5)
    by_group = [
        {
            scene.answered_by(headers={"X-Group-Id": f"g{group}", "X-Trajectory-Id": f"g{group}-{number}"})
            for number in range(4)
        }
        for group in range(12)
    ]
    assert {len(each) for each in by_group} == {1}
    assert set.union(*by_group) == {"starter", TEACHER}


def test_a_version_that_an_app_names_answers_itself(scene: Scene) -> None:
    scene.share(0.0)
    assert scene.answered_by(model="starter@v0") == "starter"
    assert scene.answered_by(model=TEACHER) == TEACHER


@pytest.mark.parametrize("stream", [False, True])
def test_messages_reach_the_teacher_as_the_chat_that_the_policy_would_get(scene: Scene, stream: bool) -> None:
    scene.share(0.0)
    scene.other.script = FakeHandler.speak if stream else identified
    body = {"model": "starter", "max_tokens": 8, "messages": MESSAGES, "stream": stream}
    reply = scene.proxy.client.post("/v1/messages", json=body)
    assert reply.status_code == 200, reply.text
    (request,) = scene.other.requests
    assert request["messages"] == MESSAGES
    assert not {"return_token_ids", "cache_salt", "logprobs"} & request.keys()
    scene.share(1.0)
    answer = {"role": "assistant", "content": [{"type": "text", "text": "Hello"}]}
    again = body | {"messages": [*MESSAGES, answer, {"role": "user", "content": "more"}]}
    scene.proxy.client.post("/v1/messages", json=again)
    first, second = scene.proxy.recorded(2)
    assert (second.policy, second.trajectory_id) == (TEACHER, first.trajectory_id)


def test_a_response_of_the_teacher_can_be_named_by_the_next_request(scene: Scene) -> None:
    scene.share(0.0)
    client = scene.proxy.client
    first = client.post("/v1/responses", json={"model": "starter", "input": "hi"})
    assert first.status_code == 200, first.text
    scene.share(1.0)
    body = {"model": "starter", "input": "more", "previous_response_id": first.json()["id"]}
    second = client.post("/v1/responses", json=body)
    assert second.status_code == 200, second.text
    assert [message["content"] for message in scene.other.requests[-1]["messages"]][-1] == "more"
    assert len(scene.other.requests) == 2


def test_a_retry_gets_the_answer_of_the_first_call(scene: Scene) -> None:
    scene.share(0.0)
    key = {"Idempotency-Key": "k"}
    first = scene.proxy.chat(key)
    scene.share(1.0)
    assert scene.proxy.chat(key).json() == first.json()
    assert (len(scene.own.requests), len(scene.other.requests)) == (0, 1)


def test_the_share_is_a_metric(scene: Scene) -> None:
    scene.share(0.75)
    page = scene.proxy.client.get("/metrics").text
    assert 'whetstone_handover_share{policy="starter"} 0.75' in page
