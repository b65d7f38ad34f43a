"""Steps that an admin asks for: what is taken, what is refused and why."""

from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest
from sqlalchemy import update

from migrations import schema
from proxy.api.bodies import DEFAULT_LIMIT, MAX_LIMIT, StepAsked, read_step
from proxy.errors import BadRequest, NotJson
from tests.conftest import Seed
from tests.unit.proxy.conftest import FakeVllm, RunningProxy, settings_for
from whetstone.transfer.importing.store import prepare

STEP = "/admin/policies/starter/step"
POLICIES = ("starter", "teacher")
SFT: dict[str, Any] = {"kind": "sft", "from": "best"}


def read(**body: Any) -> dict[str, Any]:
    return read_step(msgspec.json.encode(body), "starter", POLICIES, ["large"])


def policy(proxy: RunningProxy, **values: Any) -> Any:
    """The policy's row; first with these values."""
    p = schema.policies
    if values:
        with proxy.engine.begin() as connection:
            connection.execute(update(p).where(p.c.id == "starter").values(**values))
    (row,) = proxy.rows(p, id="starter")
    return row


def refused(proxy: RunningProxy, status: int, path: str = STEP, **body: Any) -> str:
    response = proxy.client.post(path, json=body or None)
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "code", "param"} and error["type"] == "invalid_request_error"
    return str(error["message"])


def test_without_a_body_it_is_a_step_on_the_groups_that_are_there(proxy: RunningProxy) -> None:
    before = datetime.now(UTC)
    response = proxy.client.post(STEP)
    assert response.status_code == 202, response.text
    answer = response.json()
    assert (answer["object"], answer["policy"], answer["kind"]) == ("step", "starter", "grpo")
    asked_at = datetime.fromisoformat(answer["asked_at"])
    assert before <= asked_at <= datetime.now(UTC)
    row = policy(proxy)
    assert (row.step_asked, row.step_asked_at) == ({"kind": "grpo"}, asked_at)


def test_a_supervised_step_says_what_it_imitates(proxy: RunningProxy) -> None:
    assert proxy.client.post(STEP, json=SFT | {"min_reward": 0.5, "limit": 8}).status_code == 202
    assert policy(proxy).step_asked == SFT | {"min_reward": 0.5, "limit": 8}


def test_what_is_left_out_is_filled_in() -> None:
    assert read(**SFT) == SFT | {"min_reward": None, "limit": DEFAULT_LIMIT}
    assert read(kind="sft", **{"from": "teacher"})["from"] == "teacher"
    for source in ("comments", "judge", "tools", "replies"):
        words = {"kind": "hindsight", "from": source}
        assert read(**words) == words | {"min_reward": None, "limit": DEFAULT_LIMIT}
    scores = {"kind": "distill", "from": "large"}
    assert read(**scores) == scores | {"min_reward": None, "limit": DEFAULT_LIMIT}
    assert read() == read_step(b" \n", "starter", POLICIES) == {"kind": "grpo"}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"kind": "ppo"}, "kind"),
        ({"steps": 2}, "unknown field `steps`; fields are kind, from, min_reward, limit"),
        ({"from": "best"}, 'from goes with "kind": "sft"'),
        ({"limit": 3}, 'limit goes with "kind": "sft"'),
        ({"min_reward": 0.0}, 'min_reward goes with "kind": "sft"'),
        ({"kind": "sft"}, r"from must be demonstrations, best, or another policy's name \(teacher\), not nothing"),
        ({"kind": "sft", "from": "nobody"}, "not 'nobody'"),
        ({"kind": "sft", "from": "starter"}, 'a policy\'s own answers are "from": "best"'),
        ({"kind": "sft", "from": "demonstrations", "min_reward": 1.0}, "demonstrations have no reward"),
        ({"kind": "hindsight"}, "a hindsight step learns from one of comments, demonstrations, judge, tools, replies"),
        ({"kind": "hindsight", "from": "best"}, "a hindsight step learns from one of"),
        ({"kind": "hindsight", "from": "comments", "min_reward": 1.0}, "min_reward goes with sft"),
        ({"kind": "distill"}, r"from must be a teacher's name \("),
        ({"kind": "distill", "from": "teacher"}, r"from must be a teacher's name \("),
        ({"kind": "prefer"}, r"from must be another policy's name \(teacher\)"),
        ({"kind": "prefer", "from": "starter"}, r"from must be another policy's name"),
        ({"kind": "prefer", "from": "teacher", "min_reward": 1.0}, "min_reward goes with sft; a pair is"),
        (SFT | {"limit": 0}, "limit"),
        (SFT | {"limit": MAX_LIMIT + 1}, "limit"),
        (SFT | {"limit": "many"}, "limit"),
        (SFT | {"min_reward": "high"}, "min_reward"),
    ],
)
def test_a_step_that_cannot_be_meant_is_refused(door: RunningProxy, body: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        read(**body)
    refused(door, 400, **body)
    assert policy(door).step_asked is None


def test_a_teacher_must_be_in_the_settings() -> None:
    body = msgspec.json.encode({"kind": "distill", "from": "large"})
    with pytest.raises(BadRequest, match=r"there is none: add \[teachers.NAME\] to the settings"):
        read_step(body, "starter", POLICIES)
    with pytest.raises(BadRequest, match="min_reward goes with sft; a distill step"):
        read(**{"kind": "distill", "from": "large", "min_reward": 1.0})


@pytest.mark.parametrize("body", [b"{", b"\xff", b"[" * 100_000, b'{"kind": "sft", "from": "best", "min_reward": NaN}'])
def test_what_is_no_json_is_refused(door: RunningProxy, body: bytes) -> None:
    with pytest.raises((NotJson, BadRequest)):
        read_step(body, "starter", POLICIES)
    assert door.client.post(STEP, content=body).status_code == 400
    assert policy(door).step_asked is None


def test_a_least_reward_is_a_number_that_rewards_can_reach() -> None:
    for number in (b"1e999", b"-1e999"):
        with pytest.raises(BadRequest, match="min_reward"):
            read_step(b'{"kind": "sft", "from": "best", "min_reward": ' + number + b"}", "starter", POLICIES)


@pytest.mark.parametrize("name", ["nobody", "starter@v0", "x" * 5000, "%00", "a b"])
def test_an_unknown_policy_is_told_which_there_are(door: RunningProxy, name: str) -> None:
    message = refused(door, 404, f"/admin/policies/{name}/step")
    assert message.endswith("there are: starter") and len(message) < 400


def test_nothing_else_is_under_admin(door: RunningProxy) -> None:
    for path in ("/admin/policies/starter", "/admin"):
        assert door.client.post(path).status_code == 404
    assert door.client.get(STEP).status_code == 405


def test_two_steps_are_not_asked_for_at_once(proxy: RunningProxy) -> None:
    assert proxy.client.post(STEP).status_code == 202
    asked = policy(proxy)
    assert "asked for already, since 20" in refused(proxy, 409, **SFT)
    assert policy(proxy) == asked


def test_a_paused_policy_takes_no_step_by_hand(proxy: RunningProxy) -> None:
    policy(proxy, state="paused")
    assert "starter is paused; let it record or train first" in refused(proxy, 409)
    policy(proxy, state="recording")
    assert proxy.client.post(STEP).status_code == 202


def test_while_a_step_runs_no_other_is_asked_for(proxy: RunningProxy) -> None:
    seed, now = Seed(proxy.engine), datetime.now(UTC)
    step = {"project": "default", "policy": "starter", "version_in": 0, "groups": 1, "trajectories": 2, "config": {},
            "attempt": 1, "created_at": now}  # fmt: skip
    seed.insert(schema.steps, id="starter#1", number=1, state="promoted", lease_until=None, **step)
    seed.insert(schema.steps, id="starter#2", number=2, state="trained", lease_until=now + timedelta(minutes=9), **step)
    assert "step 2 of starter is running" in refused(proxy, 409)
    with proxy.engine.begin() as connection:
        connection.execute(update(schema.steps).where(schema.steps.c.number == 2).values(lease_until=now))
    assert proxy.client.post(STEP).status_code == 202  # its worker went silent


def test_while_a_candidate_is_tested_no_step_is_asked_for(proxy: RunningProxy) -> None:
    Seed(proxy.engine).insert(
        schema.steps, project="default", id="starter#1", policy="starter", number=1, state="waiting_gate", version_in=0,
        groups=1, trajectories=2, config={}, attempt=1, created_at=datetime.now(UTC),
    )  # fmt: skip
    assert "step 1 of starter waits for the tests of its candidate" in refused(proxy, 409)


def test_what_another_server_answers_cannot_train(
    sqlite_url: str, fake_vllm: FakeVllm, tmp_path: Any, start: Any
) -> None:
    upstreams = {"far": {"url": fake_vllm.url + "/v1", "models": {"teacher": "large"}}}
    proxy = start(settings_for(sqlite_url, fake_vllm.url, tmp_path, upstreams=upstreams))
    assert "teacher is answered by far" in refused(proxy, 409, "/admin/policies/teacher/step")
    assert proxy.client.post(STEP, json={"kind": "sft", "from": "teacher"}).status_code == 202


def test_a_step_may_learn_from_an_imported_log_that_no_app_can_ask_for(proxy: RunningProxy) -> None:
    with proxy.engine.begin() as connection:
        prepare(connection, "default", "elsewhere", datetime.now(UTC))
    asked = {"model": "elsewhere", "messages": [{"role": "user", "content": "hi"}]}
    assert proxy.client.post("/v1/chat/completions", json=asked).status_code == 404
    assert proxy.client.post("/admin/policies/elsewhere/step").status_code == 404
    assert proxy.client.post(STEP, json=SFT | {"from": "elsewhere"}).status_code == 202
    assert policy(proxy).step_asked["from"] == "elsewhere"


def test_a_page_of_another_origin_asks_for_no_step(plain_proxy: RunningProxy) -> None:
    assert plain_proxy.client.post(STEP, headers={"Origin": "https://evil.example"}).status_code == 403
    assert plain_proxy.client.post(STEP, headers={"Host": "evil.example"}).status_code == 403
    assert policy(plain_proxy).step_asked is None


def test_the_document_tells_every_field_of_a_step(door: RunningProxy) -> None:
    answer = door.client.get("/openapi.json").json()["paths"]["/admin/policies/{policy}/step"]["post"]
    schema_of_body = answer["requestBody"]["content"]["application/json"]["schema"]
    assert not answer["requestBody"]["required"]
    assert schema_of_body["properties"].keys() == set(StepAsked.__struct_encode_fields__)
    assert schema_of_body["additionalProperties"] is False
    assert "202" in answer["responses"] and "422" not in answer["responses"]
