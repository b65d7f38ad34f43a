"""What is kept in memory is bounded, and the oldest goes first."""

import pytest

from proxy.domain.eviction import oldest


@pytest.mark.parametrize("most", [0, 1, 2, 15, 16, 17, 100])
def test_what_is_kept_stays_bounded_and_is_the_latest(most: int) -> None:
    kept: dict[int, None] = {}
    for place in range(1000):
        kept[place] = None
        for forgotten in oldest(kept, most):
            del kept[forgotten]
        assert most - most // 16 <= len(kept) <= most or place < most
        assert list(kept) == list(range(place + 1 - len(kept), place + 1))
