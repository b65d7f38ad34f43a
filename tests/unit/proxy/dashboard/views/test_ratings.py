"""Which attempt to rate next, and how far raters agree: the formulas, against values worked by hand."""

import math
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from proxy.dashboard.views import agreement
from proxy.dashboard.views.priority import opinions, priority

NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)


def given(target: str, reward: float, *, rater: str | None = None, minute: int = 0, **values: Any) -> dict[str, Any]:
    row = {
        "id": f"{minute:03}", "target_kind": "trajectory", "target_id": target, "trajectory_id": target,
        "reward": reward, "metadata": None if rater is None else {"rater": rater}, "key_id": "app",
        "created_at": NOON + timedelta(minutes=minute),
    }  # fmt: skip
    return row | values


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], 1.0),
        ([1.0], math.sqrt(2 / 36 * 12)),
        ([0.0], math.sqrt(2 / 36 * 12)),
        ([1.0, 1.0], math.sqrt(3 / 80 * 12)),
        ([1.0, 0.0], math.sqrt(4 / 80 * 12) + 1.0),
        ([0.5, 0.5], math.sqrt(4 / 80 * 12)),
        ([0.75, 0.25], math.sqrt(4 / 80 * 12) + 0.5),
    ],
)
def test_priority_is_uncertainty_and_disagreement(values: list[float], expected: float) -> None:
    assert priority(values) == pytest.approx(expected)


def test_of_each_author_the_last_opinion_counts_and_the_whole_attempt_before_its_answers() -> None:
    attempt = {"id": "t", "reward": 0.3, "reward_source": "judge"}
    rows = [
        given("t", 1.0, rater="Anna", minute=5),
        given("t", 0.0, rater="Anna", minute=1),
        given("c1", 0.2, rater="Ben", target_kind="completion", trajectory_id="t"),
        given("c2", 0.6, rater="Ben", target_kind="completion", trajectory_id="t", minute=2),
        given("c1", 0.4, target_kind="completion", trajectory_id="t"),
        given("t", 7.0, trajectory_id=None, minute=3),
    ]
    judged = [("strong", {"t": {"score": 0.9}, "u": {"score": 0.1}}), ("strong", {"t": {"score": 0.1}})]
    of = opinions([attempt], rows, judged)["t"]
    assert of.of_attempt == {"rater Anna": 1.0, "key app": 1.0, "judge strong": 0.9}
    assert sorted(of.values) == pytest.approx([0.4, 0.9, 1.0, 1.0])


def test_a_reward_of_code_is_an_opinion() -> None:
    attempts = [{"id": "t", "reward": -2.0, "reward_source": "code"}, {"id": "u", "reward": 1.0, "reward_source": None}]
    both = opinions(attempts, [], [])
    assert (both["t"].values, both["u"].values) == ([0.0], [])


def test_alpha_is_as_in_its_paper() -> None:
    """Krippendorff's example C (2011): four observers, twelve units, missing values; interval alpha 0.849."""
    table = [
        [1, 2, 3, 3, 2, 1, 4, 1, 2, None, None, None],
        [1, 2, 3, 3, 2, 2, 4, 1, 2, 5, None, 3],
        [None, 3, 3, 3, 2, 3, 4, 2, 2, 5, 1, None],
        [1, 2, 3, 3, 2, 4, 4, 1, 2, 5, 1, None],
    ]
    ratings = {
        str(unit): {str(rater): float(value) for rater, row in enumerate(table) if (value := row[unit]) is not None}
        for unit in range(12)
    }
    assert agreement.alpha(ratings) == pytest.approx(0.849, abs=5e-4)


@pytest.mark.parametrize(
    ("ratings", "expected"),
    [
        ({}, None),
        ({"t": {"a": 1.0}}, None),
        ({"t": {"a": 0.1, "b": 0.1}, "u": {"a": 0.1, "b": 0.1}}, None),
        ({"t": {"a": 1.0, "b": 1.0}, "u": {"a": 0.0, "b": 0.0}}, 1.0),
        # D_o = 1, D_e = 8 / 12.
        ({"t": {"a": 1.0, "b": 0.0}, "u": {"a": 0.0, "b": 1.0}}, -0.5),
    ],
)
def test_alpha_of_little(ratings: agreement.Ratings, expected: float | None) -> None:
    assert agreement.alpha(ratings) == (expected if expected is None else pytest.approx(expected))


def test_raters_are_compared_by_what_both_have_rated() -> None:
    rows = [
        given("t", 1.0, rater="Anna", minute=9),
        given("t", 0.0, rater="Anna", minute=8),
        given("t", 0.75, rater="Ben", minute=7),
        given("u", 0.25, rater="Ben", minute=6),
        given("u", 0.75, rater="Anna", minute=5),
        given("v", 1.0, rater="Clara", minute=4),
    ]
    ratings = agreement.by_target(rows)
    assert ratings["t"] == {"Anna": 1.0, "Ben": 0.75}
    assert agreement.pairs(ratings) == [agreement.RaterPair("Anna", "Ben", 2, 0.5, 0.375)]
    anna, ben, clara = agreement.raters(rows)
    assert (anna.name, anna.ratings, ben.mean, clara.ratings) == ("Anna", 3, 0.5, 1)
