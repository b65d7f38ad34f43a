"""Choose which entries leave memory first. Pure."""

from collections.abc import Mapping
from itertools import islice
from typing import TypeVar

K = TypeVar("K")
_AT_ONCE = 16
"""When there are too many entries, one in this many is evicted at once."""


def oldest(entries: Mapping[K, object], most: int) -> list[K]:
    """Return the keys of the oldest entries to evict, if there are more than `most`: enough that the next eviction is
    not soon.

    Finding the first key of a dictionary takes longer the more keys before it were deleted. An OrderedDict knows its
    first key, but takes five times as long for everything else.
    """
    return list(islice(entries, len(entries) - most + most // _AT_ONCE)) if len(entries) > most else []
