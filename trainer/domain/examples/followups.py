"""Read from the messages that followed an answer what corrects it: a tool's error, or the user's reply. Pure."""

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from whetstone.domain.conversation_hash import MessageReader

_BEGINS_AS_ERROR = re.compile(r"\s*(?:Error\b|error:|Traceback\b)")
_RESULT = "tool_result"
"""Type of a tool's result among the parts of a user's message, as Anthropic has it."""
_RESULT_ITEMS = frozenset({"function_call_output", "custom_tool_call_output"})
"""Types of a tool's result that is an item of its own, as OpenAI's responses have it."""


def after_answer(messages: Sequence[Any], answer: Any) -> Sequence[Any]:
    """Return what follows the answer in a whole conversation; nothing where the conversation does not contain it.

    White space around it, other ids of its tool calls and reasoning that was left out make no other answer of it.
    """
    reader = MessageReader()
    wanted = reader.read(answer).content
    for place in reversed(range(len(messages))):
        if _role(messages[place]) == "assistant" and reader.read(messages[place]).content == wanted:
            return messages[place + 1 :]
    return ()


def tool_error(messages: Sequence[Any]) -> str | None:
    """Return the errors of the tools that the answer called, None if there are none. `messages`: those that followed.

    A result is an error if it is marked so (`is_error`), if it is a JSON object whose `error` is not empty, or if its
    text begins with the word `Error` or `Traceback`, or with `error:`.
    """
    errors = [text.strip() for text, marked in _results(_before_next_answer(messages)) if marked or _says_error(text)]
    return "\n".join(text for text in errors if text) or None


def are_tool_results(messages: Sequence[Any]) -> bool:
    """Return whether there are messages, and all of them are results of tools."""
    return bool(messages) and all(map(_is_tool_result, messages))


def user_reply(messages: Sequence[Any]) -> str | None:
    """Return the text of the user's first message, None if there is none. `messages`: those that followed."""
    for message in _before_next_answer(messages):
        if _role(message) == "user":
            return _text(message.get("content")).strip() or None
    return None


def _before_next_answer(messages: Sequence[Any]) -> Iterator[Any]:
    """Yield the messages before the next answer: what comes later is about that one."""
    for message in messages:
        if _role(message) == "assistant":
            return
        yield message


def _results(messages: Iterator[Any]) -> Iterator[tuple[str, bool]]:
    """Yield the text of each tool's result, and whether it is marked as an error."""
    for message in messages:
        for result in [message] if _role(message) == "tool" else _tool_results(message):
            yield _text(result.get("content")), result.get("is_error") is True


def _is_tool_result(message: Any) -> bool:
    if _role(message) in ("tool", "function"):
        return True
    if _role(message) is None:
        return isinstance(message, dict) and message.get("type") in _RESULT_ITEMS
    results = _tool_results(message)
    return bool(results) and len(results) == len(message["content"])


def _tool_results(message: Any) -> list[Any]:
    content = message.get("content") if _role(message) == "user" else None
    parts = content if isinstance(content, list) else []
    return [part for part in parts if isinstance(part, dict) and part.get("type") == _RESULT]


def _says_error(text: str) -> bool:
    if _BEGINS_AS_ERROR.match(text):
        return True
    if not text.lstrip().startswith("{"):
        return False
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict) and bool(value.get("error"))


def _role(message: Any) -> str | None:
    return message.get("role") if isinstance(message, dict) else None


def _text(content: Any) -> str:
    """Return the text of a message's content, without its other parts."""
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, dict)]
        return "\n".join(text for text in texts if isinstance(text, str))
    return content if isinstance(content, str) else ""
