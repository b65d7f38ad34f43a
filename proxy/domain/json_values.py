"""Encode JSON in one canonical form, independent of white space and the order of keys, and measure its depth. Pure.

JSON that is nested too deep could crash a parser further on.
"""

from functools import lru_cache
from typing import Any

import msgspec

MAX_DEPTH = 200
"""Deepest nesting of a body. Later parsers, vLLM's and SQL's, are limited by Python's stack."""
LARGEST_KNOWN = 32 * 1024
"""Largest size of tools, in bytes, whose canonical form is cached."""

encode_sorted = msgspec.json.Encoder(order="deterministic").encode


def canonical(raw: msgspec.Raw) -> bytes:
    """Return the canonical form. Small values are cached."""
    return _canonical_known(bytes(raw)) if len(raw) <= LARGEST_KNOWN else sorted_keys(raw)


def sorted_keys(raw: msgspec.Raw | bytes) -> bytes:
    """Return the JSON with the keys of its objects sorted and no white space."""
    return encode_sorted(msgspec.json.decode(raw))


# An agent sends the same tools with every request.
_canonical_known = lru_cache(64)(sorted_keys)


def depth(value: Any) -> int:
    """Return how deep lists and objects are nested in one another."""
    levels, level = 0, [value]
    while level := [inner for inner in level if isinstance(inner, dict | list)]:
        levels += 1
        level = [deeper for inner in level for deeper in (inner.values() if isinstance(inner, dict) else inner)]
    return levels
