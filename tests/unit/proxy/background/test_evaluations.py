"""Held-out prompts that nobody asks but the gate: drawn with the version that is meant, once, behind what apps ask."""

import json
import re
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sqlalchemy import update

from judge.settlement.sweep import sweep
from migrations import schema
from proxy.background.sampler import PRIORITY
from tests.unit.proxy.conftest import ANSWER_IDS, FakeHandler, FakeVllm, RunningProxy, settings_for, wait_for
from whetstone.config.rewards import RewardFunction, RewardSettings
from whetstone.config.settings import Settings

Start = Callable[[Settings], RunningProxy]
TOOLS = [{"type": "function", "function": {"name": "roll", "parameters": {"type": "object", "properties": {}}}}]
LEARNING = {"starter": RewardSettings(rewards=(RewardFunction(name="length", run="examples.rewards:length"),))}


def insert(proxy: RunningProxy, table: Any, **values: Any) -> None:
    with proxy.engine.begin() as connection:
        connection.execute(table.insert().values(project="default", **values))


def candidate(proxy: RunningProxy, fake: FakeVllm, *, served: bool = True) -> None:
    """Version 1, which vLLM has."""
    fake.adapters["starter@v1"] = "/adapters/starter@v1"
    insert(
        proxy, schema.policy_versions, id="starter@v1", policy="starter", version=1, parent=0, state="candidate",
        served=served, created_at=datetime.now(UTC), adapter_path="/adapters/starter@v1",
    )  # fmt: skip


def ask(proxy: RunningProxy, source_id: str, name: str = "e", version: int = 1) -> None:
    insert(
        proxy, schema.evaluations, trajectory_id=name, policy="starter", candidate=1, version=version,
        source_id=source_id, group_id="evaluation.g",
    )  # fmt: skip


def written_tokens(proxy: RunningProxy) -> float:
    match = re.search(r"^whetstone_recorded_tokens_total (\S+)$", proxy.client.get("/metrics").text, re.MULTILINE)
    assert match is not None
    return float(match[1])


def evaluation(proxy: RunningProxy, name: str = "e") -> Any:
    with proxy.engine.execution_options(isolation_level="AUTOCOMMIT").connect() as connection:
        e = schema.evaluations
        return connection.execute(e.select().where(e.c.trajectory_id == name)).one()


def source(proxy: RunningProxy, **values: Any) -> str:
    """The completion of a logged eval prompt."""
    headers = {"X-Trajectory-Id": "s", "X-Split": "eval", "X-Task": "dice", "X-Metadata": '{"answer": 6}'}
    assert proxy.chat(headers, **values).status_code == 200
    return str(proxy.recorded(1, trajectory_id="s")[0].id)


def test_a_prompt_is_answered_by_the_version_that_is_meant_as_it_was_asked(
    proxy: RunningProxy, fake_vllm: FakeVllm
) -> None:
    candidate(proxy, fake_vllm)
    sampling = {"temperature": 0.7, "max_tokens": 9, "tools": TOOLS, "user": "ada"}
    ask(proxy, source(proxy, stream=True, **sampling))
    (row,) = proxy.recorded(1, trajectory_id="e")
    body = fake_vllm.requests[-1]
    assert (body["model"], body["priority"], body.get("stream")) == ("starter@v1", PRIORITY, None)
    assert {name: body[name] for name in sampling} == sampling
    assert (row.policy_version, row.threaded_by, row.token_ids, row.tools) == (1, "evaluation", ANSWER_IDS, TOOLS)
    assert row.new_messages == [{"role": "user", "content": "hi"}]
    (trajectory,) = proxy.rows(schema.trajectories, id="e")
    assert (trajectory.split, trajectory.group_id, trajectory.task) == ("eval", "evaluation.g", "dice")
    assert (trajectory.metadata, trajectory.end_user) == ({"answer": 6}, "ada")
    (group,) = proxy.rows(schema.groups, id="evaluation.g")
    assert (group.formed_by, group.target_size) == ("evaluation", 2)
    wait_for(lambda: evaluation(proxy).drawn_at)


def test_both_answers_end_at_once_and_their_group_never_reaches_a_step(
    proxy: RunningProxy, fake_vllm: FakeVllm
) -> None:
    candidate(proxy, fake_vllm)
    source_id = source(proxy)
    for version in (0, 1):
        ask(proxy, source_id, f"e{version}", version)
    proxy.recorded(3)
    sweep(proxy.engine, proxy.settings.groups, datetime.now(UTC), LEARNING)
    drawn = proxy.rows(schema.trajectories, group_id="evaluation.g")
    assert {(one.first_version, one.state, one.why_not_trained) for one in drawn} == {
        (0, "ended", "split_eval"), (1, "ended", "split_eval"),
    }  # fmt: skip
    assert all(one.code_due_at is not None for one in drawn)  # reward functions are to look at them
    (group,) = proxy.rows(schema.groups, id="evaluation.g")
    assert (group.state, group.reason) == ("discarded", "split_eval")


def test_a_version_that_is_not_served_waits_until_it_is(proxy: RunningProxy, fake_vllm: FakeVllm) -> None:
    candidate(proxy, fake_vllm, served=False)
    source_id = source(proxy)
    ask(proxy, source_id)
    ask(proxy, source_id, "parent", 0)
    proxy.recorded(1, trajectory_id="parent")
    assert proxy.rows(trajectory_id="e") == []
    fake_vllm.adapters["starter@v1"] = "/adapters/starter@v1"
    with proxy.engine.begin() as connection:
        connection.execute(update(schema.policy_versions).values(served=True))
    proxy.recorded(1, trajectory_id="e")


def test_a_prompt_that_vllm_refuses_is_given_up_and_the_others_are_answered(
    proxy: RunningProxy, fake_vllm: FakeVllm
) -> None:
    candidate(proxy, fake_vllm)
    source_id = source(proxy)

    def refuse(handler: FakeHandler, body: dict[str, Any]) -> None:
        if body["model"] == "starter@v1":
            handler.whole(400, json.dumps({"error": {"message": "too long for me"}}).encode())
        else:
            handler.speak(body)

    fake_vllm.script = refuse
    ask(proxy, source_id)
    ask(proxy, source_id, "parent", 0)
    proxy.recorded(1, trajectory_id="parent")
    assert "too long for me" in wait_for(lambda: evaluation(proxy).error)
    assert evaluation(proxy).drawn_at is None


def test_a_prompt_that_vllm_stumbles_over_is_given_up_after_three_tries(
    proxy: RunningProxy, fake_vllm: FakeVllm
) -> None:
    candidate(proxy, fake_vllm)
    source_id = source(proxy)
    tries = []

    def stumble(handler: FakeHandler, body: dict[str, Any]) -> None:
        if body["model"] == "starter@v1":
            tries.append(body)
            handler.whole(500, b"no idea what went wrong")
        else:
            handler.speak(body)

    fake_vllm.script = stumble
    ask(proxy, source_id)
    ask(proxy, source_id, "parent", 0)
    proxy.recorded(1, trajectory_id="parent")
    assert wait_for(lambda: evaluation(proxy).error).startswith("given up after 3 tries: ")
    assert len(tries) == 3


def test_priority_is_given_up_only_where_the_server_refuses_that_and_by_every_draw_for_itself(
    proxy: RunningProxy, fake_vllm: FakeVllm
) -> None:
    candidate(proxy, fake_vllm)
    source_id = source(proxy)
    at_once = threading.Barrier(4)
    first_come_first = threading.Event()

    def refuse(handler: FakeHandler, body: dict[str, Any]) -> None:
        if body.get("seed") == 13:
            handler.whole(400, b'{"error": {"message": "too long for me"}}')
        elif "priority" in body and first_come_first.is_set():
            at_once.wait(30)
            handler.whole(400, b'{"error": {"message": "priority scheduling is not enabled"}}')
        else:
            handler.speak(body)

    assert proxy.chat({"X-Trajectory-Id": "odd", "X-Split": "eval"}, seed=13).status_code == 200
    fake_vllm.script = refuse
    ask(proxy, str(proxy.recorded(1, trajectory_id="odd")[0].id), "honest")
    assert "too long for me" in wait_for(lambda: evaluation(proxy, "honest").error)
    ask(proxy, source_id, "after")
    wait_for(lambda: evaluation(proxy, "after").drawn_at)
    assert fake_vllm.requests[-1]["priority"] == PRIORITY
    first_come_first.set()
    with proxy.engine.begin() as connection:
        row = {"project": "default", "policy": "starter", "candidate": 1, "version": 1, "source_id": source_id}
        rows = [{**row, "trajectory_id": f"e{number}", "group_id": f"evaluation.{number}"} for number in range(4)]
        connection.execute(schema.evaluations.insert(), rows)
    wait_for(lambda: all(evaluation(proxy, f"e{number}").drawn_at for number in range(4)))


def test_two_proxies_that_draw_the_same_one_leave_one_answer(
    proxy: RunningProxy, fake_vllm: FakeVllm, start: Start, settings: Settings
) -> None:
    other = start(settings.model_copy(update={"data": settings.data / "other"}))
    candidate(proxy, fake_vllm)
    source_id = source(proxy)

    both_requested = threading.Barrier(2)

    def both_at_once(handler: FakeHandler, body: dict[str, Any]) -> None:
        both_requested.wait(30)
        handler.speak(body)

    fake_vllm.script = both_at_once
    ask(proxy, source_id)
    wait_for(lambda: written_tokens(proxy) == 2 * len(ANSWER_IDS) and written_tokens(other) == len(ANSWER_IDS))
    assert evaluation(proxy).drawn_at is not None
    assert [row.turn for row in proxy.rows(trajectory_id="e")] == [0]


def test_a_test_that_is_over_draws_nothing_more(
    sqlite_url: str, fake_vllm: FakeVllm, tmp_path: Path, start: Start
) -> None:
    proxy = start(settings_for(sqlite_url, fake_vllm.url, tmp_path))
    candidate(proxy, fake_vllm)
    source_id = source(proxy)
    insert(
        proxy, schema.evaluations, trajectory_id="over", policy="starter", candidate=1, version=1, source_id=source_id,
        group_id="evaluation.g", error="the test was over",
    )  # fmt: skip
    ask(proxy, source_id)
    wait_for(lambda: evaluation(proxy).drawn_at)
    proxy.recorded(1, trajectory_id="e")
    assert proxy.rows(trajectory_id="over") == []
