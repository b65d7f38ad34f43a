"""The share that a policy answers, by rewards drawn at random from known distributions."""

import random

import pytest

from trainer.domain.gate.handover import LOOKS, handed_over
from trainer.domain.gate.verdict import Moments, moments
from whetstone.config.rewards import HandoverSettings

SETTINGS = HandoverSettings(teacher="t", shares=(0.05, 0.25, 0.5, 0.9), margin=0.05)


def of_mean(mean: float, count: int, spread: float = 0.5) -> Moments:
    return Moments(count, mean, spread**2)


class Traffic:
    """Attempts that win by chance, and the looks at them."""

    def __init__(self, seed: int, settings: HandoverSettings = SETTINGS, share: float | None = None) -> None:
        self.rng = random.Random(seed)
        self.settings = settings
        self.share = settings.shares[0] if share is None else share
        self.decisions: list[str] = []
        self.attempts = 0
        self._begin()

    def _begin(self) -> None:
        self.own: list[float] = []
        self.teacher: list[float] = []
        self.looked = 0

    def serve(self, own: float, teacher: float) -> None:
        """One attempt, by the policy or its teacher, each of which wins with its own probability."""
        self.attempts += 1
        answers = self.rng.random() < self.share
        (self.own if answers else self.teacher).append(float(self.rng.random() < (own if answers else teacher)))
        if min(len(self.own), len(self.teacher)) not in LOOKS:
            return
        verdict = handed_over(moments(self.own), moments(self.teacher), self.share, self.looked, self.settings)
        if verdict is None:
            return
        self.decisions.append(verdict.decision)
        if verdict.decision == "testing":
            self.looked = int(verdict.figures["look"])
        else:
            self.share = verdict.share
            self._begin()


def test_nothing_is_decided_before_the_first_look() -> None:
    assert handed_over(of_mean(1, LOOKS[0] - 1), of_mean(0, 1000), 0.05, 0, SETTINGS) is None
    assert handed_over(of_mean(1, 1000), of_mean(0, LOOKS[0] - 1), 0.05, 0, SETTINGS) is None
    assert handed_over(Moments(0, 0.0, 0.0), Moments(0, 0.0, 0.0), 0.05, 0, SETTINGS) is None


def test_a_look_decides_once() -> None:
    first = handed_over(of_mean(0.5, 50), of_mean(0.5, 70), 0.05, 0, SETTINGS)
    assert first is not None
    assert (first.decision, first.share, first.figures["look"]) == ("testing", 0.05, 1)
    assert handed_over(of_mean(0.5, 99), of_mean(0.5, 99), 0.05, 1, SETTINGS) is None
    assert handed_over(of_mean(0.5, 100), of_mean(0.5, 100), 0.05, 1, SETTINGS) is not None


def test_the_bounds_are_those_of_welch_at_the_error_of_a_look() -> None:
    verdict = handed_over(of_mean(0.4, 50), of_mean(0.5, 200), 0.25, 0, SETTINGS)
    assert verdict is not None
    # s² / (n - 1): 0.25/49 and 0.25/199; 73.0 degrees of freedom; the 0.9875 quantile of Student's t there is 2.2888.
    half = 2.2888 * (0.25 / 49 + 0.25 / 199) ** 0.5
    assert verdict.figures["low"] == pytest.approx(-0.1 - half, abs=2e-4)
    assert verdict.figures["high"] == pytest.approx(-0.1 + half, abs=2e-4)


def test_the_share_rises_by_one_and_falls_to_the_first() -> None:
    better = handed_over(of_mean(0.9, 50), of_mean(0.5, 50), 0.05, 0, SETTINGS)
    worse = handed_over(of_mean(0.1, 50), of_mean(0.6, 50), 0.9, 0, SETTINGS)
    assert better is not None
    assert worse is not None
    assert (better.decision, better.share) == ("raise", 0.25)
    assert (worse.decision, worse.share) == ("lower", 0.05)


def test_the_largest_share_stays_and_begins_a_new_comparison() -> None:
    verdict = handed_over(of_mean(0.9, 50), of_mean(0.5, 50), 0.9, 0, SETTINGS)
    assert verdict is not None
    assert (verdict.decision, verdict.share) == ("stay", 0.9)


def test_after_the_last_look_without_a_decision_the_share_stays() -> None:
    verdict = handed_over(of_mean(0.45, LOOKS[-1]), of_mean(0.5, LOOKS[-1]), 0.25, len(LOOKS) - 1, SETTINGS)
    assert verdict is not None
    assert (verdict.decision, verdict.share) == ("stay", 0.25)


def test_equal_rewards_without_any_spread_are_as_good() -> None:
    verdict = handed_over(of_mean(1, 50, 0), of_mean(1, 50, 0), 0.25, 0, SETTINGS)
    assert verdict is not None
    assert verdict.decision == "raise"


@pytest.mark.parametrize("seed", range(5))
def test_a_policy_that_overtakes_its_teacher_takes_over(seed: int) -> None:
    traffic = Traffic(seed)
    while traffic.share < 0.9:
        # From 30 % to 90 % right over the first 4,000 attempts, its teacher 60 %.
        traffic.serve(min(0.9, 0.3 + 0.6 * traffic.attempts / 4000), 0.6)
        assert traffic.attempts < 20_000
    assert traffic.decisions.count("raise") >= 3


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("share", [0.25, 0.5, 0.9])
def test_a_bad_policy_is_sent_back_within_the_documented_number(seed: int, share: float) -> None:
    """0.3 below the teacher: detected with probability 0.8 at 100 groups of each, and nearly always at 200."""
    traffic = Traffic(seed, share=share)
    while traffic.share == share:
        traffic.serve(0.3, 0.6)
        assert min(len(traffic.own), len(traffic.teacher)) <= 200
    assert traffic.share == SETTINGS.shares[0]


def test_a_policy_at_the_margin_rises_no_more_often_than_the_allowed_error() -> None:
    """Each period ends with its first decision. Of 400 periods 5 % may rise; 0.08 is four standard errors above."""
    raised = 0
    for seed in range(400):
        traffic = Traffic(seed, share=0.5)
        while not traffic.decisions or traffic.decisions[-1] == "testing":
            traffic.serve(0.55, 0.6)
        raised += traffic.decisions[-1] == "raise"
    assert raised / 400 <= 0.05 + 4 * (0.05 * 0.95 / 400) ** 0.5


def test_shares_must_rise() -> None:
    with pytest.raises(ValueError, match=r"shares must rise: 0\.1, 0\.5"):
        HandoverSettings(teacher="t", shares=(0.5, 0.1))
