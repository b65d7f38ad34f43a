"""Shorten a prompt or an answer to one line, without reading a large one from the database whole."""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic_core import from_json
from sqlalchemy import ColumnElement, Text, cast, func

MOST_READ = 16_000
"""Characters of a prompt's JSON that are read: the texts of several messages, but not the pictures in them."""
LINE = 200
"""Most characters of a line."""


def beginning(column: ColumnElement[Any], length: int = MOST_READ) -> ColumnElement[str | None]:
    """Return the SQL of the first characters of a column, of JSON in its text form."""
    return func.substr(cast(column, Text), 1, length)


def first_line(messages: str | None) -> str:
    """Return the first words of a call's new messages, which are JSON and may be cut off at the end.

    They are those of the last user message, or of the last message if there is none.
    """
    try:
        return first_words(from_json(messages or "[]", allow_partial="trailing-strings"))
    except ValueError:  # nested too deeply
        return ""


def first_words(messages: Any) -> str:
    """Return the first words of the last user message, or of the last message if there is none."""
    messages = messages or []
    users = [one for one in messages if isinstance(one, Mapping) and one.get("role") == "user"]
    return one_line(_text((users or messages or [""])[-1]))


def one_line(text: str) -> str:
    """Return the first characters on one line, blanks joined, unprintable characters replaced."""
    # Text from apps must not move the reader's cursor.
    plain = "".join(one if one.isprintable() else " " if one in "\n\t\r" else "·" for one in text[: 4 * LINE])
    return " ".join(plain.split())[:LINE].rstrip()


def _text(message: Any) -> str:
    """Return the text of a message, of its parts, or of a plain prompt."""
    if isinstance(message, str):
        return message
    if isinstance(message, Mapping):
        return _text(message.get("content") or message.get("text") or message.get("prompt") or "")
    if isinstance(message, Sequence):
        return " ".join(filter(None, map(_text, message)))
    return ""
