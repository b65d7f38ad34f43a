"""CORS: what a browser is told, on whichever answer, and by a proxy that runs."""

import asyncio
from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import Any

import pytest

from proxy.admission.middleware import answer_preflight, cors_headers, is_preflight
from proxy.http.asgi import WithHeaders, more_of, send_whole
from tests.unit.proxy.conftest import FakeVllm, RunningProxy, settings_for
from tests.unit.whetstone.domain.test_api_keys import make
from whetstone.config.settings import Settings
from whetstone.database.engine import connect

ORIGIN = b"https://app.example.com"


class Sent:
    """What was sent."""

    def __init__(self) -> None:
        self.messages: list[MutableMapping[str, Any]] = []

    async def __call__(self, message: MutableMapping[str, Any]) -> None:
        self.messages.append(message)

    @property
    def headers(self) -> dict[bytes, bytes]:
        return dict(self.messages[0]["headers"])


def test_the_headers_are_added_to_whatever_is_answered_and_nothing_else_changes() -> None:
    plain, sent = Sent(), Sent()
    asyncio.run(send_whole(plain, 401, [(b"x", b"y")], b"body"))
    asyncio.run(send_whole(WithHeaders(sent, cors_headers(ORIGIN)), 401, [(b"x", b"y")], b"body"))
    assert sent.messages[0]["headers"] == [*plain.messages[0]["headers"], *cors_headers(ORIGIN)]
    assert sent.messages[0]["status"] == 401 and sent.messages[1:] == plain.messages[1:]
    assert sent.headers[b"access-control-allow-origin"] == ORIGIN and sent.headers[b"vary"] == b"Origin"
    assert b"access-control-allow-credentials" not in sent.headers


def test_the_pieces_of_a_stream_go_out_as_soon_as_without_the_headers() -> None:
    class Begun(Sent):
        def more(self, piece: bytes) -> bool:
            return piece == b"now"

    for sent, taken in ((Begun(), True), (Sent(), False)):
        more = more_of(WithHeaders(WithHeaders(sent, cors_headers(ORIGIN)), cors_headers(ORIGIN)))
        assert more(b"now") is taken and not more(b"later")


@pytest.mark.parametrize(
    ("method", "headers", "is_one"),
    [
        ("OPTIONS", {b"access-control-request-method": b"POST"}, True),
        ("OPTIONS", {}, False),
        ("POST", {b"access-control-request-method": b"POST"}, False),
    ],
)
def test_a_preflight_is_known_by_its_method_and_its_question(
    method: str, headers: dict[bytes, bytes], is_one: bool
) -> None:
    assert is_preflight({"method": method}, headers) is is_one


def test_a_preflight_allows_our_methods_and_the_headers_that_are_meant_to_come() -> None:
    sent = Sent()
    asked = {b"access-control-request-headers": b"authorization,content-type,x-trajectory-id"}
    asyncio.run(answer_preflight(WithHeaders(sent, cors_headers(ORIGIN)), asked))
    start, body = sent.messages
    assert (start["status"], body["body"]) == (204, b"")
    assert sent.headers[b"access-control-allow-methods"] == b"GET, POST, DELETE"
    assert sent.headers[b"access-control-allow-headers"] == asked[b"access-control-request-headers"]
    assert sent.headers[b"access-control-allow-origin"] == ORIGIN


def test_a_page_of_the_settings_asks_with_its_key_and_reads_whatever_comes(
    sqlite_url: str, fake_vllm: FakeVllm, tmp_path: Path, start: Callable[[Settings], RunningProxy]
) -> None:
    settings = settings_for(sqlite_url, fake_vllm.url, tmp_path, proxy={"cors_origins": [ORIGIN.decode()]})
    page = {"origin": ORIGIN.decode()}
    seeded = connect(sqlite_url)
    key = make(seeded)[1]
    seeded.dispose()
    proxy = start(settings)
    asks = page | {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    preflight = proxy.client.options("/v1/chat/completions", headers=asks)
    assert (preflight.status_code, preflight.headers["access-control-allow-headers"]) == (204, "authorization")
    answered = proxy.chat(page | {"authorization": f"Bearer {key}"})
    refused = proxy.chat(page)
    assert (answered.status_code, refused.status_code) == (200, 401)
    for answer in (preflight, answered, refused):
        assert answer.headers["access-control-allow-origin"] == page["origin"]
    other = proxy.client.options("/v1/chat/completions", headers=asks | {"origin": "https://evil.example"})
    assert other.status_code == 403 and "access-control-allow-origin" not in other.headers
