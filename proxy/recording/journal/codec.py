"""Encode and decode journal records: a call, or feedback that arrived while the database could not be reached.

A record names its kind. A record without a kind is a call: older journals contained only calls.
"""

from collections.abc import Callable
from datetime import datetime
from typing import Any

import msgspec

from proxy.domain.call import Call


class JournalledFeedback(msgspec.Struct, frozen=True, tag_field="kind", tag="feedback"):
    """The feedback of one request, answered before the database had it."""

    id: str
    """Id of its first row."""
    rows: list[dict[str, Any]]
    """Rows as `feedback_rows` makes them."""


class _RecordHeader(msgspec.Struct, frozen=True):
    id: str
    kind: str = "call"


encode_into: Callable[[Call | JournalledFeedback, bytearray], None] = msgspec.json.Encoder().encode_into
"""Encode a record as JSON, because a call contains pieces of the original JSON. A buffer is overwritten, so that
frequent calls need no new memory."""
_named = msgspec.json.Decoder(_RecordHeader)
_calls = msgspec.json.Decoder(Call)
_spooled = msgspec.json.Decoder(JournalledFeedback)


def decode(payload: bytes) -> Call | JournalledFeedback:
    """Decode a record.

    Raises:
        msgspec.DecodeError: this version does not know the record's kind or shape.
    """
    if _named.decode(payload).kind == "call":
        return _calls.decode(payload)
    spooled = _spooled.decode(payload)
    return JournalledFeedback(
        spooled.id, [row | {"created_at": datetime.fromisoformat(row["created_at"])} for row in spooled.rows]
    )


def id_of(payload: bytes) -> str:
    """Return the id of a record.

    Raises:
        msgspec.DecodeError: it has none.
    """
    return _named.decode(payload).id
