"""What a trajectory that is alone is compared with."""

import math
import random
from collections.abc import Iterator
from itertools import product
from statistics import fmean

import pytest

from trainer.domain.baselines import LARGEST, SHRINKAGE, WINDOW, Key, Mean, PromptMean, compare, remembered
from trainer.domain.eligible_groups import CandidateMember

TASK: Key = ("", "")


def single(name: str, reward: float, task: str = "", end_user: str = "") -> CandidateMember:
    return CandidateMember(name, reward, 0, 0, 1, task, end_user)


def thumbs(*rewards: float, task: str = "", end_user: str = "") -> list[CandidateMember]:
    return [single(f"{end_user}{place}", reward, task, end_user) for place, reward in enumerate(rewards)]


def test_without_history_each_is_compared_with_the_mean_of_the_others() -> None:
    compared = compare(thumbs(1.0, 0.0, 0.5), {})
    assert compared.baselines == pytest.approx({"0": 0.25, "1": 0.75, "2": 0.5})
    assert compared.means == {TASK: Mean(0.5, 3)}


def test_the_first_of_a_task_has_nothing_to_be_compared_with_and_is_there_for_the_next() -> None:
    first = compare([*thumbs(1.0, 0.0), single("lone", 0.8, task="rare")], {})
    assert set(first.baselines) == {"0", "1"}
    assert compare([single("next", 0.0, task="rare")], first.means).baselines == {"next": 0.8}


def test_history_counts_beside_the_others_of_the_step() -> None:
    compared = compare(thumbs(1.0, 0.0), {TASK: Mean(0.25, 8)})
    assert compared.baselines == pytest.approx({"0": 2 / 9, "1": 3 / 9})
    assert compared.means[TASK] == Mean(pytest.approx(0.3), 10)


def test_tasks_are_apart() -> None:
    compared = compare([*thumbs(1.0, 1.0, task="a"), *thumbs(0.0, 0.5, task="b")], {("a", ""): Mean(0.5, 2)})
    assert compared.means == {("a", ""): Mean(0.75, 4), ("b", ""): Mean(0.25, 2)}


def test_a_mean_forgets() -> None:
    for count in (WINDOW, 100 * WINDOW):
        moved = compare(thumbs(*[1.0] * WINDOW), {TASK: Mean(0.0, count)}).means[TASK]
        assert moved == Mean(0.5, count + WINDOW)


def test_no_reward_has_a_part_in_its_own_baseline() -> None:
    known = {TASK: Mean(0.3, 50), ("", "u"): Mean(0.9, 5)}
    others = [*thumbs(1.0, 0.0), single("same user", 1.0, end_user="u")]
    baselines = {compare([*others, single("it", own, end_user="u")], known).baselines["it"] for own in (0.0, 0.5)}
    assert max(baselines) - min(baselines) < 1e-15


def worlds() -> Iterator[tuple[float, tuple[int, ...]]]:
    """Every outcome of three attempts that each do well with probability 0.3, and how probable it is."""
    for done in product((0, 1), repeat=3):
        yield math.prod(0.3 if good else 0.7 for good in done), done


def test_the_gradient_has_the_expectation_it_has_without_a_baseline() -> None:
    def gradient(advantages: list[float], done: tuple[int, ...]) -> float:
        # d log p / d logit of a Bernoulli choice is what was chosen minus its probability.
        return sum(advantage * (good - 0.3) for advantage, good in zip(advantages, done, strict=True))

    known = {TASK: Mean(0.8, 20), ("", "u"): Mean(0.1, 4)}
    plain = ours = own_included = 0.0
    for probability, done in worlds():
        rewards = [float(good) for good in done]
        singles = [single(str(place), reward, end_user="u" * (place > 0)) for place, reward in enumerate(rewards)]
        of = compare(singles, known).baselines
        plain += probability * gradient(rewards, done)
        ours += probability * gradient([reward - of[str(place)] for place, reward in enumerate(rewards)], done)
        own_included += probability * gradient([reward - sum(rewards) / 3 for reward in rewards], done)
    assert ours == pytest.approx(plain) and plain == pytest.approx(3 * 0.3 * 0.7)
    assert own_included != pytest.approx(plain)


def test_a_users_mean_is_drawn_towards_the_tasks_the_less_is_known_of_the_user() -> None:
    known = {TASK: Mean(0.5, 400), ("", "new"): Mean(0.0, 2), ("", "old"): Mean(0.0, 400)}
    for user, n in (("new", 2), ("old", 400)):
        baseline = compare([single("it", 1.0, end_user=user)], known).baselines["it"]
        assert baseline == pytest.approx(0.5 * SHRINKAGE / (n + SHRINKAGE))


def test_a_user_of_whom_nothing_is_known_is_compared_with_everybody() -> None:
    assert compare([single("it", 1.0, end_user="u")], {TASK: Mean(0.4, 10)}).baselines == {"it": 0.4}


def test_a_harsh_and_a_kind_user_say_as_much_once_both_are_known() -> None:
    harsh, kind = [0.0] * 60 + [0.2] * 60, [0.8] * 60 + [1.0] * 60
    singles = [*thumbs(*harsh, end_user="harsh"), *thumbs(*kind, end_user="kind")]
    known = compare(singles, compare(singles, {}).means).means
    again = compare(singles, known).baselines
    advantage = {single.trajectory_id: single.reward - again[single.trajectory_id] for single in singles}
    assert advantage["harsh60"] == pytest.approx(0.1, abs=0.02) == advantage["kind60"]
    assert advantage["harsh0"] == pytest.approx(-0.1, abs=0.02) == advantage["kind0"]
    told_nothing = compare([single(str(place), one.reward) for place, one in enumerate(singles)], {}).baselines
    assert 0.2 - told_nothing["60"] < -0.25  # without users the harsh one's best answers would be unlearned


@pytest.mark.parametrize("reward", [0.1, 1 / 3, 1.0])
def test_equal_rewards_are_exactly_what_was_expected(reward: float) -> None:
    means: dict[Key, Mean] = {}
    for _ in range(3):
        compared = compare(thumbs(*[reward] * 7, end_user="u"), means)
        means = dict(compared.means)
        assert set(compared.baselines.values()) == {reward}


def test_a_mistaken_reward_does_not_end_all_learning() -> None:
    spoilt = compare(thumbs(1.7e308, -1.7e308, 1.7e308, 0.0), {}).means[TASK]
    assert abs(spoilt.mean) <= LARGEST
    baseline = compare([single("it", 1.0)], {TASK: spoilt}).baselines["it"]
    assert math.isfinite(baseline**2 * 1e6) and baseline**2 * 1e6 < 3e38


def test_nothing_alone_is_nothing_compared() -> None:
    compared = compare([], {TASK: Mean(0.5, 3)})
    assert (compared.baselines, compared.means) == ({}, {})


def prompted(*rewards: tuple[str, float]) -> list[CandidateMember]:
    return [
        CandidateMember(f"{place}", reward, 0, 0, 1, prompt=prompt) for place, (prompt, reward) in enumerate(rewards)
    ]


def test_what_is_known_of_a_prompt_moves_its_baseline_by_how_much_it_counts() -> None:
    singles = prompted(("p", 1.0), ("p", 0.0), ("q", 0.5), ("", 0.5))
    plain = compare(singles, {}).baselines
    both = compare(singles, {}, {"p": PromptMean(0.9, 3.0), "r": PromptMean(0.0, 100.0)}).baselines
    # p: three rewards of 0.9 from before, and the other of the step.
    for name, other in (("0", 0.0), ("1", 1.0)):
        expected = plain[name] + ((3 * 0.9 + other) / 4 - plain[name]) * 4 / (4 + SHRINKAGE)
        assert both[name] == pytest.approx(expected)
    # Of q nothing else is known, and what has no prompt is compared as before.
    assert (both["2"], both["3"]) == (plain["2"], plain["3"])


def test_rewards_of_a_prompt_count_half_after_the_policy_has_moved_by_the_half_life() -> None:
    assert [remembered(moved, 0.1) for moved in (0.0, 0.1, 0.3)] == pytest.approx([1.0, 0.5, 0.125])
    assert remembered(1e6, 0.1) == 0.0


def test_with_prompts_that_come_again_baselines_are_nearer_to_what_was_to_be_expected() -> None:
    """Prompts that are answered right with probability 0.1 to 0.9, each known by 16 rewards: the variance of the
    advantage falls by what differs between prompts, 0.25 -> 0.18 in expectation."""
    draw = random.Random(0)
    chances = {f"p{place}": 0.1 + 0.8 * place / 15 for place in range(16)}

    def reward(prompt: str) -> float:
        return float(draw.random() < chances[prompt])

    known = {prompt: PromptMean(fmean(reward(prompt) for _ in range(16)), 16.0) for prompt in chances}
    singles = prompted(*((prompt, reward(prompt)) for prompt in chances for _ in range(100)))
    spreads = []
    for prompts in (None, {}, known):
        gaps = (
            single.reward - compare([single], {TASK: Mean(0.5, 512)}, prompts).baselines[single.trajectory_id]
            for single in singles
        )
        spreads.append(fmean(gap**2 for gap in gaps))
    assert spreads[0] == spreads[1] > 0.24
    assert spreads[2] < 0.21
