import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.wire.decoding import Events, data_of

EVENTS = ["event: x\ndata: {}", "data: ü€🙂", ": a comment", "data: [DONE]"]


@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
@given(st.lists(st.integers(1, 7), min_size=1, max_size=20))
def test_events_come_whole_however_they_were_cut(line_end: str, sizes: list[int]) -> None:
    data = "".join(f"{event}\n\n" for event in EVENTS).replace("\n", line_end).encode()
    events, received = Events(), []
    at = 0
    for size in [*sizes, len(data)]:
        received += events.feed(data[at : at + size])
        at += size
    assert received == [event.encode() for event in EVENTS]


def test_an_event_that_has_not_ended_is_kept_back() -> None:
    events = Events()
    assert events.feed(b"data: 1\n\ndata: 2\n") == [b"data: 1"]
    assert events.feed(b"\n") == [b"data: 2"]


@pytest.mark.parametrize(
    ("event", "data"),
    [
        (b"data: x", b"x"),
        (b"data:x", b"x"),
        (b"event: e\ndata: x", b"x"),
        (b"id: 1\nevent: e\ndata:x", b"x"),
        (b": ping", None),
        (b"", None),
    ],
)
def test_the_data_of_an_event(event: bytes, data: bytes | None) -> None:
    assert data_of(event) == data
