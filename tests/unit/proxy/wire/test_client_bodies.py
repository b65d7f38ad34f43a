"""Requests as existing clients send them (written by `python -m benchmarks.clients --bodies`) are captured."""

import re
from pathlib import Path

import pytest

from benchmarks.clients.bodies import body_of
from proxy.wire.chat.request import ChatRequest
from proxy.wire.interfaces import Server
from proxy.wire.registry import parse_request
from proxy.wire.request_body import read_body

BODIES = sorted(Path(__file__).with_name("bodies").glob("*_[0-9]*.json"))
STRICT = (
    "agents_chat", "agents_responses", "crewai", "openai_chat", "openai_responses", "openai_remembered",
    "pydantic_ai_chat", "pydantic_ai_responses",
)  # fmt: skip
CHOICES = ("instructor", "smolagents_tools")
REASONS = dict.fromkeys(STRICT, "sampling_bent: tools") | dict.fromkeys(CHOICES, "sampling_bent: tool_choice")
"""Clients whose requests cannot be trained on -> why not."""
NOT_CAPTURED = frozenset([f"agents_mcp_{number}" for number in range(2, 5)] + ["openai_remembered_2", "vercel_3"])
"""Requests that vLLM answers in their own dialect."""


def reason_of(name: str) -> str | None:
    """Why a request cannot be trained on."""
    return "no_token_ids" if name in NOT_CAPTURED else REASONS.get(name.rpartition("_")[0])


@pytest.mark.parametrize("path", BODIES, ids=lambda path: path.stem)
def test_a_body_as_a_client_sends_it_is_captured(path: Path) -> None:
    url, data = body_of(path)
    request = parse_request(url, read_body(data), Server(captured=True, max_model_len=40_960))
    assert request.why_not_trained() == reason_of(path.stem)
    is_captured = b'"return_token_ids":true' in request.to_upstream_body("starter@v0", "salt")
    assert (request.path == ChatRequest.path, is_captured) == (path.stem not in NOT_CAPTURED,) * 2


def test_every_exception_is_a_body() -> None:
    names = {path.stem for path in BODIES}
    assert names >= NOT_CAPTURED
    assert {name.rpartition("_")[0] for name in names} >= REASONS.keys()


def test_bodies_have_nothing_of_the_machine_that_wrote_them() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in BODIES)
    assert not re.search(r"/tmp/|/root\b|whetstone-clients", text)
