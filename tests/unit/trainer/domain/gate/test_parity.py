"""Noise of 16 bits rejects nobody; a wrong scale, wrong layers and half a rank are seen below it."""

import math
from dataclasses import replace

import numpy as np
import pytest

from trainer.domain.figures import mean_k3
from trainer.domain.gate.parity import LARGEST_K3, Parity, Readings, parity, served_share

TOKENS = 560
NOISE = 0.05
"""Nats, of each program in bf16 on SmolLM2 (their difference: 0.07)."""


class Draw:
    """Logprobs of one candidate's tokens as two programs compute them, each with noise of its own, of heavy tails."""

    def __init__(self, seed: int, effect: float, noise: float = NOISE, alike: int = 1) -> None:
        """`alike`: so many tokens each are the same one after the same prompt, as in short answers."""
        self._numbers = np.random.default_rng(seed)
        self._noise, self._alike, self._contexts = noise, alike, TOKENS // alike
        self.contexts = np.repeat(np.arange(self._contexts), alike).tolist()
        self.base_T = -self._each(self._numbers.gamma(2.0, 1.0, self._contexts))
        self.effect_T = effect * self._each(self._numbers.standard_normal(self._contexts))
        self.other_T = effect * self._each(self._numbers.standard_normal(self._contexts))
        """What an adapter in the wrong layers does instead."""

    def noisy(self, exact_T: np.ndarray) -> list[float]:
        noise_T = self._noise * self._each(self._numbers.standard_t(5, self._contexts)) * math.sqrt(3 / 5)
        return list((exact_T + noise_T).tolist())

    def _each(self, values: np.ndarray) -> np.ndarray:
        return np.repeat(values, self._alike)

    def parity(self, served_T: np.ndarray) -> Parity:
        trained = self.noisy(self.base_T + self.effect_T)
        doubled = self.noisy(self.base_T + 2 * self.effect_T)
        base = self.noisy(self.base_T)
        readings = Readings(self.noisy(self.base_T + served_T), trained, base, contexts=self.contexts)
        noise = mean_k3(self.noisy(self.base_T), self.noisy(self.base_T))
        if not readings.is_effect_large(noise):
            readings = replace(readings, doubled=doubled)
        return parity(readings, noise)


@pytest.mark.parametrize("effect", [0.0, 0.01, 0.1, 0.5])
@pytest.mark.parametrize("noise", [1e-6, NOISE])
def test_no_healthy_candidate_is_rejected_however_little_or_much_it_changed(effect: float, noise: float) -> None:
    draws = [Draw(seed, effect, noise) for seed in range(200)]
    assert [why for draw in draws if (why := draw.parity(draw.effect_T).why_not(None))] == []


def test_answers_that_are_equal_say_the_same_and_reject_no_healthy_candidate() -> None:
    """As if each were another's, one in seven would be rejected."""
    draws = [Draw(seed, effect=0.05, alike=14) for seed in range(200)]
    assert sum(draw.parity(draw.effect_T).why_not(None) is not None for draw in draws) <= 1
    wrong = [Draw(seed, effect=0.3, alike=14) for seed in range(100)]
    assert sum(draw.parity(0.5 * draw.effect_T).why_not(None) is not None for draw in wrong) >= 95


@pytest.mark.parametrize(
    "wrong", ["half the scale", "twice the scale", "wrong layers", "the base model", "half a rank"]
)
def test_every_wrong_adapter_is_rejected_though_its_k3_is_that_of_noise(wrong: str) -> None:
    for seed in range(100):
        draw = Draw(seed, effect=0.1)
        served_T = {
            "half the scale": 0.5 * draw.effect_T, "twice the scale": 2 * draw.effect_T,
            "wrong layers": draw.other_T, "the base model": 0 * draw.effect_T,
            "half a rank": 0.5 * draw.effect_T + 0.5 * draw.other_T,
        }[wrong]  # fmt: skip
        seen = draw.parity(served_T)
        assert seen.why_not(None) is not None and seen.k3 < 0.02
        assert seen.why_not(max_k3=1.0) is None
    assert "serves another adapter" in (replace(seen, k3=0.0).why_not(None) or "")


def test_the_share_is_that_of_the_effect_that_is_served() -> None:
    draw = Draw(1, effect=1.0, noise=0.0)
    for share in (0.0, 0.5, 1.0, 2.0):
        trained_T, doubled_T = draw.base_T + draw.effect_T, draw.base_T + 2 * draw.effect_T
        served_T = draw.base_T + share * draw.effect_T
        readings = Readings(served_T.tolist(), trained_T.tolist(), draw.base_T.tolist(), doubled_T.tolist())
        assert served_share(readings)[0] == pytest.approx(share)
        assert served_share(replace(readings, doubled=None))[0] == pytest.approx(share)
    assert served_share(Readings([-1.0], [-1.0], [-1.0], [-1.0])) == (1.0, math.inf)


HEALTHY = Parity(k3=2e-3, parent_k3=2e-3, share=1.0, error=0.1)


@pytest.mark.parametrize(
    ("seen", "allowed"),
    [
        (replace(HEALTHY, k3=7.9e-3), 8e-3),
        (replace(HEALTHY, k3=9e-4, parent_k3=1e-11), 1e-3),
        (replace(HEALTHY, k3=0.09, parent_k3=0.09), LARGEST_K3),
    ],
    ids=["four times the parent's", "at least so much as matters", "at most what one model can be off"],
)
def test_the_parents_k3_says_how_much_is_allowed(seen: Parity, allowed: float) -> None:
    assert seen.why_not(None) is None
    why = replace(seen, k3=allowed * 1.01).why_not(None)
    assert why is not None and f"allowed are {allowed:.3g}" in why


@pytest.mark.parametrize(("quantisation", "remedy"), [("nf4", "set it to int8 or none"), ("int8", "set it to none")])
def test_a_quantised_trainer_that_is_too_far_off_says_what_to_set(quantisation: str, remedy: str) -> None:
    far = replace(HEALTHY, k3=2 * LARGEST_K3, parent_k3=LARGEST_K3)
    assert remedy in (far.why_not(None, quantisation) or "")
    assert "quantisation" not in (far.why_not(None) or "")
    assert HEALTHY.why_not(None, quantisation) is None


def test_a_bound_that_is_set_decides_alone() -> None:
    assert replace(HEALTHY, k3=0.5, share=0.0, error=0.01).why_not(max_k3=1.0) is None
    assert "allowed are 0.001" in (HEALTHY.why_not(max_k3=0.001) or "")


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_numbers_that_are_not_finite_are_rejected(wrong: float) -> None:
    assert replace(HEALTHY, k3=wrong).why_not(None) is not None
    assert replace(HEALTHY, k3=wrong).why_not(1.0) is not None


def test_a_parent_without_a_finite_k3_allows_nothing() -> None:
    assert replace(HEALTHY, parent_k3=math.nan).why_not(None) is not None


@pytest.mark.parametrize(("share", "error", "rejected"), [(0.5, 0.1, True), (0.5, 0.2, False), (0.8, 0.01, False)])
def test_a_share_is_rejected_that_is_far_off_and_told_from_noise(share: float, error: float, rejected: bool) -> None:
    assert (replace(HEALTHY, share=share, error=error).why_not(None) is not None) is rejected
