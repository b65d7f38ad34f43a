"""A sample has about its share, and the same members whenever it is drawn."""

import pytest

from whetstone.domain.sampling_share import in_share


@pytest.mark.parametrize("share", [0.05, 0.3, 0.9])
def test_a_sample_has_about_its_share(share):
    drawn = sum(in_share(f"strong group-{number}", share) for number in range(20_000))
    # Within five standard deviations.
    assert abs(drawn / 20_000 - share) < 5 * (share * (1 - share) / 20_000) ** 0.5


def test_a_sample_is_the_same_whenever_it_is_drawn_and_grows_with_its_share():
    keys = [f"review {number}" for number in range(500)]
    small, large = ({key for key in keys if in_share(key, share)} for share in (0.2, 0.6))
    assert small == {key for key in keys if in_share(key, 0.2)}
    assert small < large
    assert all(in_share(key, 1) and not in_share(key, 0) for key in keys)
