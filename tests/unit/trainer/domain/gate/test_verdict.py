"""Verdicts on rewards, by hand and against simulated truth: `benchmarks/learning/gate.py` in its short form."""

import math
from statistics import NormalDist

import pytest

from benchmarks.learning.gate import Case, bar_holds, simulated
from trainer.domain.gate.verdict import (
    FEWEST,
    LOOKS,
    RESERVE,
    SPENT,
    Moments,
    compared,
    moments,
    paired,
    samples_needed,
    student,
    watched,
)
from whetstone.config.gate import GateSettings

GATE = GateSettings()
RUNS = 300


@pytest.mark.parametrize(
    ("freedom", "quantile"), [(7, 1.894579), (15, 1.753050), (30, 1.697261), (255, 1.650851)]
)  # tables of Student's t at 95 %
def test_quantiles_are_those_of_the_tables(freedom: int, quantile: float) -> None:
    assert student(0.95, freedom) == pytest.approx(quantile, rel=1e-3)


def test_moments_are_those_of_the_population() -> None:
    assert moments([0.0, 1.0, 1.0, 0.0]) == Moments(4, 0.5, 0.25)
    assert moments([]) == Moments(0, 0.0, 0.0)


def test_a_reward_too_large_for_arithmetic_still_has_moments() -> None:
    told = moments([1e308, -1e308, 1e308])
    assert math.isfinite(told.mean) and math.isfinite(told.variance)


def test_paired_differences_are_judged_by_students_t() -> None:
    differences = [-0.2, 0.1, -0.3, 0.0, -0.1, -0.4, 0.2, -0.3, -0.1, 0.0, -0.2, 0.1, -0.2, -0.3, 0.0, -0.1]
    # By hand: mean -0.1125, s = 0.17078, t = -2.635 against -1.753 at 15 degrees of freedom.
    verdict = paired(differences, GATE)
    assert verdict.decision == "reject"
    assert verdict.figures["difference"] == pytest.approx(-0.1125)
    assert verdict.figures["spread"] == pytest.approx(0.17078, rel=1e-4)
    assert verdict.figures["bound"] == pytest.approx(-1.75305 * 0.17078 / 4, rel=1e-3)
    assert paired([each + 0.05 for each in differences], GATE).decision == "pass"


@pytest.mark.parametrize(("difference", "decision"), [(-0.1, "reject"), (0.0, "pass"), (0.1, "pass")])
def test_differences_without_any_spread_are_what_they_are(difference: float, decision: str) -> None:
    assert paired([difference] * 16, GATE).decision == decision


def test_the_sample_is_that_of_the_formula() -> None:
    z = NormalDist().inv_cdf
    formula = (z(1 - 0.05 * 0.6) + z(0.8)) ** 2 * 0.25 / 0.05**2
    assert samples_needed(0.5, 0.1, GATE) == math.ceil(RESERVE * formula * (1 + 0.1 / 0.9)) == 873
    assert samples_needed(0.5, 0.5, GATE) == math.ceil(RESERVE * formula * 2) == 1572
    assert samples_needed(0.0, 0.5, GATE) == math.ceil(RESERVE * FEWEST * 2)


def test_the_looks_spend_no_more_than_the_allowed_error() -> None:
    assert sum(SPENT) == pytest.approx(1) and len(SPENT) == len(LOOKS) and LOOKS[-1] == 1


def test_nothing_is_decided_between_two_looks() -> None:
    parent = Moments(9000, 0.5, 0.25)
    awful = [compared(Moments(count, 0.1, 0.09), parent, GATE, 0) for count in (FEWEST - 1, 60)]
    assert [verdict.decision for verdict in awful] == ["testing", "testing"]
    first = compared(Moments(110, 0.5, 0.25), parent, GATE, 0)
    assert (first.decision, first.looked) == ("testing", 1)
    # It has become awful since, but the look is over.
    between = compared(Moments(180, 0.1, 0.09), parent, GATE, first.looked)
    assert (between.decision, between.looked) == ("testing", 1)
    second = compared(Moments(240, 0.1, 0.09), parent, GATE, between.looked)
    assert (second.decision, second.looked) == ("reject", 2)


def test_it_passes_at_the_last_look_only() -> None:
    better = Moments(450, 0.9, 0.25)
    assert compared(better, Moments(4050, 0.5, 0.25), GATE, 0).decision == "testing"
    enough = Moments(samples_needed(0.5, 0.1, GATE) + 1, 0.5, 0.25)
    verdict = compared(enough, Moments(9 * enough.count, 0.5, 0.25), GATE, 3)
    assert (verdict.decision, verdict.looked) == ("pass", 4)


def test_a_parent_without_enough_rewards_is_waited_for() -> None:
    many = Moments(100_000, 0.1, 0.09)
    assert compared(many, Moments(FEWEST - 1, 0.9, 0.09), GATE, 0).decision == "testing"
    assert compared(many, Moments(0, 0.0, 0.0), GATE, 0).decision == "testing"


def test_rewards_that_never_vary_are_decided_after_the_fewest() -> None:
    count = samples_needed(0.0, 0.5, GATE)
    same, worse = Moments(count, 1.0, 0.0), Moments(count, 0.9, 0.0)
    assert compared(same, same, GATE, 0).decision == "pass"
    assert compared(worse, same, GATE, 0).decision == "reject"


def test_the_watch_takes_as_many_of_the_parents_newest_as_it_needs() -> None:
    coin = [0.0, 1.0]
    needed = samples_needed(0.5, 0.5, GATE)
    live = Moments(needed, 0.5, 0.25)
    long_ago_all_was_well = [*coin * ((needed + 1) // 2), *[1.0] * 10 * needed]
    assert moments(long_ago_all_was_well).mean > 0.9
    verdict = watched(live, coin * needed, GATE, 3)
    assert (verdict.decision, verdict.figures["parent_count"]) == ("pass", needed)
    assert watched(live, long_ago_all_was_well, GATE, 0).figures["parent_mean"] < 0.51


def test_the_watch_ends_where_the_parent_spoke_too_little_and_says_what_it_could_see() -> None:
    needed = samples_needed(0.5, 0.5, GATE)
    verdict = watched(Moments(needed, 0.5, 0.25), [0.0, 1.0] * 50, GATE, 3)
    assert verdict.decision == "pass"
    assert verdict.figures["seen_loss"] == pytest.approx(2.722 * 0.5 * math.sqrt(1 / needed + 1 / 100), rel=1e-3)
    assert watched(Moments(needed, 0.5, 0.25), [], GATE, 0).decision == "testing"


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        Case("canary", "coin", 0.5),
        Case("canary", "skewed", 0.1),
        Case("canary", "clustered", 0.1),
        pytest.param(Case("watch", "uniform"), marks=pytest.mark.long(part="exact")),
        pytest.param(Case("watch", "clustered"), marks=pytest.mark.long(part="exact")),
    ],
)
def test_five_points_are_caught_and_no_change_is_let_be(case: Case) -> None:
    none, five = (simulated(case, loss, RUNS, 0, GATE) for loss in (0.0, 0.05))
    assert bar_holds(none, RUNS, GATE) and five.rejected + 2 * five.error >= GATE.power
    assert none.undecided == five.undecided == 0
    assert none.used < 1.1 * none.most  # and within the documented number


def test_prompts_that_both_versions_answered_tell_ten_points() -> None:
    none, ten = (simulated(Case("heldout", "coin"), loss, RUNS, 1, GATE) for loss in (0.0, 0.1))
    assert bar_holds(none, RUNS, GATE) and ten.rejected > 0.8
