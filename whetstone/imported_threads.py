"""Which line of a log goes on from which: conversations as hashes of what they say. Pure; knows no table.

As the proxy threads by content (docs/whose_call.md): keys in another order, null or empty content, text as a list of
parts, ids of tool calls made anew and thinking left out are the same answer. The hashes are not the proxy's: what an
app goes on to say never continues what was imported.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

HASH_BYTES = 16
_KIND = b"whetstone import"
_THINKING = ("thinking", "redacted_thinking")
_canonical = msgspec.json.Encoder(order="deterministic").encode


def digest(*parts: Any) -> str:
    """32 hex digits of what JSON can say."""
    return hashlib.blake2b(_canonical(parts), digest_size=HASH_BYTES, person=_KIND).hexdigest()


def histories(messages: Sequence[Mapping[str, Any]], owner: str | None) -> list[bytes]:
    """For each message the hash of the conversation up to and with it. `owner`: whom it was for; another's differs."""
    whole = hashlib.blake2b(_canonical([owner]), digest_size=HASH_BYTES, person=_KIND).digest()
    found = []
    for message in messages:
        said = _canonical(_said(message))
        whole = hashlib.blake2b(whole + said, digest_size=HASH_BYTES, person=_KIND).digest()
        found.append(whole)
    return found


def _said(message: Mapping[str, Any]) -> list[Any]:
    role, text = message.get("role"), _text(message.get("content"))
    if role != "assistant":
        return [role, text, message.get("name")]
    return [role, text.strip() if isinstance(text, str) else text, _made(message)]


def _text(content: Any) -> Any:
    if content is None:
        return ""
    if not isinstance(content, list):
        return content
    parts = [part for part in content if not (isinstance(part, dict) and part.get("type") in _THINKING)]
    texts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in parts]
    told = [text for text in texts if isinstance(text, str)]
    return "".join(told) if len(told) == len(parts) else parts


def _made(message: Mapping[str, Any]) -> list[list[Any]]:
    """The tool calls of an answer: name and arguments, however these are written."""
    calls = message.get("tool_calls")
    functions = [call.get("function") for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []
    return [
        [function.get("name"), _arguments(function.get("arguments"))]
        for function in (*functions, message.get("function_call"))
        if isinstance(function, dict)
    ]


def _arguments(text: Any) -> Any:
    if not isinstance(text, str):
        return text
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return text
