"""A conversation that the novice learns a format from."""

from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]


@dataclass(frozen=True)
class Conversation:
    """Messages as an OpenAI client would send them, and the tools offered with them."""

    messages: list[Message]
    tools: list[dict[str, Any]] = field(default_factory=list)
    choices: list[list[str]] = field(default_factory=list)
    """For each assistant message the texts that are equally right as its first token, one token each; none for a
    message in which only its own text is. Empty where that holds for all messages."""
