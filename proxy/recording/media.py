"""Replace images, audio and files in a call's messages by their SHA-256, for a project that does not keep them."""

import base64
import binascii
import hashlib
from collections.abc import Sequence
from typing import Any

import msgspec

PAYLOADS = {
    "image_url": "url",
    "audio_url": "url",
    "video_url": "url",
    "input_audio": "data",
    "file": "file_data",
}
"""Field of a part of a message -> where in it the content is, as a data URL or in base64 alone."""
HASH = "sha256:"
"""What a hash begins with; 64 hex digits follow."""


def hashed(messages: Sequence[msgspec.Raw]) -> tuple[list[msgspec.Raw], int]:
    """Return the messages with hashes in place of contents, and how many contents there were.

    A hash is that of the decoded bytes, so that of the file itself. Addresses of files elsewhere stay. A message in
    which nothing is hashed is the same object.
    """
    made, total = [], 0
    for message in messages:
        count = 0
        # A name may be written with escapes.
        if any(name.encode() in bytes(message) for name in (*PAYLOADS, "\\u")):
            decoded = msgspec.json.decode(message)
            count = _hash_parts(decoded)
        made.append(msgspec.Raw(msgspec.json.encode(decoded)) if count else message)
        total += count
    return made, total


def _hash_parts(message: Any) -> int:
    """Hash the contents of one decoded message in place. Return how many there were."""
    content = message.get("content") if isinstance(message, dict) else None
    count = 0
    for part in content if isinstance(content, list) else ():
        for field, inner in PAYLOADS.items() if isinstance(part, dict) else ():
            value = part.get(field)
            if isinstance(value, str):
                holder, key = part, field
            elif isinstance(value, dict) and isinstance(value.get(inner), str):
                holder, key = value, inner
            else:
                continue
            if is_content(holder[key], is_url=inner == "url"):
                holder[key] = hash_of(holder[key])
                count += 1
    return count


def is_content(text: str, *, is_url: bool) -> bool:
    """Return whether the text is a file's content, rather than its address or a hash."""
    return text[:5].lower() == "data:" or not (is_url or text.startswith(HASH))


def hash_of(text: str) -> str:
    """Return the hash of a data URL's content, or of what is base64 alone. What is neither is hashed as it is."""
    head, comma, data = text.partition(",")
    try:
        content = base64.b64decode(data if comma else text, validate=True) if not comma or "base64" in head else None
    except (binascii.Error, ValueError):
        content = None
    return HASH + hashlib.sha256(text.encode("utf-8", "replace") if content is None else content).hexdigest()
