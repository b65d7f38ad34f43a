"""Agreement of rankings: by hand, and against definitions that are slow and plain."""

import itertools
import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from judge.audit.agreement import (
    Pairs,
    auc,
    kendall_tau_b,
    mean_interval,
    pair_agreement,
    placed,
    position_bias,
    repeatability,
    threshold_of,
)
from judge.ruler.aggregate import verdict
from whetstone.domain.stats import share

FEW = st.sampled_from([0.0, 0.25, 0.5, 1.0])
RANKED = st.lists(st.tuples(FEW, FEW), min_size=2, max_size=8)


def sign(number):
    return (number > 0) - (number < 0)


@pytest.mark.parametrize(
    ("x", "y", "tau"),
    [
        ([1, 2, 3], [10, 20, 30], 1.0),
        ([1, 2, 3], [3, 2, 1], -1.0),
        ([1, 2, 3], [1, 3, 2], 1 / 3),
        # Of six pairs four are alike, one is tied in x only and one in y only: 4 / √(5 · 5).
        ([1, 1, 2, 3], [1, 2, 2, 3], 0.8),
        ([1, 1, 1], [1, 2, 3], None),
        ([1], [1], None),
        ([], [], None),
    ],
)
def test_tau_by_hand(x, y, tau):
    assert kendall_tau_b(x, y) == (None if tau is None else pytest.approx(tau))


@given(RANKED)
def test_tau_is_the_correlation_of_the_signs_of_differences(points):
    pairs = list(itertools.combinations(points, 2))
    dx, dy = ([sign(one[of] - other[of]) for one, other in pairs] for of in (0, 1))
    squared = sum(a * a for a in dx) * sum(b * b for b in dy)
    plain = sum(a * b for a, b in zip(dx, dy, strict=True)) / math.sqrt(squared) if squared else None
    found = kendall_tau_b(*zip(*points, strict=True))
    assert found == (None if plain is None else pytest.approx(plain))


@given(st.lists(st.tuples(FEW, st.booleans()), max_size=12))
def test_auc_is_the_share_of_pairs_in_which_the_good_one_is_ahead(points):
    good, bad = ([score for score, label in points if label is wanted] for wanted in (True, False))
    wins = [1.0 if one > other else 0.5 if one == other else 0.0 for one in good for other in bad]
    found = auc([score for score, _ in points], [label for _, label in points])
    assert found == (pytest.approx(statistics.fmean(wins)) if wins else None)


def test_only_pairs_of_one_group_that_both_tell_apart_count():
    groups = [[(0.1, 0), (0.2, 1), (0.3, 1)], [(0.9, 0), (0.5, 1)], [(0.5, 0), (0.5, 1)]]
    # Of the first group 0 against 1 and 2, both alike; of the second one pair, unlike; the third is a tie.
    assert pair_agreement(groups) == Pairs(alike=2, of=3, free=3)


def test_the_interval_counts_no_more_pairs_than_are_free():
    (pairs,) = [pair_agreement([[(place, place) for place in range(5)]] * 4)]
    assert (pairs.alike, pairs.of, pairs.free) == (40, 40, 16)
    assert pairs.share.mean == 1
    assert pairs.share.low == pytest.approx(share([1] * 16).low)
    assert Pairs().share is None


def test_a_mean_of_four_groups():
    # Deviation √(1/3), half width 1.96 · √(1/12).
    interval = mean_interval([0.0, 1.0, 0.0, 1.0])
    assert interval.mean == 0.5
    assert interval.high - interval.mean == pytest.approx(0.56579, abs=1e-4)
    assert mean_interval([1.0]) is None


def judged(rng, groups, favour, judgements=3, attempts=6, noise=0.05):
    """Groups of one section: each judgement in an order of its own, what is shown last scored higher by `favour`."""
    for _ in range(groups):
        worth = [rng.random() for _ in range(attempts)]
        section = []
        for _ in range(judgements):
            order = rng.sample(range(attempts), attempts)
            milder = rng.gauss(0, 0.1)
            at = [order.index(one) / (attempts - 1) for one in range(attempts)]
            scores = [worth[one] + milder + favour * at[one] + rng.gauss(0, noise) for one in range(attempts)]
            section.append({str(one): (scores[one], at[one]) for one in range(attempts)})
        yield [section]


@pytest.mark.parametrize("judgements", [1, 3])
def test_a_planted_position_bias_is_found(judgements):
    bias = position_bias(list(judged(random.Random(0), 200, 0.2, judgements)))
    assert 0 < bias.low <= 0.2 <= bias.high
    assert bias.high - bias.low < 0.15


def test_where_there_is_no_position_bias_zero_lies_in_nineteen_of_twenty_intervals():
    rng = random.Random(1)
    found = [position_bias(list(judged(rng, 40, 0.0))) for _ in range(100)]
    assert sum(one.low <= 0 <= one.high for one in found) >= 88


def test_a_position_bias_without_noise_is_found_exactly():
    bias = position_bias(list(judged(random.Random(2), 10, 0.25, noise=0.0)))
    assert (bias.low, bias.mean, bias.high) == (pytest.approx(0.25),) * 3


def test_a_few_groups_have_no_interval():
    assert position_bias(list(judged(random.Random(3), 9, 0.2))) is None
    assert position_bias([]) is None


def test_what_was_judged_once_is_compared_with_the_judgements_mean():
    assert placed([{"a": (0.2, 0.0), "b": (0.6, 1.0)}]) == [(-0.5, pytest.approx(-0.2)), (0.5, pytest.approx(0.2))]


def test_repeatability_by_hand():
    # Residuals ±0.05, one degree of freedom: √(4 · 0.0025 / 1); the two judgements order the one pair unlike.
    section = [{"a": (0.5, 0), "b": (0.6, 1)}, {"a": (0.7, 1), "b": (0.6, 0)}]
    noise, pairs = repeatability([section])
    assert noise == pytest.approx(0.1)
    assert pairs == Pairs(alike=0, of=1, free=1)


def test_repeatability_pools_what_verdicts_say_by_their_degrees_of_freedom():
    rng = random.Random(4)
    small = next(judged(rng, 1, 0, judgements=2, attempts=3))[0]
    large = next(judged(rng, 1, 0, judgements=4, attempts=5))[0]
    said = [
        verdict(len(section[0]), {(0, k): {int(a): x for a, (x, _) in one.items()} for k, one in enumerate(section)})
        for section in (small, large)
    ]
    noise, _ = repeatability([small, large, [{"a": (1.0, 0.0)}]])
    assert noise == pytest.approx(math.sqrt((2 * said[0].noise ** 2 + 12 * said[1].noise ** 2) / 14))


def test_what_was_judged_once_says_nothing_of_repeatability():
    assert repeatability([[{"a": (0.5, 0), "b": (0.6, 1)}]]) == (None, Pairs())


@pytest.mark.parametrize(
    ("references", "threshold"),
    [([0, 0, 0, 1], 1), ([0, 1, 1, 1], 1), ([0.1, 0.2, 0.3], 0.2), ([2, 2], 2), ([-1, 0, 1, 2], 0.5)],
)
def test_about_half_of_the_attempts_are_good(references, threshold):
    assert threshold_of(references) == threshold
