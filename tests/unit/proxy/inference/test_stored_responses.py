"""Responses that requests refer to, through the proxy: what reaches vLLM, what is recorded, what is missing."""

import asyncio
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from sqlalchemy import text

from migrations import schema
from proxy.domain.stored_turn import StoredTurn
from proxy.inference.stored_responses import StoredResponses
from tests.unit.proxy.conftest import (
    ANSWER_IDS,
    LOGPROBS,
    PROMPT_IDS,
    FakeHandler,
    FakeVllm,
    RunningProxy,
    answer,
    chunk,
    logprobs_of,
    settings_for,
    wait_for,
)
from whetstone.config.settings import Settings

TOOL = {"type": "function", "name": "move", "parameters": {"type": "object", "properties": {}}}
ANSWER = "Its own words"


def plays(handler: FakeHandler, body: dict[str, Any]) -> None:
    """Think, speak and call a tool, under the request's id; the prompt's ids begin with those of the turn before."""
    turn = sum(message["role"] == "assistant" for message in body["messages"])
    call_id = f"chatcmpl-{handler.headers['x-request-id']}"
    prompt_ids = [*PROMPT_IDS, *[*ANSWER_IDS, 4] * turn]
    calls = [{"id": f"call-{turn}", "type": "function", "function": {"name": "move", "arguments": "{}"}}]
    message = {"reasoning": f"Thought {turn}", "content": f"{ANSWER} {turn}"}
    if not body.get("stream"):
        whole = answer() | {"id": call_id, "prompt_token_ids": prompt_ids}
        whole["choices"][0]["message"] |= message | ({"tool_calls": calls} if body.get("tools") else {})
        handler.whole(200, whole)
        return
    handler.begin()
    for event in (
        chunk({"role": "assistant", "content": ""}, prompt_token_ids=prompt_ids),
        chunk({"reasoning": message["reasoning"]}, token_ids=ANSWER_IDS[:1], logprobs=logprobs_of(LOGPROBS[0])),
        chunk({"content": message["content"]}, token_ids=ANSWER_IDS[1:], logprobs=logprobs_of(*LOGPROBS[1:])),
        chunk({"content": ""}, finish_reason="stop"),
        chunk(None, usage={"prompt_tokens": len(prompt_ids), "completion_tokens": 3, "total_tokens": 9}),
        b"data: [DONE]\n\n",
    ):
        handler.say(event.replace(b"chatcmpl-x", call_id.encode()))
    handler.end()


@pytest.fixture
def fake(fake_vllm: FakeVllm) -> FakeVllm:
    fake_vllm.script = plays
    return fake_vllm


def ask(proxy: RunningProxy, headers: dict[str, str] | None = None, **values: Any) -> httpx.Response:
    body = {"model": "starter", "input": "hi", "tools": [TOOL]} | values
    return proxy.client.post("/v1/responses", json=body, headers=headers)


def made(proxy: RunningProxy, **values: Any) -> Any:
    response = ask(proxy, **values)
    assert response.status_code == 200, response.text
    return response.json()


def result_of(response: dict[str, Any]) -> dict[str, Any]:
    (called,) = [item for item in response["output"] if item["type"] == "function_call"]
    return {"type": "function_call_output", "call_id": called["call_id"], "output": "X"}


def test_a_request_that_names_the_response_before_is_the_one_with_the_whole_conversation(
    fake: FakeVllm, proxy: RunningProxy
) -> None:
    items: list[Any] = [{"role": "user", "content": "hi"}]
    response = made(proxy)
    for turn in range(3):
        items += [*response["output"], result_of(response)]
        response = made(proxy, previous_response_id=response["id"], input=[result_of(response)])
        by_id = fake.requests[-1]
        made(proxy, input=items, headers={"X-Trajectory-Id": f"t{turn}"})
        assert by_id["messages"] == fake.requests[-1]["messages"]
        assert by_id.keys() == fake.requests[-1].keys()
        assert response["previous_response_id"] is not None
    by_ids = [row for row in proxy.recorded(7) if not row.trajectory_id.startswith("t")]
    assert len({row.trajectory_id for row in by_ids}) == 1
    assert [row.turn for row in by_ids] == [0, 1, 2, 3]
    assert [row.follows for row in by_ids[1:]] == [row.id for row in by_ids[:-1]]
    assert {row.why_not_trained for row in by_ids} == {None}
    # The first item of the answer is known from the answer's own row.
    assert [[item["type"] for item in row.new_messages] for row in by_ids[1:]] == [
        ["message", "function_call", "function_call_output"]
    ] * 3


def test_instructions_and_tools_are_those_of_the_new_request(fake: FakeVllm, proxy: RunningProxy) -> None:
    first = made(proxy, instructions="First.")
    made(proxy, previous_response_id=first["id"], input="go on", tools=[])
    assert "tools" not in fake.requests[-1]
    assert [message["role"] for message in fake.requests[-1]["messages"]] == ["user", "assistant", "user"]
    second = made(proxy, previous_response_id=first["id"], input="go on", instructions="Second.")
    assert fake.requests[-1]["messages"][0] == {"role": "system", "content": "Second."}
    made(proxy, previous_response_id=second["id"], input="and on", instructions="Third.")
    systems = [message["content"] for message in fake.requests[-1]["messages"] if message["role"] == "system"]
    assert systems == ["Third."]


def test_a_request_may_refer_to_items_one_by_one(fake: FakeVllm, proxy: RunningProxy) -> None:
    first = made(proxy)
    references = [{"type": "item_reference", "id": item["id"]} for item in first["output"]]
    question = {"role": "user", "content": "hi"}
    second = made(proxy, input=[question, *references, result_of(first)])
    by_ids = fake.requests[-1]["messages"]
    made(proxy, input=[question, *first["output"], result_of(first)])
    assert by_ids == fake.requests[-1]["messages"]
    # Items of the input have ids too.
    listed = proxy.client.get(f"/v1/responses/{second['id']}/input_items", params={"order": "asc"}).json()["data"]
    made(proxy, input=[{"type": "item_reference", "id": listed[0]["id"]}, *first["output"], result_of(first)])
    assert by_ids == fake.requests[-1]["messages"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_is_given_again_as_it_was_answered(fake: FakeVllm, proxy: RunningProxy, stream: bool) -> None:
    values: dict[str, Any] = {"instructions": "Play.", "metadata": {"a": "b"}, "temperature": 0.5}
    first = made(proxy)
    response = ask(proxy, stream=stream, previous_response_id=first["id"], max_output_tokens=9, **values)
    whole = response.json() if not stream else _last_event(response.text)
    assert whole["previous_response_id"] == first["id"]
    again = proxy.client.get(f"/v1/responses/{whole['id']}")
    assert (again.status_code, again.json()) == (200, whole)


def _last_event(events: str) -> Any:
    return json.loads(events.rstrip().rsplit("data: ", 1)[1])["response"]


def not_found(response: httpx.Response) -> tuple[str, str | None]:
    error = response.json()["error"]
    assert (response.status_code, error["type"]) == (404, "invalid_request_error")
    return error["message"], error["param"]


def test_what_does_not_exist_is_not_found(fake: FakeVllm, proxy: RunningProxy) -> None:
    before = len(fake.requests)
    message = "Previous response with id 'resp_no' not found."
    response = ask(proxy, previous_response_id="resp_no")
    assert not_found(response) == (message, "previous_response_id")
    assert response.json()["error"]["code"] == "previous_response_not_found"
    for name in ("rs_no_0", "rs_no_in_0", "anything", "rs_\0_0"):
        message = f"Item with id '{name}' not found."
        assert not_found(ask(proxy, input=[{"type": "item_reference", "id": name}])) == (message, "input")
    for path in ("", "/input_items"):
        answered = proxy.client.get(f"/v1/responses/resp_no{path}")
        assert not_found(answered) == ("Response with id 'resp_no' not found.", "response_id")
    assert not_found(proxy.client.post("/v1/responses/resp_no/cancel"))
    assert not_found(proxy.client.delete("/v1/responses/resp_no"))
    not_found(ask(proxy, previous_response_id="resp_\0"))
    assert len(fake.requests) == before


def test_a_chat_is_no_response(fake: FakeVllm, proxy: RunningProxy) -> None:
    name = proxy.chat().json()["id"]
    proxy.recorded()
    not_found(ask(proxy, previous_response_id=name))
    not_found(ask(proxy, previous_response_id=name.replace("chatcmpl-", "resp_")))


def test_what_is_not_to_be_stored_is_not_found_later(fake: FakeVllm, proxy: RunningProxy) -> None:
    response = made(proxy, store=False)
    (row,) = proxy.recorded()
    assert row.stored_response is None
    message, _ = not_found(proxy.client.get(f"/v1/responses/{response['id']}"))
    assert message.endswith("not found: it was made with `store: false`, or deleted.")
    not_found(ask(proxy, previous_response_id=response["id"]))
    not_found(ask(proxy, input=[{"type": "item_reference", "id": response["output"][0]["id"]}]))


def test_a_deleted_response_is_unknown_and_its_call_stays_recorded(fake: FakeVllm, proxy: RunningProxy) -> None:
    response = made(proxy)
    deleted = proxy.client.delete(f"/v1/responses/{response['id']}")
    assert deleted.json() == {"id": response["id"], "object": "response", "deleted": True}
    not_found(proxy.client.get(f"/v1/responses/{response['id']}"))
    not_found(proxy.client.delete(f"/v1/responses/{response['id']}"))
    not_found(ask(proxy, previous_response_id=response["id"]))
    assert [row.stored_response for row in proxy.recorded()] == [None]


def test_an_erased_response_says_so_and_nothing_of_it_is_left(fake: FakeVllm, proxy: RunningProxy) -> None:
    headers = {"X-Trajectory-Id": "gone"}
    first = ask(proxy, headers).json()
    second = ask(proxy, headers, previous_response_id=first["id"], input=[result_of(first)]).json()
    proxy.recorded(2)
    assert proxy.client.delete("/admin/trajectories/gone").status_code == 200
    for response in (first, second):
        message, _ = not_found(proxy.client.get(f"/v1/responses/{response['id']}"))
        assert message.endswith("not found: it was erased.")
        message, _ = not_found(ask(proxy, previous_response_id=response["id"]))
        assert message.endswith("not found: it was erased.")
        item = {"type": "item_reference", "id": response["output"][0]["id"]}
        assert not_found(ask(proxy, input=[item]))[0].endswith("not found: it was erased.")
    assert proxy.rows() == []
    with proxy.engine.connect() as connection:
        assert ANSWER not in repr(connection.execute(schema.erased_responses.select()).all())


def test_a_response_with_private_text_says_so(
    fake: FakeVllm, database_url: str, tmp_path: Path, start: Callable[[Settings], RunningProxy]
) -> None:
    for place, keeps in enumerate((False, True)):
        privacy = {"redact": ["email"], "keep_redacted_ids": keeps}
        data = tmp_path / str(place)
        proxy = start(settings_for(database_url, fake.url, data, projects={"default": {"privacy": privacy}}))
        private = made(proxy, input="I am alice@example.com")
        message, _ = not_found(ask(proxy, previous_response_id=private["id"]))
        assert "private text was removed from it" in message
        assert not_found(proxy.client.get(f"/v1/responses/{private['id']}"))[0] == message.replace("Previous r", "R")
        not_found(ask(proxy, input=[{"type": "item_reference", "id": private["output"][0]["id"]}]))
        # What no model reads is taken out of what is given again, and the conversation stays as it was.
        about = made(proxy, metadata={"from": "alice@example.com"})
        assert made(proxy, previous_response_id=about["id"], input=[result_of(about)])
        again = proxy.client.get(f"/v1/responses/{about['id']}").json()
        assert again == about | {"metadata": {"from": "[email]"}}


def blocked(proxy: RunningProxy) -> Any:
    """A transaction in which no call reaches SQL, until it ends."""
    connection = proxy.engine.begin()
    inside = connection.__enter__()
    on_postgresql = proxy.engine.dialect.name == "postgresql"
    inside.execute(text("LOCK TABLE trajectories IN EXCLUSIVE MODE" if on_postgresql else "SELECT 1"))
    return connection


def test_a_reference_waits_for_a_call_that_is_in_the_journal_alone(fake: FakeVllm, proxy: RunningProxy) -> None:
    made(proxy)
    proxy.recorded()
    writing = blocked(proxy)
    try:
        first = made(proxy)
        assert len(proxy.rows()) == 1
        with ThreadPoolExecutor() as threads:
            second = threads.submit(ask, proxy, previous_response_id=first["id"], input=[result_of(first)])
            again = threads.submit(proxy.client.get, f"/v1/responses/{first['id']}")
            for waiting in (second, again):
                with pytest.raises(TimeoutError):
                    waiting.result(timeout=0.1)
            writing.__exit__(None, None, None)
            assert second.result().status_code == 200
            assert again.result().json() == first
    finally:
        writing.__exit__(None, None, None)


def test_a_reference_waits_for_a_call_in_the_journal_of_another_proxy(
    fake: FakeVllm, database_url: str, tmp_path: Path, start: Callable[[Settings], RunningProxy]
) -> None:
    one, other = (start(settings_for(database_url, fake.url, tmp_path / name)) for name in "ab")
    wait_for(lambda: not any(proxy.app._peers.alone for proxy in (one, other)))
    writing = blocked(one)
    try:
        first = made(one)
        with ThreadPoolExecutor() as threads:
            second = threads.submit(ask, other, previous_response_id=first["id"], input=[result_of(first)])
            with pytest.raises(TimeoutError):
                second.result(timeout=0.1)
            writing.__exit__(None, None, None)
            assert second.result().status_code == 200
    finally:
        writing.__exit__(None, None, None)


def test_the_input_of_a_response_is_listed_page_by_page(fake: FakeVllm, proxy: RunningProxy) -> None:
    first = made(proxy)
    second = made(proxy, previous_response_id=first["id"], input=[result_of(first)])
    path = f"/v1/responses/{second['id']}/input_items"
    page = proxy.client.get(path).json()
    kinds = [item["type"] for item in page["data"]]
    assert kinds == ["function_call_output", "function_call", "message", "reasoning", "message"]
    assert (page["object"], page["has_more"]) == ("list", False)
    assert (page["first_id"], page["last_id"]) == (page["data"][0]["id"], page["data"][-1]["id"])
    first_page = proxy.client.get(path, params={"limit": 3}).json()
    assert first_page["has_more"]
    rest = proxy.client.get(path, params={"limit": 3, "after": first_page["last_id"]}).json()
    assert first_page["data"] + rest["data"] == page["data"]
    assert proxy.client.get(path, params={"order": "asc"}).json()["data"] == page["data"][::-1]
    not_found(proxy.client.get(path, params={"after": "msg_no"}))
    for wrong in ({"limit": 0}, {"limit": 101}, {"limit": "x"}, {"order": "up"}):
        response = proxy.client.get(path, params=wrong)
        assert (response.status_code, response.json()["error"]["param"]) == (400, *wrong)


def test_what_is_complete_is_neither_cancelled_nor_streamed_again(fake: FakeVllm, proxy: RunningProxy) -> None:
    path = f"/v1/responses/{made(proxy)['id']}"
    assert proxy.client.post(f"{path}/cancel").status_code == 400
    assert proxy.client.get(path, params={"stream": True}).status_code == 400


def test_a_call_that_is_written_during_the_first_read_is_read_again() -> None:
    """By then none is unwritten any more."""
    turn = StoredTurn("resp_a", [], {"content": "b"}, None, {}, False, None, {"status": "completed"})
    recorder = SimpleNamespace(unwritten=1, commits=0)

    async def commit(_write: Any) -> None:
        recorder.commits += 1

    class Tables:
        reads = 0

        def conversation(self, _response_id: str) -> list[StoredTurn]:
            self.reads += 1
            recorder.unwritten = 0
            return [turn] if self.reads > 1 else []

        def erased(self, _response_ids: Any) -> set[str]:
            return set()

    recorder.commit = commit
    stored: Any = StoredResponses(Tables(), recorder, SimpleNamespace(alone=True))  # type: ignore[arg-type]
    assert asyncio.run(stored.conversation("resp_a")) == [turn]
    assert recorder.commits == 1
