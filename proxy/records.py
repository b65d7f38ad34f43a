"""What the journal keeps of each record: a call, or feedback that the database was not there for. Bytes and values.

Opens nothing. A record says its kind; one that says none is a call: so they were before feedback came into the journal.
"""

from collections.abc import Callable
from datetime import datetime
from typing import Any

import msgspec

from proxy.call import Call


class Spooled(msgspec.Struct, frozen=True, tag_field="kind", tag="feedback"):
    """The feedback of one request, answered before the database had it."""

    id: str
    """Of its first row."""
    rows: list[dict[str, Any]]
    """As `feedback_rows` makes them."""


class _Named(msgspec.Struct, frozen=True):
    id: str
    kind: str = "call"


_encoder = msgspec.json.Encoder()
encode: Callable[[Call | Spooled], bytes] = _encoder.encode
"""The record of it: JSON, because a call carries pieces of JSON as they came."""
encode_into: Callable[[Call | Spooled, bytearray], None] = _encoder.encode_into
"""The same, in place of what is in a buffer: whoever records all the time needs no other memory each time."""
_named = msgspec.json.Decoder(_Named)
_calls = msgspec.json.Decoder(Call)
_spooled = msgspec.json.Decoder(Spooled)


def decode(payload: bytes) -> Call | Spooled:
    """What was recorded.

    Raises:
        msgspec.DecodeError: it is of a kind, or of a shape, that this version does not know.
    """
    if _named.decode(payload).kind == "call":
        return _calls.decode(payload)
    spooled = _spooled.decode(payload)
    rows = [row | {"created_at": datetime.fromisoformat(row["created_at"])} for row in spooled.rows]
    return Spooled(spooled.id, rows)


def id_of(payload: bytes) -> str:
    """The id of what was recorded.

    Raises:
        msgspec.DecodeError: it tells none.
    """
    return _named.decode(payload).id
