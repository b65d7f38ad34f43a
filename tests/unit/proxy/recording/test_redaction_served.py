"""Through the proxy: the app and the model get everything, what is kept of it has nothing private in it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from migrations import schema
from tests.unit.proxy.conftest import (
    ANSWER_IDS,
    PROMPT_IDS,
    FakeHandler,
    FakeVllm,
    RunningProxy,
    answer,
    chunk,
    settings_for,
)
from whetstone.config.settings import Settings

MAIL, OTHER = "alice@example.com", "bob@example.com"


def private(database_url: str, fake_vllm: FakeVllm, data: Path, **values: Any) -> Settings:
    privacy = {"redact": ["email"]} | values
    return settings_for(database_url, fake_vllm.url, data, projects={"default": {"privacy": privacy}})


@pytest.fixture
def settings(database_url: str, fake_vllm: FakeVllm, tmp_path: Path) -> Settings:
    return private(database_url, fake_vllm, tmp_path)


def tells(text: str) -> Callable[[FakeHandler, dict[str, Any]], None]:
    """A model that says this, with ids that grow with the conversation."""

    def speak(handler: FakeHandler, body: dict[str, Any]) -> None:
        chat_answer = answer(body.get("n", 1))
        turn = sum(message["role"] == "assistant" for message in body["messages"])
        chat_answer["prompt_token_ids"] = [*PROMPT_IDS, *[*ANSWER_IDS, 4] * turn]
        for choice in chat_answer["choices"]:
            choice["message"]["content"] = text
        handler.whole(200, chat_answer)

    return speak


def streams(handler: FakeHandler, body: dict[str, Any]) -> None:
    handler.begin()
    for piece in (MAIL[:5], MAIL[5:]):
        handler.say(chunk({"content": piece}, token_ids=[7]))
    handler.say(chunk({"content": ""}, finish_reason="stop"))
    handler.say(b"data: [DONE]\n\n")
    handler.end()


def everything(proxy: RunningProxy) -> str:
    """Every column of every row, and every file in the journal's folder."""
    cells: list[str] = []
    with proxy.engine.connect() as connection:
        for table in schema.metadata.sorted_tables:
            for row in connection.execute(select(table)):
                cells += [one.decode("latin-1") if isinstance(one, bytes) else repr(one) for one in row]
    files = [path.read_bytes().decode("latin-1") for path in proxy.journal.iterdir()]
    assert cells
    return "\n".join((*cells, *files))


def test_what_was_private_is_in_no_column_and_no_file(proxy: RunningProxy, fake_vllm: FakeVllm) -> None:
    fake_vllm.script = tells(f"write to {OTHER}")
    body = {
        "messages": [{"role": "user", "content": f"I am {MAIL}"}], "user": MAIL, "metadata": {"from": MAIL},
        "tools": [{"type": "function", "function": {"name": "f", "description": f"asks {MAIL}"}}],
    }  # fmt: skip
    got = proxy.chat({"Idempotency-Key": "k"}, **body)
    assert got.json()["choices"][0]["message"]["content"] == f"write to {OTHER}"
    assert fake_vllm.requests[-1]["messages"] == body["messages"]
    feedback_body = {"trajectory_id": got.headers["x-trajectory-id"], "reward": 1, "comment": f"for {MAIL}"}
    assert proxy.client.post("/v1/feedback", json=feedback_body).status_code == 202
    (row,) = proxy.recorded()
    assert row.response_text == "write to [email]"
    assert row.redactions == 7  # user and metadata stand twice in what is kept
    assert row.why_not_trained == "redacted"
    assert (row.prompt_token_ids, row.token_ids, row.inference_logprobs, row.reply) == (None,) * 4
    assert (row.prompt_tokens, row.completion_tokens) == (3, 3)
    stored_text = everything(proxy)
    assert MAIL not in stored_text
    assert OTHER not in stored_text
    assert "[email]" in stored_text


def test_a_stream_reaches_the_app_as_it_came_and_the_tables_without(proxy: RunningProxy, fake_vllm: FakeVllm) -> None:
    fake_vllm.script = streams
    body = proxy.chat(stream=True).text
    chat_answer = [json.loads(line[6:]) for line in body.splitlines() if line.startswith("data: {")]
    assert "".join(one["choices"][0]["delta"]["content"] for one in chat_answer) == MAIL
    (row,) = proxy.recorded()
    assert row.response_text == "[email]"
    assert MAIL not in everything(proxy)


def test_a_call_without_anything_private_trains_as_before(proxy: RunningProxy) -> None:
    proxy.chat({"Idempotency-Key": "k"})
    (row,) = proxy.recorded()
    assert (row.redactions, row.why_not_trained, row.token_ids) == (0, None, ANSWER_IDS)
    assert row.reply is not None


def test_where_nothing_is_asked_for_nobody_looks(plain_proxy: RunningProxy) -> None:
    plain_proxy.chat(messages=[{"role": "user", "content": MAIL}])
    (row,) = plain_proxy.recorded()
    assert (row.redactions, row.new_messages[0]["content"]) == (None, MAIL)


def converse(proxy: RunningProxy, fake_vllm: FakeVllm) -> list[Any]:
    """Three turns, of which the second says something private, and the third has it in its history."""
    fake_vllm.script = tells("Hello")
    messages: list[dict[str, str]] = []
    for turn, text in enumerate(("hi", f"I am {MAIL}", "bye")):
        messages.append({"role": "user", "content": text})
        proxy.chat(messages=messages)
        rows = proxy.recorded(turn + 1)
        messages.append({"role": "assistant", "content": "Hello"})
    assert len({row.trajectory_id for row in rows}) == 1, "threaded by what was said, not by what was kept"
    return rows


def test_a_conversation_is_whole_again_from_its_first_private_turn_on(proxy: RunningProxy, fake_vllm: FakeVllm) -> None:
    first, second, third = converse(proxy, fake_vllm)
    assert (first.why_not_trained, first.redactions) == (None, 0)
    assert (second.follows, third.follows) == (None, None), "without ids nobody knows what follows what"
    assert (second.why_not_trained, third.why_not_trained) == ("redacted", "redacted")
    assert [message["content"] for message in third.new_messages] == ["hi", "Hello", "I am [email]", "Hello", "bye"]
    assert first.token_ids == ANSWER_IDS
    assert MAIL not in everything(proxy)


def test_with_ids_kept_each_turn_adds_to_the_one_before(
    database_url: str, fake_vllm: FakeVllm, tmp_path: Path, start: Callable[[Settings], RunningProxy]
) -> None:
    proxy = start(private(database_url, fake_vllm, tmp_path, keep_redacted_ids=True))
    first, second, third = converse(proxy, fake_vllm)
    assert (second.follows, third.follows) == (first.id, second.id)
    assert [row.why_not_trained for row in (first, second, third)] == [None] * 3
    assert [row.new_messages[0]["content"] for row in (first, second, third)] == ["hi", "I am [email]", "bye"]
    assert (second.redactions, third.redactions) == (1, 1)


def test_a_project_that_trains_on_nothing_marks_every_call(
    database_url: str, fake_vllm: FakeVllm, tmp_path: Path, start: Callable[[Settings], RunningProxy]
) -> None:
    proxy = start(private(database_url, fake_vllm, tmp_path, redact=[], no_train=True))
    proxy.chat({"X-No-Train": "false"})
    proxy.recorded()
    (trajectory,) = proxy.rows(schema.trajectories)
    assert trajectory.no_train
