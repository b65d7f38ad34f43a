"""Several judgements made one, by hand: medians, noise, and sections laid over one another."""

import math
import random

import pytest

from judge.ruler.aggregate import verdict
from judge.ruler.ranking_input import sections


def judged(*by_place, section=0):
    """Judgements of one section: by place, the scores of attempts 0, 1, …"""
    return {(section, place): dict(enumerate(scores)) for place, scores in enumerate(by_place)}


def test_one_judgement_stands_as_it_is_and_knows_no_noise():
    said = verdict(3, judged((0.2, 1.0, 0.0)))
    assert (said.scores_G, said.noise) == ((0.2, 1.0, 0.0), None)


@pytest.mark.parametrize(
    ("by_place", "medians"),
    [
        ([(0.1, 0.9), (0.3, 0.8), (0.9, 0.0)], (0.3, 0.8)),
        ([(0.1, 0.9), (0.3, 0.5)], (0.2, 0.7)),
        ([(0.1, 0.9), (0.2, 0.9), (0.4, 0.5), (1.0, 0.5)], (0.3, 0.7)),
    ],
    ids=["three", "two", "four"],
)
def test_the_median_over_the_places_counts(by_place, medians):
    assert verdict(2, judged(*by_place)).scores_G == pytest.approx(medians)


def test_one_wild_judgement_of_three_moves_no_score():
    sober = [(0.2, 0.9, 0.5), (0.2, 0.9, 0.5)]
    assert verdict(3, judged(*sober, (1.0, 0.0, 1.0))).scores_G == (0.2, 0.9, 0.5)


def test_the_order_in_which_judgements_came_does_not_matter():
    came = list(judged((0.1, 0.9), (0.3, 0.5), (0.2, 0.6)).items())
    assert verdict(2, dict(came)) == verdict(2, dict(reversed(came)))


def test_noise_is_what_a_judgement_differs_beyond_being_stricter():
    # Means of the attempts 0.3, 0.7; of the judgements 0.45, 0.55; of all 0.5. Each residual is ±0.05:
    #   0.2 - 0.3 - 0.45 + 0.5 = -0.05, 0.7 - 0.7 - 0.45 + 0.5 = 0.05, and the other row the other way round.
    # Squares 4 · 0.0025 = 0.01 over (2 - 1)(2 - 1) = 1.
    assert verdict(2, judged((0.2, 0.7), (0.4, 0.7))).noise == pytest.approx(0.1)


def test_noise_of_three_attempts_judged_three_times():
    # Attempts' means 0.3, 0.5, 0.7 and judgements' 0.5, 0.5, 0.5. Residuals
    #   0.1 -0.1 0 / -0.1 0 0.1 / 0 0.1 -0.1: squares 6 · 0.01 over (3 - 1)(3 - 1) = 4.
    table = [(0.4, 0.4, 0.7), (0.2, 0.5, 0.8), (0.3, 0.6, 0.6)]
    assert verdict(3, judged(*table)).noise == pytest.approx(math.sqrt(0.06 / 4))


def test_a_judgement_that_is_stricter_throughout_is_no_noise():
    said = verdict(3, judged((0.4, 0.6, 0.9), (0.3, 0.5, 0.8), (0.1, 0.3, 0.6)))
    assert said.noise == pytest.approx(0, abs=1e-12)
    assert said.scores_G == pytest.approx((0.3, 0.5, 0.8))


def test_one_attempt_has_no_noise():
    assert verdict(1, judged((0.2,), (0.9,))).noise is None


def test_noise_of_sections_is_taken_together_by_their_degrees_of_freedom():
    # Section 0 as above: 0.01 over 1; section 1 without noise: 0 over (3 - 1)(2 - 1) = 2.
    first = {(0, 0): {0: 0.2, 1: 0.7}, (0, 1): {0: 0.4, 1: 0.7}}
    second = {(1, place): {0: 0.3, 1: 0.7, 2: 0.5} for place in range(2)}
    assert verdict(3, first | second).noise == pytest.approx(math.sqrt(0.01 / 3))


def test_two_sections_of_which_one_is_stricter():
    # Attempt 1 is in both, 0.6 and 0.4: b = ±0.1, so attempt 1 is worth 0.5, attempt 0 0.3 and attempt 2 0.9.
    said = verdict(3, {(0, 0): {0: 0.4, 1: 0.6}, (1, 0): {1: 0.4, 2: 0.8}})
    assert said.scores_G == pytest.approx((0.3, 0.5, 0.9))


@pytest.mark.parametrize(("attempts", "most"), [(9, 8), (14, 4), (24, 8), (30, 7), (64, 2), (100, 8), (250, 16)])
def test_sections_laid_over_one_another_give_back_what_was_planted(attempts, most):
    rng = random.Random(attempts)
    worth = [rng.uniform(0.3, 0.7) for _ in range(attempts)]
    parts = sections(attempts, most)
    strictness = [rng.uniform(-0.15, 0.15) for _ in parts]
    middle = sum(strictness) / len(parts)
    said = {
        (section, place): {one: worth[one] + strictness[section] - middle for one in part}
        for section, part in enumerate(parts)
        for place in range(2)
    }
    found = verdict(attempts, said)
    assert found.scores_G == pytest.approx(worth, abs=1e-9)
    assert found.noise == pytest.approx(0, abs=1e-9)


def test_errors_in_sections_are_spread_not_added_up():
    rng = random.Random(1)
    worth = [rng.uniform(0.3, 0.7) for _ in range(40)]
    said = {
        (section, 0): {one: worth[one] + rng.gauss(0, 0.02) for one in part}
        for section, part in enumerate(sections(40, 8))
    }
    found = verdict(40, said).scores_G
    assert max(abs(score - right) for score, right in zip(found, worth, strict=True)) < 0.08


def test_no_score_leaves_its_range():
    # Laid over one another they are 1.1, 0.9, 0.5 and -0.1: a range of 1.2.
    said = verdict(4, {(0, 0): {0: 1.0, 1: 0.8}, (1, 0): {1: 1.0, 2: 0.6, 3: 0.0}})
    assert said.scores_G == pytest.approx((1.0, 1.0 / 1.2, 0.6 / 1.2, 0.0))
    assert 0.0 <= min(said.scores_G) <= max(said.scores_G) <= 1.0


@pytest.mark.parametrize(
    ("first", "second", "scores"),
    [
        # Attempt 1 is in both, b = ±0.1. Laid over one another: 1.1, 0.9, 0.6; and -0.1, 0.1, 0.4.
        ((1.0, 0.8), (1.0, 0.7), (1.0, 0.8, 0.5)),
        ((0.0, 0.2), (0.0, 0.3), (0.0, 0.2, 0.5)),
    ],
    ids=["above", "below"],
)
def test_scores_that_leave_their_range_are_moved_together(first, second, scores):
    said = verdict(3, {(0, 0): dict(enumerate(first)), (1, 0): dict(enumerate(second, 1))})
    assert said.scores_G == pytest.approx(scores)


def test_attempts_that_differ_are_not_tied_by_the_end_of_the_range():
    # b = ±0.3 by attempts 2 and 3; attempts 0 and 1 come to 1.2 and 1.3.
    said = verdict(4, {(0, 0): {0: 0.9, 1: 1.0, 2: 0.4, 3: 0.2}, (1, 0): {2: 1.0, 3: 0.8}})
    assert said.scores_G == pytest.approx((0.9, 1.0, 0.4, 0.2))
