"""Shares and gains, against values worked by hand."""

import pytest

from whetstone.domain.stats import gain, share, t_95


def test_wilsons_interval_of_forty_in_a_hundred() -> None:
    interval = share([1] * 40 + [0] * 60)
    # (0.4 + 3.8415/200) / 1.038415 ± 1.96/1.038415 · sqrt(0.24/100 + 3.8415/40000)
    assert interval.mean == 0.4
    assert interval.low == pytest.approx(0.3094, abs=1e-4)
    assert interval.high == pytest.approx(0.4980, abs=1e-4)


@pytest.mark.parametrize(("won", "low", "high"), [([0] * 10, 0.0, 0.2775), ([1] * 10, 0.7225, 1.0)])
def test_an_interval_stays_between_nothing_and_all(won: list[int], low: float, high: float) -> None:
    interval = share(won)
    assert (interval.low, interval.high) == (pytest.approx(low, abs=1e-4), pytest.approx(high, abs=1e-4))


def test_a_gain_is_paired_game_by_game() -> None:
    # Differences 1, 0, 1, 0: mean 0.5, sample deviation sqrt(1/3), half width 1.96 · sqrt(1/12).
    interval = gain([0, 1, 0, 0], [1, 1, 1, 0])
    assert interval.mean == 0.5
    assert interval.high - interval.mean == pytest.approx(0.56579, abs=1e-4)


def test_what_is_no_pair_is_refused() -> None:
    with pytest.raises(ValueError, match="not pairs"):
        gain([0, 1], [1])
    with pytest.raises(ValueError, match="nothing"):
        share([])


@pytest.mark.parametrize(
    ("degrees", "expected"), [(1, 12.7062), (9, 2.2622), (10, 2.2281), (30, 2.0423), (1000, 1.9623)]
)
def test_students_quantiles_are_those_of_the_tables(degrees: int, expected: float) -> None:
    assert t_95(degrees) == pytest.approx(expected, abs=2e-4)


def test_one_value_has_no_interval() -> None:
    with pytest.raises(ValueError, match="one value"):
        t_95(0)
