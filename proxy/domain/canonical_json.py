"""Encode JSON in one canonical form, independent of white space and the order of keys."""

from functools import lru_cache

import msgspec

LARGEST_KNOWN = 32 * 1024
"""Largest size of tools, in bytes, whose canonical form is cached."""

_sorted = msgspec.json.Encoder(order="deterministic").encode


def canonical(raw: msgspec.Raw) -> bytes:
    """Return the canonical form. Small values are cached."""
    return _canonical_known(bytes(raw)) if len(raw) <= LARGEST_KNOWN else sorted_keys(raw)


def sorted_keys(raw: msgspec.Raw | bytes) -> bytes:
    """Return the JSON with the keys of its objects sorted and no white space."""
    return _sorted(msgspec.json.decode(raw))


# An agent sends the same tools with every request.
_canonical_known = lru_cache(64)(sorted_keys)
