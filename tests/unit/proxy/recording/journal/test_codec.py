"""What the journal keeps comes back as it was, from this version and from those before it."""

from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.domain.address import Address
from proxy.domain.call import Call
from proxy.domain.feedback import Feedback
from proxy.domain.feedback_rows import request_row, row_of
from proxy.recording.journal.codec import JournalledFeedback, decode, encode_into, id_of
from tests.unit.proxy.conftest import make_call

NOW = datetime(2026, 1, 1, 12, 0, 0, 123456, UTC)
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def encode(value: Call | JournalledFeedback) -> bytes:
    encode_into(value, buffer := bytearray())
    return bytes(buffer)


def spooled(*rows: dict[str, Any]) -> JournalledFeedback:
    return JournalledFeedback(rows[0]["id"], list(rows))


@given(st.dictionaries(st.text(), json_values, max_size=4), st.text(), st.datetimes(timezones=st.just(UTC)))
def test_feedback_comes_back_as_it_was(metadata: dict[str, Any], comment: str, created_at: datetime) -> None:
    row = row_of(Feedback(trajectory_id="t", reward=0.1, metadata=metadata, comment=comment), "default", created_at)
    ended = request_row("end", "t", "k", "default", created_at)
    assert decode(encode(spooled(row, ended))) == spooled(row, ended)


def test_a_record_tells_its_id() -> None:
    row = row_of(Feedback(group_id="g", rewards={"t": 1.0}), "default", NOW)
    assert id_of(encode(spooled(row))) == row["id"]
    assert id_of(encode(make_call("c0"))) == "c0"


def test_a_call_that_a_version_without_kinds_wrote_is_a_call() -> None:
    call = make_call("c0", tools=[{"type": "function"}])
    assert b'"kind"' not in encode(call)
    assert decode(encode(call)) == call


@pytest.mark.parametrize(
    "payload", [b"", b"[]", b'{"from": "the future"}', b'{"id": "x", "kind": "verdict"}', b'{"id": "x"}']
)
def test_what_this_version_does_not_know_is_an_error(payload: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode(payload)


def test_a_call_that_says_nothing_of_itself_is_read_however_its_record_says_so() -> None:
    call = make_call("c0", address=Address(group_id="g", retry=True))
    fields = msgspec.json.decode(encode(call))
    assert fields["address"] == {"group_id": "g", "retry": True}
    unsaid = {"trajectory_id": None, "named_by": None, "group_size": None, "task": None, "split": "train"}
    unsaid |= {"no_train": False, "metadata": None, "turn_key": None}
    read = decode(msgspec.json.encode(fields | {"address": unsaid | fields["address"]}))
    assert isinstance(read, Call)
    assert read.address == call.address
