"""What is kept in memory is bounded, and the oldest goes first."""

import pytest

from proxy.domain.eviction import evict_oldest


@pytest.mark.parametrize("most", [0, 1, 2, 15, 16, 17, 100])
def test_what_is_kept_stays_bounded_and_is_the_latest(most: int) -> None:
    entries: dict[int, None] = {}
    for place in range(1000):
        entries[place] = None
        evict_oldest(entries, most)
        assert most - most // 16 <= len(entries) <= most or place < most
        assert list(entries) == list(range(place + 1 - len(entries), place + 1))
