"""The proxy as it runs: its other routes, and what it does when disk or database fail."""

import asyncio
import os
import signal
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import text

from migrations import schema
from proxy.app import Proxy
from proxy.recording.journal.segment import STEP_BYTES
from tests.unit.proxy.conftest import (
    ANSWER_IDS,
    LOGPROBS,
    STREAM,
    FakeHandler,
    FakeVllm,
    RunningProxy,
    events,
    own_process,
    settings_for,
    wait_for,
)
from whetstone.config.settings import Settings

JSON = {"Content-Type": "application/json"}

# --- the other routes


def test_models_are_the_policies_and_their_served_versions(proxy: RunningProxy) -> None:
    models = proxy.client.get("/v1/models").json()
    assert models["object"] == "list"
    assert [model["id"] for model in models["data"]] == ["starter", "starter@v0"]


def test_a_version_that_goes_live_speaks_next_and_the_old_one_can_be_named(
    proxy: RunningProxy, fake_vllm: FakeVllm
) -> None:
    proxy.chat({"X-Trajectory-Id": "t"})
    proxy.recorded()
    fake_vllm.adapters["starter@v1"] = "/adapters/starter@v1"
    version = {"project": "default", "policy": "starter", "state": "live", "served": True}
    row = proxy.rows(schema.policies)[0]
    with proxy.engine.begin() as connection:
        values = version | {"id": "starter@v1", "version": 1, "created_at": row.created_at}
        connection.execute(schema.policy_versions.insert().values(**values))
        connection.execute(schema.policies.update().values(live_version=1))
    wait_for(lambda: proxy.chat().headers["x-policy-version"] == "1")
    named = proxy.chat({"X-Trajectory-Id": "t"}, model="starter@v0")
    assert (named.headers["x-policy-version"], named.json()["model"]) == ("0", "starter@v0")
    wait_for(lambda: {row.policy_version for row in proxy.rows()} == {0, 1})
    (trajectory,) = proxy.rows(schema.trajectories, id="t")
    assert trajectory.first_version == 0


def test_feedback_is_committed_when_it_is_acknowledged(proxy: RunningProxy) -> None:
    proxy.chat({"X-Trajectory-Id": "t"})
    response = proxy.client.post("/v1/feedback", json={"trajectory_id": "t", "reward": 0.5, "comment": "a\x00b"})
    assert response.status_code == 202
    (row,) = proxy.rows(schema.feedback)
    assert (row.id, row.reward, row.state) == (response.json()["id"], 0.5, "waiting")
    assert proxy.client.get(f"/v1/feedback/{row.id}").json()["state"] == "waiting"
    assert proxy.client.get("/v1/trajectories/t").json()["state"] == "open"


def test_a_batch_of_feedback_is_answered_item_by_item(proxy: RunningProxy) -> None:
    proxy.chat({"X-Trajectory-Id": "t", "X-Group-Id": "g"})
    body = [{"trajectory_id": "t", "thumbs": "up"}, {"group_id": "g", "rewards": {"t": 1}}]
    results = proxy.client.post("/v1/feedback", json=body).json()
    assert [result["id"] for result in results] == [row.id for row in proxy.rows(schema.feedback)]
    group = proxy.client.get("/v1/groups/g").json()
    assert [member["id"] for member in group["members"]] == ["t"]


def test_feedback_with_the_same_key_is_one_feedback(proxy: RunningProxy) -> None:
    body = {"trajectory_id": "t", "reward": 1, "idempotency_key": "k"}
    first, second = (proxy.client.post("/v1/feedback", json=body).json()["id"] for _ in range(2))
    assert first == second
    assert len(proxy.rows(schema.feedback)) == 1


@pytest.mark.parametrize("reward", [b"NaN", b"Infinity", b'"1"', b"null"])
def test_a_reward_that_is_no_number_is_400_and_nothing_is_stored(door: RunningProxy, reward: bytes) -> None:
    response = door.client.post("/v1/feedback", content=b'{"trajectory_id": "t", "reward": %s}' % reward)
    assert response.status_code == 400
    assert door.rows(schema.feedback) == []


def test_readiness_tells_what_is_missing(plain_proxy: RunningProxy, fake_vllm: FakeVllm) -> None:
    ready = plain_proxy.client.get("/readyz")
    servers = {fake_vllm.url: {"state": "serving", "reason": None}}
    others = {"database": True, "database_away_since": None, "unwritten": 0, "journal_bytes": 0, "dropped": 0}
    others |= {"journal_full": False}
    others |= {"waiting": 0, "paused": False, "writer": True, "failing": {}}
    assert (ready.status_code, ready.json()) == (200, {"status": "ok", "vllm": True, "replicas": servers, **others})
    fake_vllm.well = False
    wait_for(lambda: plain_proxy.client.get("/readyz").status_code == 503)
    servers[fake_vllm.url] = {"state": "away", "reason": "its health check answers 503"}
    unavailable = {"status": "unavailable", "vllm": False, "replicas": servers, **others}
    assert plain_proxy.client.get("/readyz").json() == unavailable


def test_health_answers_as_vllm_does(plain_proxy: RunningProxy, fake_vllm: FakeVllm) -> None:
    well = plain_proxy.client.get("/health")
    assert (well.status_code, well.content) == (200, b"")
    fake_vllm.well = False
    wait_for(lambda: plain_proxy.client.get("/health").status_code == 503)
    assert plain_proxy.client.get("/health").content == b""


# --- disk and database fail


def test_while_the_database_is_away_apps_are_answered_and_what_they_say_catches_up(plain_proxy: RunningProxy) -> None:
    reward = {"trajectory_id": "t", "reward": 1, "idempotency_key": "k"}
    assert plain_proxy.chat().status_code == 200
    plain_proxy.recorded()
    with plain_proxy.engine.begin() as connection:
        for table in ("trajectories", "feedback"):
            connection.execute(text(f"ALTER TABLE {table} RENAME TO {table}_away"))
    assert plain_proxy.chat().status_code == 200
    taken = plain_proxy.client.post("/v1/feedback", json=reward)
    assert (taken.status_code, taken.json()["state"]) == (202, "waiting")
    ready = plain_proxy.client.get("/readyz")
    told = ready.json()
    assert (ready.status_code, told["database"], told["unwritten"]) == (200, False, 2)
    assert told["journal_bytes"] > 0 and told["database_away_since"] is not None
    assert "whetstone_dropped_calls_total 0.0" in plain_proxy.client.get("/metrics").text
    withdrawn = plain_proxy.client.delete(f"/v1/feedback/{taken.json()['id']}")
    assert (withdrawn.status_code, withdrawn.json()["error"]["code"]) == (503, "not_recorded")
    assert "retry-after" in withdrawn.headers
    read = plain_proxy.client.get("/v1/feedback/x")
    assert (read.status_code, read.json()["error"]["code"]) == (503, "database_away")
    with plain_proxy.engine.begin() as connection:
        for table in ("trajectories", "feedback"):
            connection.execute(text(f"ALTER TABLE {table}_away RENAME TO {table}"))
    assert len(plain_proxy.recorded(2)) == 2
    (row,) = wait_for(lambda: plain_proxy.rows(schema.feedback))
    assert row.id == taken.json()["id"] == plain_proxy.client.post("/v1/feedback", json=reward).json()["id"]
    assert len(plain_proxy.rows(schema.feedback)) == 1
    wait_for(lambda: plain_proxy.client.get("/readyz").json()["database"])


# A file may grow to this size and no further, until SIGUSR1: a full disk for the journal, not for the database.
LIMITED = """
import resource, signal
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
signal.signal(signal.SIGUSR2, lambda *_: resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard)))
signal.signal(signal.SIGUSR1, lambda *_: resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard)))
"""


@pytest.mark.parametrize("stream", [False, True])
def test_a_journal_that_cannot_be_written_is_503_and_works_again(
    sqlite_url: str, tmp_path: Path, fake_vllm: FakeVllm, stream: bool
) -> None:
    settings, environment = limited(sqlite_url, tmp_path, fake_vllm)
    body = STREAM | {"stream": stream}
    with (
        own_process(settings, **environment) as (url, process),
        httpx.Client(base_url=url, trust_env=False, verify=False) as app,
    ):
        process.send_signal(signal.SIGUSR2)
        # Too long for what the journal has reserved.
        long = STREAM | {"stream": False, "messages": [{"role": "user", "content": "x" * 2 * STEP_BYTES}]}
        wait_for(lambda: app.post("/v1/chat/completions", json=long).status_code == 503)
        asked = len(fake_vllm.requests)
        refused = app.post("/v1/chat/completions", json=body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "not_recorded")
        assert "retry-after" in refused.headers
        assert len(fake_vllm.requests) == asked, "it is known to be full: nobody is to work for what is refused"
        process.send_signal(signal.SIGUSR1)
        wait_for(
            lambda: (
                app.post("/v1/chat/completions", json=body | {"user": "after"}).content.endswith(b"\n\n")
                if stream
                else app.post("/v1/chat/completions", json=body | {"user": "after"}).is_success
            )
        )
        assert app.get("/readyz").json()["status"] == "ok"


def test_a_stream_that_began_before_the_disk_was_full_ends_in_an_error(
    sqlite_url: str, tmp_path: Path, fake_vllm: FakeVllm
) -> None:
    settings, environment = limited(sqlite_url, tmp_path, fake_vllm)
    go_on = threading.Event()

    def slow(handler: FakeHandler, _body: dict[str, Any]) -> None:
        first, *others = events()
        handler.begin()
        handler.say(first)
        go_on.wait(60)
        for event in others:
            handler.say(event)
        handler.end()

    fake_vllm.script = slow
    with (
        own_process(settings, **environment) as (url, process),
        httpx.Client(base_url=url, trust_env=False, verify=False) as app,
        app.stream("POST", "/v1/chat/completions", json=STREAM) as answer,
    ):
        chunks = answer.iter_bytes()
        said = next(chunks)
        process.send_signal(signal.SIGUSR2)
        fill(app)
        go_on.set()
        said += b"".join(chunks)
    assert b"[DONE]" not in said
    assert b'"code":"not_recorded"' in said


@pytest.mark.parametrize("stream", [False, True])
def test_unrecorded_answers_are_served_where_that_is_wanted_and_say_so(
    sqlite_url: str, tmp_path: Path, fake_vllm: FakeVllm, stream: bool
) -> None:
    settings, environment = limited(sqlite_url, tmp_path, fake_vllm, when_full="unrecorded")
    body = STREAM | {"stream": stream}
    with (
        own_process(settings, **environment) as (url, process),
        httpx.Client(base_url=url, trust_env=False, verify=False) as app,
    ):
        kept = app.post("/v1/chat/completions", json=body)
        assert kept.is_success and "x-whetstone-recorded" not in kept.headers
        process.send_signal(signal.SIGUSR2)
        fill(app)
        before = app.get("/readyz").json()["dropped"]
        answer = app.post("/v1/chat/completions", json=body)
        assert answer.is_success
        assert app.get("/readyz").json()["dropped"] == before + 1
        # A stream's headers are out before anybody knows.
        assert stream or answer.headers["x-whetstone-recorded"] == "false"
        assert not stream or answer.content.endswith(b"data: [DONE]\n\n")


def fill(app: httpx.Client) -> None:
    """Have the journal take feedback until it has no room for any: large ones first, what it has reserved is 1 MiB."""
    for size in (2**17, 2**13, 2**9, 0):
        said = {"trajectory_id": "t", "reward": 1, "metadata": {"x": "y" * size}}
        wait_for(lambda said=said: app.post("/v1/feedback", json=said).status_code == 503)


def limited(sqlite_url: str, tmp_path: Path, fake_vllm: FakeVllm, **proxy: Any) -> tuple[Settings, dict[str, str]]:
    """Settings and environment of a proxy whose disk is full from SIGUSR2 to SIGUSR1."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(LIMITED)
    settings = settings_for(sqlite_url, fake_vllm.url, tmp_path, proxy={"max_wait_s": 0.2, **proxy})
    return settings, {"PYTHONPATH": os.pathsep.join([str(tmp_path / "site"), str(Path.cwd())])}


def test_what_was_answered_survives_kill_9_before_it_is_in_sql(
    database_url: str, tmp_path: Path, fake_vllm: FakeVllm, start: Callable[[Settings], RunningProxy]
) -> None:
    """The database is locked against the writer: the calls are in the journal alone when the process dies."""
    from whetstone.database.engine import connect

    settings = settings_for(database_url, fake_vllm.url, tmp_path)
    engine = connect(database_url)
    lock = "LOCK TABLE trajectories IN EXCLUSIVE MODE" if engine.dialect.name == "postgresql" else "SELECT 1"
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    with own_process(settings) as (url, process), httpx.Client(base_url=url, trust_env=False, verify=False) as app:
        with engine.begin() as connection:
            connection.execute(text(lock))
            for turn in range(3):
                body = STREAM | {"stream": turn == 1, "tools": tools, "user": f"turn {turn}"}
                headers = {"X-Trajectory-Id": "t", "X-Metadata": '{"a": [1.5]}'}
                assert app.post("/v1/chat/completions", json=body, headers=headers).is_success
            process.kill()
            process.wait()
        with engine.connect() as connection:
            assert connection.execute(schema.completions.select()).all() == []
    engine.dispose()
    proxy = start(settings)
    rows = proxy.recorded(3)
    assert [row.end_user for row in sorted(rows, key=lambda row: row.turn)] == ["turn 0", "turn 1", "turn 2"]
    for row in rows:
        assert (row.status, row.token_ids, row.inference_logprobs) == ("complete", ANSWER_IDS, LOGPROBS)
        assert row.tools == tools
    assert proxy.rows(schema.trajectories)[0].metadata == {"a": [1.5]}
    wait_for(lambda: proxy.client.get("/readyz").json()["unwritten"] == 0)


def test_a_start_without_the_database_says_what_to_do(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'nowhere' / 'whetstone.db'}"
    settings = Settings(data=tmp_path, database=url, broker="memory://", vllm={"urls": "http://127.0.0.1:1"})
    sent: list[dict[str, Any]] = []

    async def main() -> None:
        async def receive() -> dict[str, Any]:
            return {"type": "lifespan.startup"}

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        await Proxy(settings)({"type": "lifespan"}, receive, send)

    asyncio.run(main())
    assert [message["type"] for message in sent] == ["lifespan.startup.failed"]
    assert "start it first" in sent[0]["message"] and "unable to open database file" in sent[0]["message"]


def test_a_journal_that_cannot_be_made_stops_the_start(sqlite_url: str, tmp_path: Path, fake_vllm: FakeVllm) -> None:
    (tmp_path / "journal").touch()
    with own_process(settings_for(sqlite_url, fake_vllm.url, tmp_path)) as (_, process):
        assert process.wait(timeout=20) != 0


def test_the_journal_is_for_its_owner_alone(plain_proxy: RunningProxy) -> None:
    plain_proxy.chat()
    (segment,) = plain_proxy.journal.glob("*.journal")
    assert stat.S_IMODE(segment.stat().st_mode) == 0o600


def test_many_at_once_are_all_answered_and_recorded_once(proxy: RunningProxy) -> None:
    ids: list[str] = []

    def talk(number: int) -> None:
        ids.extend(proxy.chat({"X-Trajectory-Id": f"t{number}"}).headers["x-completion-id"] for _ in range(5))

    threads = [threading.Thread(target=talk, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rows = proxy.recorded(40)
    assert sorted(row.id for row in rows) == sorted(ids)
    assert sorted((row.trajectory_id, row.turn) for row in rows) == [(f"t{n}", k) for n in range(8) for k in range(5)]
