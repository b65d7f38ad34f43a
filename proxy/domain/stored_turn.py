"""Define what the record of a call says to a later request that refers to its answer by id."""

from typing import Any

import msgspec


class StoredTurn(msgspec.Struct, frozen=True):
    """One completion as it was recorded. A conversation is a list of them, the oldest first."""

    response_id: str
    """The answer's id, as the app holds it."""
    new_messages: list[Any]
    """What its request has after the messages of the turn before and the first item of that turn's answer."""
    response: dict[str, Any] | None
    """The answer: a chat message, or the output items of a dialect that no chat stands for as its `content`."""
    tools: list[Any] | None
    """The request's tools where they differ from those of the turn before."""
    sampling: dict[str, Any] | None
    """The request's fields other than model, messages and tools."""
    streamed: bool
    redactions: int | None
    stored: dict[str, Any] | None
    """What the answer has that nothing else in the record has; None if it is not stored."""
