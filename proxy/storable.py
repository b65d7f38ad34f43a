"""Rows as both databases can hold them. Knows values; no table of ours."""

from collections.abc import Mapping
from typing import Any

import msgspec
from sqlalchemy import Connection, Table

from migrations.database import insert_new

_decode, _encode = msgspec.json.Decoder().decode, msgspec.json.Encoder().encode
_NUL = b"\\u0000"

NUMBERS = frozenset({"prompt_token_ids", "token_ids", "inference_logprobs"})
"""Columns that hold numbers only: long, and nothing in them to make storable."""


def insert_storable(connection: Connection, table: Table, row: Mapping[str, Any], on: list[str] | None = None) -> bool:
    """`insert_new`, of what both databases can hold."""
    return insert_new(connection, table, storable_row(row), on)


def storable_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row as both databases can hold it."""
    held = dict(row)
    for column, value in row.items():
        if isinstance(value, str):
            if "\x00" in value:
                held[column] = storable(value)
        elif isinstance(value, list | dict) and column not in NUMBERS:
            held[column] = storable(value)
    return held


def storable_json(value: Any) -> bytes:
    """What came as JSON, as JSON that both databases can hold."""
    return told_storable(_encode(value))


def told_storable(told: bytes) -> bytes:
    """Compact JSON, likewise."""
    # To look for one character is cheap: many texts have nothing that is escaped.
    escaped = told.find(b"\\")
    return told if escaped < 0 or told.find(_NUL, escaped) < 0 else _encode(storable(_decode(told)))


def storable_text(text: str | None) -> str | None:
    """A text as both databases can hold it."""
    return text.replace("\x00", "\ufffd") if text is not None and "\x00" in text else text


def storable(value: Any) -> Any:
    """The value with U+FFFD for NUL, which PostgreSQL's texts cannot hold. Token ids keep what was said."""
    match value:
        case str():
            return value.replace("\x00", "\ufffd")
        case list() | dict() if b"\\u0000" not in msgspec.json.encode(value):
            return value  # nearly all; walked, they could be nested no deeper than Python's stack
        case list():
            return [storable(item) for item in value]
        case dict():
            return {storable(key): storable(item) for key, item in value.items()}
    return value
