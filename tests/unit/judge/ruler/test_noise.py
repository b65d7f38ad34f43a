"""Groups whose rewards differ by less than their judges differ from themselves: they are not trained on."""

import pytest

from migrations import schema
from tests.unit.judge.ruler.conftest import HOUR_S, always

pytestmark = pytest.mark.slow

ALIKE = (0.5, 0.5001, 0.4999)


def test_the_median_of_the_judgements_counts_and_their_noise_is_kept(court):
    court.group(0.2, 0.9)
    court.server.noise = lambda number, said: 0.1 if number == 1 and "try 0" in said else 0.0
    court.ask()
    court.run()
    rewards = court.rewards()
    assert rewards == {"g0": 0.2, "g1": 0.9}
    assert 0 < court.state().judge_noise < 0.1


def test_a_group_within_the_judges_noise_is_not_trained_on(court):
    court.group(0.5, 0.5001, 0.4999)
    court.ask()
    court.run()
    assert (court.state().state, court.state().reason) == ("discarded", "judge_noise")
    assert {court.trajectory(name).why_not_trained for name in court.rewards()} == {"judge_noise"}
    assert court.rewards()["g0"] == 0.5


def test_attempts_of_equal_worth_get_equal_rewards_and_no_step(court):
    court.group(*[0.5] * 8)
    court.ask()
    court.run()
    assert set(court.rewards().values()) == {0.5}
    assert (court.state().state, court.state().reason) == ("discarded", "judge_noise")


def test_a_group_whose_judges_disagree_more_than_its_attempts_do_is_not_trained_on(court):
    court.ruler["judgements"] = 4
    court.group(0.48, 0.52)
    court.server.noise = lambda number, said: 0.3 if (number + ("try 0" in said)) % 2 else -0.3
    court.ask()
    court.run()
    assert (court.state().state, court.state().reason) == ("discarded", "judge_noise")


def test_a_score_that_an_app_has_replaced_does_not_hide_the_noise_of_the_others(court):
    court.group(*ALIKE)
    court.seed.feedback("g0", 0.5)
    court.ask()
    court.run()
    assert court.trajectory("g0").reward_source == "trajectory"
    assert (court.state().state, court.state().reason) == ("discarded", "judge_noise")


@pytest.mark.parametrize("weight", [0.5, -0.5])
@pytest.mark.parametrize(("worth", "state"), [((0.5, 0.518), "discarded"), ((0.5, 0.522), "scored")])
def test_a_weight_weighs_the_noise_too(court, weight, worth, state):
    court.ruler |= {"weight": weight, "min_spread": 0.01}
    court.group(*worth)
    for name in ("g0", "g1"):
        court.seed.feedback(name, 1.0)
    court.ask()
    court.run()
    # Scores of s ± 0.01 make rewards of r ± |weight| × 0.01.
    assert court.rewards() == pytest.approx({f"g{place}": 1.0 + weight * each for place, each in enumerate(worth)})
    assert court.state().state == state


def test_what_the_app_alone_said_may_differ_by_less_than_judges_do(court):
    court.group(*ALIKE)
    for name in ("g0", "g1", "g2"):
        court.seed.feedback(name, 0.999 if name == "g0" else 1.0)
    court.ask()
    court.run()
    assert court.server.calls == 3
    assert court.state().state == "scored"


def test_old_scores_within_noise_are_not_trained_on_when_judges_never_see_a_late_member(court):
    court.ruler["wait_s"] = HOUR_S
    court.group(*ALIKE)
    court.ask()
    court.sweep()
    court.rank()
    court.attempt("late", "worth 0.7", placed_at=None)
    court.server.fault = always("overloaded")
    court.after_s = 5.0
    court.run()
    assert court.state().state == "closed"
    court.after_s = 30 * HOUR_S
    court.run()
    assert court.rewards() == {"g0": 0.5, "g1": 0.5001, "g2": 0.4999, "late": None}
    assert (court.state().state, court.state().reason) == ("discarded", "judge_noise")
    assert court.state().judge_waits is None


def test_what_the_app_says_of_members_within_noise_is_trained_on_with_the_baseline(court):
    court.group(*ALIKE)
    court.ask()
    court.run()
    court.after_s = 5.0
    court.seed.feedback("g0", 1.0, created_at=court.now)
    court.seed.feedback("g1", 0.0, created_at=court.now)
    court.sweep()
    court.after_s = 6.0
    court.sweep()
    for name, reward in (("g0", 1.0), ("g1", 0.0)):
        one = court.trajectory(name)
        assert (one.reward, one.state, one.why_not_trained) == (reward, "rewarded", "waiting_step")
        assert (court.state(one.group_id).state, court.state(one.group_id).compared_with) == ("scored", "baseline")
    left = court.trajectory("g2")
    assert (left.group_id, left.reward, left.why_not_trained) == ("g", 0.4999, "judge_noise")


def test_a_reason_of_the_capture_outlasts_the_noise(court):
    court.group(*ALIKE)
    court.change(schema.trajectories, "g0", why_not_trained="no_tokens")
    court.ask()
    court.run()
    assert court.state().reason == "judge_noise"
    court.after_s = 5.0
    court.seed.feedback("g0", 1.0, created_at=court.now)
    court.sweep()
    court.after_s = 6.0
    court.sweep()
    one = court.trajectory("g0")
    assert (one.group_id, one.reward, one.why_not_trained) == ("g", 1.0, "no_tokens")
