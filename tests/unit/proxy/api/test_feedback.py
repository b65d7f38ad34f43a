"""Feedback through the app: what is refused leaves nothing, what is taken can be asked after and taken back."""

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import event

from judge.settlement.sweep import sweep
from migrations import schema
from proxy.recording.store import Store
from tests.conftest import Seed
from tests.unit.proxy.conftest import FakeHandler, FakeVllm, RunningProxy, answer
from tests.unit.proxy.domain.test_feedback import WRONG
from whetstone.config.settings import GroupSettings

JUDGED = GroupSettings()


def judge(proxy: RunningProxy, after_s: float = 1) -> None:
    """Let the judge look, some seconds from now."""
    sweep(proxy.engine, JUDGED, datetime.now(UTC) + timedelta(seconds=after_s))


def post(proxy: RunningProxy, **body: Any) -> str:
    response = proxy.client.post("/v1/feedback", json=body)
    assert response.status_code == 202, response.text
    return str(response.json()["id"])


def state_of(proxy: RunningProxy, feedback_id: str) -> dict[str, Any]:
    row: dict[str, Any] = proxy.client.get(f"/v1/feedback/{feedback_id}").json()
    return row


@pytest.fixture
def seeded(proxy: RunningProxy) -> Seed:
    """Rows beside those that calls leave: what other programs write."""
    return Seed(proxy.engine, datetime.now(UTC))


NO_JSON = [
    b"",
    b"{",
    b'{"trajectory_id": "t", "reward": NaN}',
    b'{"trajectory_id": "t", "parts": {"a": Infinity}}',
    b'{"trajectory_id": "t", "reward": -1e999}',
    b'{"trajectory_id": "\xff", "reward": 1}',
    b"[" * 100_000,
]


@pytest.mark.parametrize("body", [*NO_JSON, *(json.dumps(body).encode() for body, _ in WRONG)])
def test_what_is_refused_is_not_stored_in_part(door: RunningProxy, body: bytes) -> None:
    for sent in (body, b'[{"trajectory_id": "t", "reward": 1}, ' + body + b"]"):
        response = door.client.post("/v1/feedback", content=sent)
        assert 400 <= response.status_code < 500
        assert response.json()["error"]["message"]
        assert len(response.content) < 1000
    assert door.rows(schema.feedback) == []


@pytest.mark.parametrize("path", ["/v1/trajectories/a b/end", "/v1/groups/%00/close", f"/v1/groups/{'g' * 129}/close"])
def test_what_is_no_id_is_asked_to_end_nowhere(door: RunningProxy, path: str) -> None:
    response = door.client.post(path)
    assert (response.status_code, response.json()["error"]["param"]) == (400, path.split("/")[2][:-1].replace(
        "trajectorie", "trajectory") + "_id")  # fmt: skip
    assert door.rows(schema.feedback) == []


def test_an_applied_feedback_tells_what_its_trajectory_still_waits_for(proxy: RunningProxy) -> None:
    proxy.chat({"X-Trajectory-Id": "t", "X-Group-Id": "g"})
    proxy.recorded()
    given = post(proxy, trajectory_id="t", parts={"accuracy": 0.5, "tone": 0.25}, demonstration="Paris")
    assert (state_of(proxy, given)["state"], state_of(proxy, given)["why_not_trained"]) == ("waiting", None)
    judge(proxy)
    found = state_of(proxy, given)
    assert (found["state"], found["reward"], found["why_not_trained"]) == ("applied", 0.75, "group_open")
    assert found["demonstration"] == {"role": "assistant", "content": "Paris"}


def test_a_trajectory_is_ended_and_a_group_closed_by_a_call(proxy: RunningProxy) -> None:
    proxy.chat({"X-Trajectory-Id": "t", "X-Group-Id": "g"})
    proxy.recorded()
    ends = [
        proxy.client.post("/v1/trajectories/t/end", headers={"Idempotency-Key": "once"}).json()["id"] for _ in range(2)
    ]
    closes = proxy.client.post("/v1/groups/g/close")
    assert (closes.status_code, closes.json()["state"]) == (202, "waiting")
    assert ends[0] == ends[1]
    judge(proxy)
    assert proxy.client.get("/v1/trajectories/t").json()["ended_at"]
    assert proxy.client.get("/v1/groups/g").json()["close_asked_at"]
    assert [state_of(proxy, one)["state"] for one in (ends[0], closes.json()["id"])] == ["applied", "applied"]


def test_feedback_is_withdrawn_before_and_after_it_was_applied_and_again(proxy: RunningProxy) -> None:
    proxy.chat({"X-Trajectory-Id": "t"})
    proxy.recorded()
    first, second = post(proxy, trajectory_id="t", reward=0.25), post(proxy, trajectory_id="t", reward=1)
    judge(proxy)
    third = post(proxy, trajectory_id="t", reward=0)
    for feedback_id in (second, third):
        response = proxy.client.delete(f"/v1/feedback/{feedback_id}")
        assert (response.status_code, response.json()["id"]) == (200, feedback_id)
    judge(proxy)
    assert [state_of(proxy, one)["state"] for one in (first, second, third)] == ["applied", "withdrawn", "withdrawn"]
    assert proxy.client.get("/v1/trajectories/t").json()["reward"] == 0.25
    again = proxy.client.delete(f"/v1/feedback/{second}")
    assert (again.status_code, again.json()["state"]) == (200, "withdrawn")


def test_what_is_unknown_or_over_is_not_withdrawn(proxy: RunningProxy, seeded: Seed) -> None:
    seeded.trajectory("busy", state="claimed")
    used = seeded.feedback("t", 1.0, state="used", step=7)
    late = seeded.feedback("t", 1.0, state="unused", reason="trained in step 7")
    failed = seeded.feedback("t", 1.0, state="failed", reason="no such trajectory in this project")
    claimed = seeded.feedback("busy", 1.0, state="applied", trajectory_id="busy")
    assert proxy.client.delete("/v1/feedback/nobody").status_code == 404
    for feedback_id, why in (
        (used, "step 7 has trained on it"),
        (late, "unused (trained in step 7)"),
        (failed, "no such trajectory"),
        (claimed, "a step has claimed"),
    ):
        response = proxy.client.delete(f"/v1/feedback/{feedback_id}")
        assert (response.status_code, response.json()["error"]["code"]) == (409, "too_late")
        assert why in response.json()["error"]["message"]
    assert {row.withdrawn_at for row in proxy.rows(schema.feedback)} == {None}
    assert state_of(proxy, used)["step"] == 7


def test_another_projects_ids_are_unknown_ones(proxy: RunningProxy, seeded: Seed) -> None:
    seeded.project("other")
    seeded.group("g", "other")
    seeded.trajectory("t", "g", "other")
    theirs = seeded.feedback("t", 1.0, project="other")
    taken = [
        [post(proxy, trajectory_id=known, reward=1), post(proxy, completion_id=f"{known}-0", thumbs="up"),
         post(proxy, completion_id=f"chatcmpl-{known}-0", parts={"a": 1}),
         proxy.client.post(f"/v1/trajectories/{known}/end").json()["id"]]
        for known in ("t", "nobody")
    ]  # fmt: skip
    groups = [
        [post(proxy, group_id=known, rewards={"t": 1}), proxy.client.post(f"/v1/groups/{known}/close").json()["id"]]
        for known in ("g", "nothing")
    ]
    for after_s, state in ((1, "waiting"), (901, "failed")):
        judge(proxy, after_s)
        for foreign, unknown in (taken, groups):
            outcomes = [[(state_of(proxy, one)["state"], state_of(proxy, one)["reason"]) for one in ids]
                        for ids in (foreign, unknown)]  # fmt: skip
            assert outcomes[0] == outcomes[1]
            assert {found for found, _ in outcomes[0]} == {state}
    assert state_of(proxy, taken[0][0])["reason"] == "no such trajectory in this project"
    assert state_of(proxy, groups[0][1])["reason"] == "no such group in this project"
    answers = [
        (proxy.client.get(f"/v1/feedback/{one}").status_code, proxy.client.delete(f"/v1/feedback/{one}").status_code)
        for one in (theirs, "nobody")
    ]
    assert answers == [(404, 404), (404, 404)]
    (trajectory,) = proxy.rows(schema.trajectories, project="other")
    assert trajectory.reward == 1.0  # their own feedback, and no other


@pytest.mark.parametrize("path", ["/v1/trajectories/%00", "/v1/groups/%00", "/v1/feedback/%00"])
def test_what_is_no_id_is_not_found(proxy: RunningProxy, path: str) -> None:
    assert proxy.client.get(path).status_code == 404


def test_attempts_drawn_for_people_are_listed_with_what_was_said_until_they_tell(
    proxy: RunningProxy, seeded: Seed
) -> None:
    assert proxy.client.get("/v1/reviews").json() == {"object": "list", "data": []}
    seeded.trajectory("drawn", turns=2, reward=0.5, reward_source="judge", review_at=seeded.now)
    seeded.trajectory("not-drawn")
    (one,) = proxy.client.get("/v1/reviews").json()["data"]
    assert (one["trajectory_id"], one["reward"], one["reward_source"]) == ("drawn", 0.5, "judge")
    assert [message["content"] for message in one["messages"]] == ["question 0", "answer 0", "question 1"]
    assert one["response"]["content"] == "answer 1"
    post(proxy, trajectory_id="drawn", thumbs="up")
    judge(proxy)
    assert proxy.client.get("/v1/reviews").json()["data"] == []


TOOL_CALLS = [
    {"id": f"chatcmpl-tool-{letter * 32}", "type": "function", "function": {"name": "move", "arguments": "{}"}}
    for letter in "ab"
]


def calling_tools(handler: FakeHandler, body: dict[str, Any]) -> None:
    """Answer with two tool calls."""
    said = answer(body.get("n", 1))
    for choice in said["choices"]:
        choice["message"] |= {"content": None, "tool_calls": TOOL_CALLS}
    handler.whole(200, said)


def test_a_tool_call_names_the_completion_that_made_it(proxy: RunningProxy, fake_vllm: FakeVllm) -> None:
    fake_vllm.script = calling_tools
    proxy.chat({"X-Trajectory-Id": "t"})
    proxy.recorded()
    target = TOOL_CALLS[1]["id"]
    posted = proxy.client.post("/v1/feedback", json={"completion_id": target, "reward": 0.25, "final": True}).json()
    assert posted["target"] == "known"
    judge(proxy)
    (completion,) = proxy.rows()
    found = state_of(proxy, posted["id"])
    assert (found["state"], found["trajectory_id"], found["completion_id"]) == ("applied", "t", completion.id)
    (trajectory,) = proxy.rows(schema.trajectories)
    assert (trajectory.reward, trajectory.reward_source, trajectory.state) == (0.25, "completions", "rewarded")
    # It ended the trajectory for this proxy too.
    assert proxy.chat({"X-Trajectory-Id": "t"}).headers["x-trajectory-id"] != "t"


def test_an_item_of_a_response_names_the_answer_that_has_it(proxy: RunningProxy) -> None:
    response = proxy.client.post("/v1/responses", json={"model": "starter", "input": "hi"})
    (item,) = response.json()["output"]
    assert item["type"] == "message"
    proxy.recorded()
    posted = proxy.client.post("/v1/feedback", json={"completion_id": item["id"], "thumbs": "up"}).json()
    assert posted["target"] == "known"
    judge(proxy)
    assert state_of(proxy, posted["id"])["trajectory_id"] == response.headers["x-trajectory-id"]


def test_feedback_says_whether_its_target_is_known_item_by_item(proxy: RunningProxy, seeded: Seed) -> None:
    seeded.trajectory("t", seeded.group("g"))
    posts: list[tuple[dict[str, Any], str]] = [
        ({"trajectory_id": "t", "reward": 1, "choice": 2}, "known"),
        ({"completion_id": "t-0", "reward": 1}, "known"),
        ({"completion_id": "chatcmpl-t-0", "reward": 1}, "known"),
        ({"completion_id": "chatcmpl-t-0", "reward": 1, "choice": 1}, "unknown yet"),
        ({"group_id": "g", "rewards": {"t": 1}}, "known"),
        ({"group_id": "t", "rewards": {"t": 1}}, "unknown yet"),
        ({"trajectory_id": "g", "reward": 1}, "unknown yet"),
        ({"completion_id": "call_nobodyhasit", "reward": 1}, "unknown yet"),
    ]
    several = proxy.client.post("/v1/feedback", json=[body for body, _ in posts])
    assert several.status_code == 202
    assert [one["target"] for one in several.json()] == [target for _, target in posts]
    for body, target in posts:
        assert proxy.client.post("/v1/feedback", json=body).json()["target"] == target
    assert proxy.client.post("/v1/trajectories/t/end").json()["target"] == "known"
    assert proxy.client.post("/v1/groups/t/close").json()["target"] == "unknown yet"


def test_a_target_is_known_as_soon_as_its_call_is_answered(proxy: RunningProxy) -> None:
    for _ in range(5):
        completion_id = proxy.chat().headers["x-completion-id"]
        posted = proxy.client.post("/v1/feedback", json={"completion_id": completion_id, "thumbs": "up"})
        assert posted.json()["target"] == "known"


def test_another_projects_target_takes_the_same_statements_as_one_that_nobody_has(
    proxy: RunningProxy, seeded: Seed
) -> None:
    """Else the time would show that it exists."""
    seeded.project("other")
    seeded.group("g", "other")
    seeded.trajectory("t", "g", "other")
    seeded.insert(schema.answer_ids, project="other", completion_id="t-0", id="call_theirsalone")
    store = Store(proxy.engine)
    statements: list[str] = []
    event.listen(proxy.engine, "before_cursor_execute", lambda *arguments: statements.append(arguments[2]))

    def looked_up(kind: str, target_id: str) -> list[str]:
        statements.clear()
        assert store.targets("default", [{"target_kind": kind, "target_id": target_id, "choice": 0}]) == [None]
        return list(statements)

    for kind, theirs in (("trajectory", "t"), ("group", "g"), ("completion", "t-0"), ("completion", "chatcmpl-t-0"),
                         ("completion", "call_theirsalone")):  # fmt: skip
        assert looked_up(kind, theirs) == looked_up(kind, "nothing")
        answers = [
            proxy.client.post("/v1/feedback", json={f"{kind}_id": one} | VALUES[kind]).json() for one in (theirs, "no")
        ]
        assert [posted["target"] for posted in answers] == ["unknown yet"] * 2


VALUES: dict[str, dict[str, Any]] = {
    "trajectory": {"reward": 1},
    "completion": {"reward": 1},
    "group": {"rewards": {"t": 1}},
}
"""By the kind of its target, what feedback says."""
