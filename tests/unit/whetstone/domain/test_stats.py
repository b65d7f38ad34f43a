"""Shares and gains, against values worked by hand."""

import pytest

from whetstone.domain.stats import CLUSTERS, Sample, gain, paired, share, share_of, t_95, welch


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


def test_few_prompts_are_paired_attempt_by_attempt() -> None:
    # Differences 1, 0, 1, 0 as above, with Student's 3.1824 in place of 1.96.
    interval = paired([[1.0, 0.0], [1.0, 0.0], []])
    assert interval.mean == 0.5
    assert interval.high - interval.mean == pytest.approx(3.1824 * (1 / 12) ** 0.5, abs=1e-4)


def test_of_many_prompts_each_counts_once() -> None:
    """Four equal attempts at a prompt say no more than one."""
    once = [[float(prompt % 2)] for prompt in range(CLUSTERS)]
    four_times = [prompt * 4 for prompt in once]
    assert paired(four_times) == paired(once)
    # 15 differences of 0 and 15 of 1: sample variance 30/29 · 0.25.
    half = t_95(CLUSTERS - 1) * (0.25 / 29) ** 0.5
    assert (paired(once).mean, paired(once).low) == (0.5, pytest.approx(0.5 - half))


def test_a_prompt_counts_by_its_attempts() -> None:
    differences = [[1.0, 1.0, 1.0], *[[0.0]] * (CLUSTERS - 1)]
    interval = paired(differences)
    mean, n, count = 3 / (CLUSTERS + 2), CLUSTERS + 2, CLUSTERS
    squares = (3 - 3 * mean) ** 2 + (count - 1) * mean**2
    assert interval.mean == pytest.approx(mean)
    assert interval.high - mean == pytest.approx(t_95(count - 1) * (squares * count / (count - 1)) ** 0.5 / n)


def test_welchs_interval_is_that_of_a_worked_example() -> None:
    """Means 20 and 23, variances 16 and 4, 16 and 8 values: s² = 1.5, degrees 2.25 / (1/15 + 0.25/7) = 21.98."""
    interval = welch(Sample(16, 20.0, 16.0), Sample(8, 23.0, 4.0))
    assert interval.mean == 3.0
    assert interval.high - 3.0 == pytest.approx(2.0796 * 1.5**0.5, abs=1e-3)
    equal = welch(Sample(40, 1.0, 0.0), Sample(40, 1.0, 0.0))
    assert (equal.mean, equal.low, equal.high) == (0.0, 0.0, 0.0)


def test_a_share_of_a_sum_is_that_of_its_values() -> None:
    assert share_of(40.0, 100) == share([1] * 40 + [0] * 60)


@pytest.mark.parametrize(
    ("degrees", "expected"), [(1, 12.7062), (9, 2.2622), (10, 2.2281), (30, 2.0423), (1000, 1.9623)]
)
def test_students_quantiles_are_those_of_the_tables(degrees: int, expected: float) -> None:
    assert t_95(degrees) == pytest.approx(expected, abs=2e-4)


def test_one_value_has_no_interval() -> None:
    with pytest.raises(ValueError, match="one value"):
        t_95(0)
    with pytest.raises(ValueError, match="one value"):
        paired([[1.0], []])
    with pytest.raises(ValueError, match="one value"):
        welch(Sample(1, 1.0, 0.0), Sample(40, 1.0, 0.0))
