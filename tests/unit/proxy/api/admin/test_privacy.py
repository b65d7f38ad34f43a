"""Deleted over HTTP, while the proxy serves: what is in the tables, and what is still on its way there."""

import threading
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import msgspec

from migrations import schema
from proxy.domain.feedback import Feedback
from proxy.domain.feedback_rows import row_of
from proxy.recording.journal.codec import JournalledFeedback
from proxy.recording.journal.log import Journal
from tests.unit.proxy.conftest import FakeHandler, FakeVllm, RunningProxy, wait_for
from whetstone.config.privacy import pseudonym
from whetstone.config.settings import Settings


def test_a_trajectory_goes_with_all_that_was_said_of_it(proxy: RunningProxy) -> None:
    for name in ("t", "u"):
        proxy.chat({"X-Trajectory-Id": name})
        answer_body = {"trajectory_id": name, "reward": 1, "comment": "good"}
        assert proxy.client.post("/v1/feedback", json=answer_body).status_code == 202
    proxy.recorded(2)
    answer = proxy.client.delete("/admin/trajectories/t")
    assert answer.status_code == 200, answer.text
    answer_body = answer.json()
    assert (answer_body["object"], answer_body["kind"], answer_body["target"]) == ("erasure", "trajectory", "t")
    assert (answer_body["trajectories"], answer_body["completions"], answer_body["versions"]) == (1, 1, {})
    assert proxy.client.get("/v1/trajectories/t").status_code == 404
    assert proxy.client.get("/v1/trajectories/u").status_code == 200
    assert [row.target_id for row in proxy.rows(schema.feedback)] == ["u"]


def test_all_that_a_user_said_goes(proxy: RunningProxy) -> None:
    for user in ("alice/1", "bob"):
        proxy.chat(user=user)
    proxy.recorded(2)
    answer_body = proxy.client.delete("/admin/users/alice/1").json()
    assert (answer_body["kind"], answer_body["target"], answer_body["trajectories"]) == (
        "user",
        pseudonym("alice/1"),
        1,
    )
    assert [row.end_user for row in proxy.rows()] == ["bob"]


def test_what_a_step_has_goes_later(proxy: RunningProxy) -> None:
    proxy.chat({"X-Trajectory-Id": "t"})
    proxy.recorded()
    with proxy.engine.begin() as connection:
        connection.execute(schema.trajectories.update().values(state="claimed"))
    answer = proxy.client.delete("/admin/trajectories/t")
    assert (answer.status_code, answer.json()["waits_for"]) == (202, ["t"])
    assert proxy.client.get("/v1/trajectories/t").status_code == 200


def test_a_call_that_is_answered_while_its_user_is_deleted_leaves_nothing(
    proxy: RunningProxy, fake_vllm: FakeVllm
) -> None:
    deleted = threading.Event()

    def slow(handler: FakeHandler, body: dict[str, Any]) -> None:
        assert deleted.wait(60)
        handler.speak(body)

    fake_vllm.script = slow
    asking = threading.Thread(target=lambda: proxy.chat(user="alice"))
    asking.start()
    wait_for(lambda: fake_vllm.requests)
    assert proxy.client.delete("/admin/users/alice").json()["trajectories"] == 0
    deleted.set()
    asking.join()
    fake_vllm.script = FakeHandler.speak
    proxy.chat(user="bob")
    assert [row.end_user for row in proxy.recorded()] == ["bob"]
    # A call that comes after it is kept.
    proxy.chat(user="alice")
    assert {row.end_user for row in proxy.recorded(2)} == {"alice", "bob"}


def test_feedback_that_lay_in_the_journal_while_its_trajectory_was_deleted_is_left_out(
    settings: Settings, start: Callable[[Settings], RunningProxy]
) -> None:
    proxy = start(settings)
    for name in ("t", "u"):
        proxy.chat({"X-Trajectory-Id": name})
    proxy.recorded(2)
    rows = [
        row_of(Feedback(trajectory_id=name, reward=1.0, idempotency_key=key), "default", datetime.now(UTC))
        for name, key in (("t", None), ("t", "k"), ("u", None))
    ]
    assert proxy.client.delete("/admin/trajectories/t").json()["trajectories"] == 1
    journal = Journal(proxy.journal)
    journal.append(msgspec.json.encode(JournalledFeedback(rows[0]["id"], rows)))
    journal.close()
    later = start(settings)
    assert [row.target_id for row in wait_for(lambda: later.rows(schema.feedback))] == ["u"]
    wait_for(lambda: later.client.get("/readyz").json()["unwritten"] == 0)
    # What is said of it afterwards may be meant for another one of that name.
    answer_body = later.client.post("/v1/feedback", json={"trajectory_id": "t", "reward": 1}).json()
    assert later.client.get(f"/v1/feedback/{answer_body['id']}").json()["state"] == "waiting"
