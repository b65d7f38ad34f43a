"""Choose which entries leave memory first. Pure."""

from itertools import islice
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")
_AT_ONCE = 16
"""When there are too many entries, one in this many is evicted at once."""


def evict_oldest(entries: dict[K, V], most: int) -> list[V]:
    """Remove the oldest entries if there are more than `most`: enough that the next eviction is not soon. Return them.

    Finding the first key of a dictionary takes longer the more keys before it were deleted. An OrderedDict knows its
    first key, but takes five times as long for everything else.
    """
    oldest = list(islice(entries, len(entries) - most + most // _AT_ONCE)) if len(entries) > most else []
    return [entries.pop(key) for key in oldest]
