"""Requests that refer to earlier responses, before the real vLLM: they answer what the whole conversation answers."""

import json
import random
from typing import Any

import httpx
import msgspec
import pytest
from sqlalchemy import text

from tests.unit.proxy.both import ATTEMPTS
from tests.unit.proxy.conftest import RunningProxy, wait_for

pytestmark = pytest.mark.stack

CONVERSATIONS, SHORT = 200, 10
DIFFERS = ("id", "call_id", "created_at", "previous_response_id", "cached_tokens", "cache_write_tokens")
TOOLS = [
    {"type": "function", "name": name, "parameters": {"type": "object", "properties": {"cell": {"type": "integer"}}}}
    for name in ("move", "look")
]
TEXTS = (
    "Hello there!",
    "Your turn.",
    "Grüße, 世界 🙂",
    "Take the middle, please.",
    "",
    "1\n2\n\n3",
    "What did I say first?",
)
PROMPT = "SELECT prompt_token_ids, messages FROM admin_conversations WHERE completion_id = :id"


@pytest.fixture(scope="module")
def vllm_url(parsing_vllm_url: str) -> str:
    """With parsers for thoughts and tools."""
    return parsing_vllm_url


def hidden(value: Any) -> Any:
    """Without what may differ: ids, times, and how much was cached already."""
    if isinstance(value, dict):
        return {name: hidden(item) for name, item in value.items() if name not in DIFFERS}
    return [hidden(item) for item in value] if isinstance(value, list) else value


def answered(real: RunningProxy, request: dict[str, Any], trajectory: str | None) -> tuple[dict[str, Any], list[int]]:
    """The response and its prompt's ids, as recorded."""
    headers = {} if trajectory is None else {"X-Trajectory-Id": trajectory}
    response = real.client.post("/v1/responses", json=request, headers=headers)
    assert response.status_code == 200, response.text
    whole = response.json() if not request.get("stream") else _last(response.text)
    completion_id = response.headers["x-completion-id"]
    wait_for(lambda: real.rows(id=completion_id))
    with real.engine.connect() as connection:
        (row,) = connection.execute(text(PROMPT), {"id": completion_id}).all()
    return whole, msgspec.json.decode(row.prompt_token_ids)


def _last(events: str) -> Any:
    return json.loads(events.rstrip().rsplit("data: ", 1)[1])["response"]


def next_items(rng: random.Random, output: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What an app says next: the results of all tools that were called, or a message."""
    calls = [item["call_id"] for item in output if item["type"] == "function_call"]
    results = [{"type": "function_call_output", "call_id": one, "output": rng.choice(TEXTS)} for one in calls]
    return results or [{"role": "user", "content": rng.choice(TEXTS)}]


def check_conversation(real: RunningProxy, seed: int) -> int:
    """Hold one conversation by reference, and each turn of it again in whole. Return its turns."""
    rng = random.Random(seed)
    request: dict[str, Any] = {
        "model": "starter", "temperature": 0, "max_output_tokens": rng.randint(4, 40), "stream": rng.random() < 0.3,
    }  # fmt: skip
    if rng.random() < 0.5:
        request |= {"tools": TOOLS[: rng.randint(1, 2)], "tool_choice": rng.choice(("auto", "auto", "required"))}
    if rng.random() < 0.5:
        request["reasoning"] = {"effort": "none"}
    items: list[Any] = [{"role": "user", "content": rng.choice(TEXTS)}]
    refers: dict[str, Any] = {"input": items}
    turns = rng.randint(2, 4)
    for turn in range(turns):
        # Instructions hold for their own request only.
        own = {"instructions": rng.choice(TEXTS)} if rng.random() < 0.3 else {}
        for attempt in range(ATTEMPTS):
            by_reference, prompt = answered(real, request | own | refers, None)
            whole, whole_prompt = answered(real, request | own | {"input": items}, f"{seed}-{turn}-{attempt}")
            assert prompt == whole_prompt
            # Of two tokens that are nearly as likely, a batch decides.
            if hidden(by_reference) == hidden(whole):
                break
        assert hidden(by_reference) == hidden(whole)
        again = real.client.get(f"/v1/responses/{by_reference['id']}")
        assert again.json() == by_reference
        new, output = next_items(rng, by_reference["output"]), by_reference["output"]
        if rng.random() < 0.7:
            refers = {"previous_response_id": by_reference["id"], "input": new}
        else:
            references = [{"type": "item_reference", "id": item["id"]} for item in output]
            refers = {"input": [*items, *references, *new]}
        items = [*items, *output, *new]
    return turns


def test_a_conversation_by_reference_is_answered_as_in_whole(real: RunningProxy) -> None:
    assert sum(check_conversation(real, seed) for seed in range(SHORT)) > SHORT


@pytest.mark.long(part="exact")
def test_many_conversations_by_reference_are_answered_as_in_whole(real: RunningProxy) -> None:
    assert sum(check_conversation(real, seed) for seed in range(SHORT, CONVERSATIONS)) > CONVERSATIONS


def test_vllm_alone_knows_no_earlier_response(direct: httpx.Client) -> None:
    """If it ever does, what the proxy does for it has to be looked at again."""
    request = {"model": "starter@v0", "input": "hi", "max_output_tokens": 4}
    first = direct.post("/v1/responses", json=request).json()
    assert direct.post("/v1/responses", json=request | {"previous_response_id": first["id"]}).status_code == 404
    references = [{"type": "item_reference", "id": item["id"]} for item in first["output"]] or [
        {"type": "item_reference", "id": "msg_0"}
    ]
    assert direct.post("/v1/responses", json=request | {"input": references}).status_code == 400
