"""Replace images, audio and files in a call's messages by their SHA-256, for a project that does not keep them."""

import base64
import binascii
import hashlib
from collections.abc import Sequence
from typing import Any

import msgspec

ADDRESSES = frozenset({"url", "image_url", "audio_url", "video_url", "file_url"})
"""Fields with an address, or with a content as a data URL."""
CONTENTS = frozenset({"file_data", "image_embeds"})
"""Fields with a content, in base64 or as a data URL."""
DESCRIPTIONS = frozenset({"media_type", "format"})
"""Fields beside which `data` is a content: Anthropic's images and documents, OpenAI's audio."""
HINTS = (b"url", b"data", b"embeds", b"\\u")
"""A message without any of these has no content; a name may be written with escapes."""
HASH = "sha256:"
"""What a hash begins with; 64 hex digits follow."""


def hashed(messages: Sequence[msgspec.Raw]) -> tuple[list[msgspec.Raw], int]:
    """Return the messages with hashes in place of contents, and how many contents there were.

    A hash is that of the decoded bytes, so that of the file itself. Addresses of files elsewhere stay. Texts, and
    arguments and results of tools that are texts, are left alone. A message in which nothing is hashed is the same
    object.
    """
    result, total = [], 0
    for message in messages:
        written = bytes(message)
        count = 0
        if any(hint in written for hint in HINTS):
            decoded = msgspec.json.decode(message)
            count = _hash_inside(decoded)
        result.append(msgspec.Raw(msgspec.json.encode(decoded)) if count else message)
        total += count
    return result, total


def _hash_inside(value: Any) -> int:
    """Hash the contents in a decoded value in place. Return how many there were."""
    if isinstance(value, list):
        return sum(map(_hash_inside, value))
    if not isinstance(value, dict):
        return 0
    count = 0
    for name, inner in value.items():
        if isinstance(inner, str) and _is_content(name, inner, value):
            value[name] = hash_of(inner)
            count += 1
        elif not isinstance(inner, str):
            count += _hash_inside(inner)
    return count


def _is_content(name: str, text: str, beside: dict[str, Any]) -> bool:
    """Return whether a field's text is a content, rather than an address, a hash or a text."""
    if text.startswith(HASH):
        return False
    if name in ADDRESSES:
        return text.lstrip()[:5].lower() == "data:"
    return name in CONTENTS or (name == "data" and not DESCRIPTIONS.isdisjoint(beside))


def hash_of(text: str) -> str:
    """Return the hash of a content: of the bytes that base64 stands for, in a data URL or alone, else of the text."""
    head, comma, after = text.strip().partition(",")
    data = after if comma else head
    is_base64 = not comma or head.lower().endswith(";base64")
    try:
        content = base64.b64decode("".join(data.split()), validate=True) if is_base64 else None
    except (binascii.Error, ValueError):
        content = None
    return HASH + hashlib.sha256(text.encode(errors="replace") if content is None else content).hexdigest()
