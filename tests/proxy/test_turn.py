"""A turn: what an answer says about itself."""

from types import SimpleNamespace
from typing import Any

import pytest

from proxy.asgi import headers_in
from proxy.turn import Turn


@pytest.mark.parametrize("group_id", [None, "group:1"])
@pytest.mark.parametrize("dropped", [False, True])
def test_headers_and_their_lines_say_the_same(group_id: str | None, dropped: bool) -> None:
    turn: Any = SimpleNamespace(
        id="call-1",
        place=SimpleNamespace(trajectory_id="a:b@c", by="header"),
        speaker=SimpleNamespace(version=3),
        address=SimpleNamespace(group_id=group_id),
        dropped=dropped,
    )
    headers = Turn.headers(turn)
    assert headers_in(Turn.header_lines(turn)) == headers
    assert len(headers) == 4 + (group_id is not None) + dropped
