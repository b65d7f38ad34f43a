"""Define column types that behave alike in both databases, and encode what both can store."""

import json
from datetime import UTC, datetime
from typing import Any

import msgspec
from sqlalchemy import ARRAY, JSON, REAL, DateTime, Dialect, Integer, Text
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.types import TypeDecorator, TypeEngine

_N, _NULL, _NUL = b"n", b"null", b"\\u0000"
_decode = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder().encode
_strict = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode


def as_json(value: Any) -> str:
    """Encode a value as compact JSON.

    Raises:
        ValueError: it contains NaN or an infinite number.
        TypeError: it contains what neither msgspec nor Python can encode.
    """
    return as_json_bytes(value).decode()


def as_json_bytes(value: Any) -> bytes:
    """Encode a value as compact JSON in UTF-8; raises like `as_json`."""
    encoded = _encode(value)
    # msgspec encodes NaN as null. Only if the result contains null is the strict encoder needed. Numbers contain no n.
    return _strict(value).encode() if _has(encoded, _N) and _has(encoded, _NULL) else encoded


def _has(encoded: bytes, piece: bytes) -> bool:
    """Whether the bytes contain a piece. `in` first tries to read the piece as a number, which is slower."""
    return encoded.find(piece) >= 0


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
        case list() | dict() if _NUL not in _encode(value):
            return value  # nearly all; walking them would limit their depth to Python's stack
        case list():
            return [storable(item) for item in value]
        case dict():
            return {storable(key): storable(item) for key, item in value.items()}
    return value


class Utc(TypeDecorator[datetime]):
    """An instant. `timestamptz` on PostgreSQL; ISO text in UTC on SQLite, so that plain SQL can compare it."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Refuse an instant without a time zone (ValueError): it would be off by the machine's own."""
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError(f"{value!r} has no time zone")
        return value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Restore the instant's time zone, which SQLite does not store."""
        return value if value is None or value.tzinfo else value.replace(tzinfo=UTC)


class _Numbers(TypeDecorator[list[Any]]):
    """A list of numbers: an array on PostgreSQL, JSON text on SQLite (no function unpacks a blob there)."""

    impl = Text
    cache_ok = True
    element: type[TypeEngine[Any]] = Integer

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        return dialect.type_descriptor(ARRAY(self.element) if dialect.name == "postgresql" else Text())

    def process_bind_param(self, value: list[Any] | None, dialect: Dialect) -> Any:
        return value if value is None or dialect.name == "postgresql" else as_json(value)

    def process_result_value(self, value: Any, dialect: Dialect) -> list[Any] | None:
        decoded: list[Any] | None = msgspec.json.decode(value) if isinstance(value, str) else value
        return decoded


class TokenIds(_Numbers):
    """Token ids, in order."""

    cache_ok = True
    element = Integer


class Logprobs(_Numbers):
    """Natural logarithms of probabilities, float32, one per token id."""

    cache_ok = True
    element = REAL


Json = JSON(none_as_null=True).with_variant(JSONB(none_as_null=True), "postgresql")


def is_json(kind: TypeEngine[Any]) -> bool:
    """Whether a column's values are JSON, or lists of numbers."""
    return isinstance(kind, JSON | _Numbers)
