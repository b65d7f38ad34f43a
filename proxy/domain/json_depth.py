"""Measure how deep JSON is nested: deeper JSON could crash a parser further on."""

from typing import Any

MAX_DEPTH = 200
"""Deepest nesting of a body. Later parsers, vLLM's and SQL's, are limited by Python's stack."""


def depth(value: Any) -> int:
    """Return how deep lists and objects are nested in one another."""
    levels, level = 0, [value]
    while level := [inner for inner in level if isinstance(inner, dict | list)]:
        levels += 1
        level = [deeper for inner in level for deeper in (inner.values() if isinstance(inner, dict) else inner)]
    return levels
