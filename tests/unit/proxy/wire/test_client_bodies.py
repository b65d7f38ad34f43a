"""Requests as existing clients send them (written by `python -m benchmarks.clients --bodies`) are captured."""

import re
from pathlib import Path

import pytest

from benchmarks.clients.bodies import body_of
from proxy.wire.chat.request import ChatRequest
from proxy.wire.interfaces import Server
from proxy.wire.registry import DIALECTS
from proxy.wire.request_body import read_body

BODIES = sorted(Path(__file__).with_name("bodies").glob("*_[0-9]*.json"))
NOT_CAPTURED = frozenset({"openai_remembered_2", "vercel_3"})
"""Requests that refer to an earlier response, and are another request once that is resolved."""


@pytest.mark.parametrize("path", BODIES, ids=lambda path: path.stem)
def test_a_body_as_a_client_sends_it_is_captured(path: Path) -> None:
    url, data = body_of(path)
    request = DIALECTS[url](read_body(data), Server(captured=True, max_model_len=40_960))
    assert request.why_not_trained() == ("no_token_ids" if path.stem in NOT_CAPTURED else None)
    is_captured = b'"return_token_ids":true' in request.to_upstream_body("starter@v0", "salt")
    assert (request.path == ChatRequest.path, is_captured) == (path.stem not in NOT_CAPTURED,) * 2


def test_every_exception_is_a_body() -> None:
    names = {path.stem for path in BODIES}
    assert names >= NOT_CAPTURED


def test_bodies_have_nothing_of_the_machine_that_wrote_them() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in BODIES)
    assert not re.search(r"/tmp/|/root\b|whetstone-clients", text)
