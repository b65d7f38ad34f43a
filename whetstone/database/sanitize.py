"""Make rows storable in both databases."""

from collections.abc import Mapping
from typing import Any

import msgspec
from sqlalchemy import Connection, Table

from whetstone.database.engine import insert_new

_decode, _encode = msgspec.json.Decoder().decode, msgspec.json.Encoder().encode
_NUL = b"\\u0000"

NUMBERS = frozenset({"prompt_token_ids", "token_ids", "inference_logprobs"})
"""Columns that contain only numbers: they are long, and need no sanitizing."""


def insert_storable(connection: Connection, table: Table, row: Mapping[str, Any], on: list[str] | None = None) -> bool:
    """Insert a row like `insert_new`, in a form that both databases can store."""
    stored = {column: value if column in NUMBERS else storable(value) for column, value in row.items()}
    return insert_new(connection, table, stored, on)


def storable_json(value: Any) -> bytes:
    """Encode a value as JSON that both databases can store."""
    return storable_encoded(_encode(value))


def storable_encoded(encoded: bytes) -> bytes:
    """Return compact JSON in a form that both databases can store."""
    # Searching for one character is cheap: many texts have no escapes.
    escaped = encoded.find(b"\\")
    return encoded if escaped < 0 or encoded.find(_NUL, escaped) < 0 else _encode(storable(_decode(encoded)))


def storable_text(text: str | None) -> str | None:
    """Return a text in a form that both databases can store."""
    return text.replace("\x00", "\ufffd") if text is not None and "\x00" in text else text


def storable(value: Any) -> Any:
    """Replace NUL by U+FFFD in the value: PostgreSQL's texts cannot contain NUL. Token ids preserve the original."""
    match value:
        case str():
            return value.replace("\x00", "\ufffd")
        case list() | dict() if b"\\u0000" not in msgspec.json.encode(value):
            return value  # nearly all; walking them would limit their depth to Python's stack
        case list():
            return [storable(item) for item in value]
        case dict():
            return {storable(key): storable(item) for key, item in value.items()}
    return value
