"""Requests as stock clients send them, taken from runs of these clients: each has an exact chat."""

import json
from pathlib import Path
from typing import Any

import pytest

from proxy.wire.interfaces import Server
from proxy.wire.registry import DIALECTS
from proxy.wire.request_body import read_body
from proxy.wire.translated import TranslatedRequest

BODIES = {path.stem: path.read_bytes() for path in sorted(Path(__file__).with_name("bodies").glob("*.json"))}
CODEX = ("codex_first", "codex_third")
CLIENTS = [*CODEX, "vercel_store_false", "vercel_stream", "agents_list_output", "agents_output_type"]


def translated(name: str) -> TranslatedRequest:
    request = DIALECTS["/v1/responses"](read_body(BODIES[name]), Server(max_model_len=32_768))
    assert isinstance(request, TranslatedRequest)
    return request


def chat_sent(name: str) -> dict[str, Any]:
    sent: dict[str, Any] = json.loads(translated(name).to_upstream_body("starter@v0", "salt"))
    return sent


@pytest.mark.parametrize("name", CLIENTS)
def test_it_is_sent_as_a_chat_that_is_captured(name: str) -> None:
    sent = chat_sent(name)
    assert sent["return_token_ids"] is True
    assert sent["logprobs"] is True
    assert {tool["type"] for tool in sent["tools"]} == {"function"}


def test_the_next_turn_of_codex_begins_with_the_turn_before() -> None:
    first, third = (chat_sent(name)["messages"] for name in CODEX)
    assert third[: len(first)] == first
    assert [message["role"] for message in third[len(first) :]] == ["assistant", "tool", "assistant", "tool"]


def test_codex_has_tools_in_a_namespace() -> None:
    names = [tool["function"]["name"] for tool in chat_sent("codex_first")["tools"]]
    assert "exec_command" in names
    assert "multi_agent_v1__spawn_agent" in names
