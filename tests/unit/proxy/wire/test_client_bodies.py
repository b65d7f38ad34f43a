"""Requests as existing clients send them (`python -m benchmarks.clients --bodies FOLDER`): each is parsed and captured."""

from pathlib import Path

import pytest

from benchmarks.clients.bodies import body_of
from proxy.wire.chat.request import ChatRequest
from proxy.wire.interfaces import Server
from proxy.wire.registry import parse_request
from proxy.wire.request_body import read_body

BODIES = sorted(Path(__file__).with_name("bodies").glob("*.json"))
REASONS: dict[str, str] = {}
"""Bodies that cannot be trained on -> why not."""


@pytest.mark.parametrize("path", BODIES, ids=lambda path: path.stem)
def test_a_body_as_a_client_sends_it_is_captured(path: Path) -> None:
    url, data = body_of(path)
    request = parse_request(url, read_body(data), Server(captured=True, max_model_len=40_960))
    reason = request.why_not_trained()
    assert reason == REASONS.get(path.stem)
    if reason is None:
        assert request.path == ChatRequest.path
        assert b'"return_token_ids":true' in request.to_upstream_body("starter@v0", "salt")


def test_every_reason_is_that_of_a_body() -> None:
    assert REASONS.keys() <= {path.stem for path in BODIES}
