"""A turn: what an answer says about itself."""

from types import SimpleNamespace
from typing import Any

import pytest

from proxy.asgi import headers_in
from proxy.turn import Turn


@pytest.mark.parametrize("group_id", [None, "group:1"])
@pytest.mark.parametrize("dropped", [False, True])
def test_an_answer_says_which_call_it_is(group_id: str | None, dropped: bool) -> None:
    turn: Any = SimpleNamespace(
        id="call-1",
        place=SimpleNamespace(trajectory_id="a:b@c", by="header"),
        speaker=SimpleNamespace(version=3),
        address=SimpleNamespace(group_id=group_id),
        dropped=dropped,
    )
    told = dict(headers_in(Turn.header_lines(turn)))
    assert (told.pop(b"x-group-id", None), told.pop(b"x-whetstone-recorded", None)) == (
        None if group_id is None else b"group:1",
        b"false" if dropped else None,
    )
    assert told == {
        b"x-completion-id": b"call-1",
        b"x-trajectory-id": b"a:b@c",
        b"x-policy-version": b"3",
        b"x-threaded-by": b"header",
    }
