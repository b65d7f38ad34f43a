"""Which of what is kept in memory goes first. Pure."""

from collections.abc import Mapping
from itertools import islice
from typing import TypeVar

K = TypeVar("K")
_AT_ONCE = 16
"""Part of what is kept that goes at once, where it is too much: one of so many."""


def oldest(kept: Mapping[K, object], most: int) -> list[K]:
    """Keys of the oldest, where more than `most` are kept: so many that it need not be asked again soon.

    To find the first key of a dictionary that has lost those before it takes as long as they are many; one that also
    knows its first key, as OrderedDict does, takes five times as long for all else.
    """
    return list(islice(kept, len(kept) - most + most // _AT_ONCE)) if len(kept) > most else []
