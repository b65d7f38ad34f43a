"""Decide when two requests are the same, to recognise a client's retry."""

import hashlib

WINDOW_S = 15 * 60
"""Longest time between a request and its retry; the official clients give up after seconds."""

_EMPTY = hashlib.sha256()
"""Copied for each digest: looking the algorithm up takes longer than hashing."""


Question = tuple[str, bytes, str | None]
"""What identifies a request: path, body, key."""


def digest_of(question: Question) -> str:
    """Return the hash of a request; it remains when the body is gone."""
    path, body, key_id = question
    made = _EMPTY.copy()
    made.update(f"{path}\0{key_id or ''}\0".encode() + body)
    return made.hexdigest()
